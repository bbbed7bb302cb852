"""JSON Schemas of search files and configurations, for editors that complete and check YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunediff.config import Knob, Schema
from tunediff.search_space.sections import COSTS, MAX_SEEDS, File

DRAFT = "https://json-schema.org/draft/2020-12/schema"
Json = dict[str, Any]
DURATION: Json = {"type": "string", "pattern": r"^\s*(\d+(\.\d+)?h)?(\d+(\.\d+)?m)?(\d+(\.\d+)?s)?\s*$"}
TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "tuple": "array"}


def search_file(schema: Schema, workloads: Iterable[str]) -> Json:
    """Return the schema of search files of one workload; `workloads`: names that `workload:` completes.

    Knobs may be nested by section or dotted, as the reader of search files takes them.
    """
    knobs = schema.knobs
    values, drawn, points = (_nested(knobs, form) for form in (_value, _searched, _several))
    top: Json = {
        "workload": {"type": "string", "examples": list(workloads)},
        "base": {"type": "string"},
        "objective": {"type": ["string", "array", "object"], "examples": ["samples_per_s", *COSTS]},
        "budget": _budget(),
        "seeds": {"type": "integer", "minimum": 2, "maximum": MAX_SEEDS},
        "noise": {"type": "integer", "minimum": 1, "maximum": MAX_SEEDS},
        "fixed": values, "baseline": values, "search": drawn, "grid": points,
        "trials": {"type": "array", "items": values}, "first": {"type": "array", "items": values},
        "ladder": {"type": "object", "additionalProperties": values},
        "study": {"type": "object"}, "confirm": _confirm(),
        "early_stopping": {"enum": ["none", "asha", "median"]},
        "seed": {"type": "integer", "minimum": 0},
        "fresh": {"type": "boolean"}, "alone": {"type": "boolean"},
        "operations": {"type": "integer", "minimum": 0, "maximum": 1000},
        "warm_start": {"type": "string"}, "final": values,
    }  # fmt: skip
    keys = {field.name for field in dataclasses.fields(File)}
    assert keys == top.keys(), keys ^ top.keys()
    return {
        "$schema": DRAFT, "title": f"tunediff search file: {schema.title}", "type": "object",
        "properties": top, "additionalProperties": False,
    }  # fmt: skip


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


def _budget() -> Json:
    keys: Json = {
        "per_trial": DURATION, "unit": {"enum": ["wall", "device"]}, "trials": {"type": "integer", "minimum": 1},
        "price_per_device_hour": {"type": "number", "exclusiveMinimum": 0}, "total": DURATION,
        "compile": {"enum": ["charged", "free"]}, "deadline": DURATION,
    }  # fmt: skip
    return {"type": "object", "properties": keys, "additionalProperties": False}


def _confirm() -> Json:
    keys: Json = {
        "of": {"type": "integer", "minimum": 1, "maximum": 20},
        "seeds": {"type": "integer", "minimum": 2, "maximum": MAX_SEEDS},
        "budgets": {"type": "array", "items": {"type": "string", "pattern": r"^[1-9]\d*x$"}},
        "final": {"type": "object"},
    }
    return {"type": "object", "properties": keys, "additionalProperties": False}
