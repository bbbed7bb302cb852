"""JSON Schemas of search files and configurations, for editors that complete and check YAML."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from tunediff import config as cfg
from tunediff.config import Knob, Schema
from tunediff.search_space.sections import (
    COSTS,
    BudgetSection,
    Confirm,
    ObjectiveSection,
    SearchFile,
)

DRAFT = "https://json-schema.org/draft/2020-12/schema"
Json = dict[str, Any]
HELP = {
    "workload": "what is trained: cifar10, digits, images, …_classifier, mine.py; or base:",
    "base": "a configuration file from which the baseline is taken, such as best.yaml",
    "objective": (
        "the metric that decides; with a second one, such as device_s, trade-offs; samples_per_s:"
        " throughput; {target: accuracy>=0.9}: the least seconds until then"
    ),
    "budget": "training seconds of a trial, number of trials, limits of the search",
    "seeds": "runs of every point, on as many seeds",
    "noise": "runs of the baseline in a search: what they differ by is the noise of one run",
    "reruns": (
        "trials of a search that run what leads again on other seeds, at its end, before finalists"
        " are chosen"
    ),
    "fixed": "knobs with the same value in every trial",
    "baseline": "values of searched knobs in the baseline, which is trial 0",
    "search": "knobs that Optuna draws, each from a list of values or a range",
    "grid": "knobs of which every combination is run",
    "trials": "the points to run, each an object of the knobs that differ from the baseline",
    "first": "points of a search that are run first",
    "ladder": "named changes: run one on top of the other, and each alone",
    "study": "columns and axes of the table and the figure at the end",
    "confirm": "how the best configurations run again on new seeds",
    "early_stopping": "the rule that stops trials early, from half of their budget on",
    "seed": "of the search's random numbers; that of a training is the knob seed",
    "fresh": "has no effect: every trial runs in a process of its own",
    "alone": "run one trial at a time",
    "trials_per_gpu": "trials of one worker that share each GPU",
    "at_once": "of confirming runs, which write it: how many there are at the same time",
    "operations": "steps that are profiled after each training",
    "sampler": "sampler of Optuna that draws the points of search:",
    "storage": "database of the Optuna study, e.g. $DATABASE or postgresql://host/name",
    "warm_start": "an earlier search whose trials this one begins with",
    "track": "service for experiments that shows every trial as a run",
    "final": "knobs of evaluation. for one more evaluation of every finished trial",
}
"""What the keys of a search file are for."""
FORMAT = {
    cfg.FORMAT_KEY: {
        "description": "format of the file",
        "type": "integer",
        "minimum": 1,
        "maximum": cfg.FORMAT,
    }
}
OBJECTIVE_FORMS = {"type": ["string", "array", "object"], "examples": ["samples_per_s", *COSTS]}
TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "tuple": "array"}


class _WithoutNull(GenerateJsonSchema):
    """None in a section means that the key is absent: null itself is refused."""

    def nullable_schema(self, schema: Any) -> Any:
        return self.generate_inner(schema["schema"])


def _section(cls: type) -> Json:
    """Return the schema of a section; options of the command line can stand for every key of it."""
    return {**TypeAdapter(cls).json_schema(schema_generator=_WithoutNull), "required": []}


def search_file(schema: Schema, workloads: Iterable[str]) -> Json:
    """Return the schema of a workload's search files; `workloads`: completions of `workload:`.

    Knobs may be nested by section or dotted, as the reader of search files takes them.
    """
    forms = {"value": _value, "searched": _searched}
    definitions = {
        f"{form}.{name}": of(knob)
        for form, of in forms.items()
        for name, knob in schema.knobs.items()
    }
    definitions |= {form: _nested(schema.knobs, form) for form in forms}
    values, searched = {"$ref": "#/$defs/value"}, {"$ref": "#/$defs/searched"}
    points = {"type": "array", "items": values}
    content = _section(SearchFile)
    properties = content["properties"] | {
        "workload": {"type": "string", "examples": list(workloads)},
        "objective": _section(ObjectiveSection) | OBJECTIVE_FORMS,
        "budget": _section(BudgetSection),
        "confirm": _section(Confirm) | {"type": ["integer", "object"]},
        "study": {"type": "object"},
        "fixed": values,
        "baseline": values,
        "final": values,
        "search": searched,
        "grid": searched,
        "trials": points,
        "first": points,
        "ladder": {"type": "object", "additionalProperties": values},
    }
    properties = {name: {**of, "description": HELP[name]} for name, of in properties.items()}
    title = f"tunediff search file: {schema.title}"
    return {
        **content,
        "$schema": DRAFT,
        "title": title,
        "properties": properties | FORMAT,
        "$defs": definitions,
    }


def configuration(schema: Schema) -> Json:
    """Return the schema of configuration files of one workload, such as an exported best.yaml."""
    content = _nested(schema.knobs, "value")
    content["properties"] |= {"workload": {"type": "string"}, **FORMAT}
    definitions = {f"value.{name}": _value(knob) for name, knob in schema.knobs.items()}
    return {
        "$schema": DRAFT,
        "title": f"tunediff configuration: {schema.title}",
        **content,
        "$defs": definitions,
    }


def to_text(schema: Json) -> str:
    """Return a schema as JSON, one line for each key, property and definition."""
    lines = []
    for key, value in schema.items():
        content = json.dumps(value, ensure_ascii=False)
        if key in ("properties", "$defs"):
            inside = (
                f"    {json.dumps(name)}: {json.dumps(of, ensure_ascii=False)}"
                for name, of in value.items()
            )
            content = "{\n" + ",\n".join(inside) + "\n  }"
        lines.append(f"  {json.dumps(key)}: {content}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _nested(names: Iterable[str], form: str) -> Json:
    """Return an object with every knob, dotted and inside its section, defined as `FORM.NAME`."""
    properties: Json = {name: {"$ref": f"#/$defs/{form}.{name}"} for name in names}
    for name in names:
        *sections, leaf = name.split(".")
        inside = properties
        for section in sections:
            empty: Json = {"type": "object", "properties": {}, "additionalProperties": False}
            inside = inside.setdefault(section, empty)["properties"]
        inside[leaf] = {"$ref": f"#/$defs/{form}.{name}"}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value(knob: Knob) -> Json:
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
    """Return the schema of a searched knob: values, a choice under a condition, or a range."""
    values: Json = {"type": "array", "items": {"$ref": f"#/$defs/value.{knob.name}"}}
    spec: Json = {"choice": values, "when": {"type": "object"}}
    if knob.kind in ("int", "float"):
        number: Json = {"type": "integer" if knob.kind == "int" else "number"}
        spec |= {"low": number, "high": number, "step": {"type": "number", "exclusiveMinimum": 0}}
        spec |= {"log": {"type": "boolean"}}
    forms: list[Json] = [
        values,
        {"type": "object", "properties": spec, "additionalProperties": False},
    ]
    if knob.space is not None:  # `lr:` alone is searched where the knob's declaration says
        forms.append({"type": "null"})
    if knob.name in ("parallel.workers", "parallel.strategy"):
        forms.append({"const": "all"})
    return {"description": knob.description, "anyOf": forms}
