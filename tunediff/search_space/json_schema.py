"""JSON Schemas of search files and configurations, for editors that complete and check YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from tunediff.config import Knob, Schema
from tunediff.search_space.sections import COSTS, Budget, Confirm, File

DRAFT = "https://json-schema.org/draft/2020-12/schema"
Json = dict[str, Any]
TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "tuple": "array"}


class _WithoutNull(GenerateJsonSchema):
    """None in a section means that the key is absent: null itself is refused."""

    def nullable_schema(self, schema: Any) -> Any:
        return self.generate_inner(schema["schema"])


def _section(cls: type) -> Json:
    """Return the schema of a section; options of the command line can stand for every key of it."""
    return {**TypeAdapter(cls).json_schema(schema_generator=_WithoutNull), "required": []}


def search_file(schema: Schema, workloads: Iterable[str]) -> Json:
    """Return the schema of search files of one workload; `workloads`: names that `workload:` completes.

    Knobs may be nested by section or dotted, as the reader of search files takes them.
    """
    values, drawn, points = (_nested(schema.knobs, form) for form in (_value, _searched, _several))
    content = _section(File)
    content["properties"] |= {
        "workload": {"type": "string", "examples": list(workloads)},
        "objective": {"type": ["string", "array", "object"], "examples": ["samples_per_s", *COSTS]},
        "budget": _section(Budget), "confirm": _section(Confirm), "study": {"type": "object"},
        "fixed": values, "baseline": values, "final": values, "search": drawn, "grid": points,
        "trials": {"type": "array", "items": values}, "first": {"type": "array", "items": values},
        "ladder": {"type": "object", "additionalProperties": values},
    }  # fmt: skip
    return {**content, "$schema": DRAFT, "title": f"tunediff search file: {schema.title}"}


def configuration(schema: Schema) -> Json:
    """Return the schema of configuration files of one workload, such as an exported best.yaml."""
    content = _nested(schema.knobs, _value)
    content["properties"]["workload"] = {"type": "string"}
    return {"$schema": DRAFT, "title": f"tunediff configuration: {schema.title}", **content}


def _nested(knobs: Mapping[str, Knob], form: Callable[[Knob], Json]) -> Json:
    """Return an object with every knob, dotted and inside its section, each in the given form."""
    properties: Json = {name: form(knob) for name, knob in knobs.items()}
    for name, knob in knobs.items():
        *sections, leaf = name.split(".")
        inside = properties
        for section in sections:
            empty: Json = {"type": "object", "properties": {}, "additionalProperties": False}
            inside = inside.setdefault(section, empty)["properties"]
        inside[leaf] = form(knob)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value(knob: Knob) -> Json:
    """Return the schema of a knob's own value."""
    content: Json = {"description": knob.description, "default": knob.default}
    if knob.choices is not None:
        return content | {"enum": [*knob.choices, *([None] if knob.optional else [])]}
    kind = TYPES[knob.kind]
    content["type"] = [kind, "null"] if knob.optional else kind
    if knob.low is not None:
        content["exclusiveMinimum" if knob.low_open else "minimum"] = knob.low
    if knob.high is not None:
        content["exclusiveMaximum" if knob.high_open else "maximum"] = knob.high
    return content


def _searched(knob: Knob) -> Json:
    """Return the schema of where a knob is searched: a list of values, a range, or a choice under a condition."""
    number: Json = {"type": "integer" if knob.kind == "int" else "number"}
    spec: Json = {
        "choice": {"type": "array", "items": _value(knob)}, "low": number, "high": number,
        "step": {"type": "number", "exclusiveMinimum": 0}, "log": {"type": "boolean"}, "when": {"type": "object"},
    }  # fmt: skip
    range_or_choice = {"type": "object", "properties": spec, "additionalProperties": False}
    return {"description": knob.description, "anyOf": [{"type": "array", "items": _value(knob)}, range_or_choice]}


def _several(knob: Knob) -> Json:
    """Return the schema of a knob's values in a grid; some take the word `all`."""
    values = {"type": "array", "items": _value(knob)}
    return {"description": knob.description, "anyOf": [values, {"const": "all"}, {"type": "object"}]}
