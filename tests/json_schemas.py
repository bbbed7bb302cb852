"""Validate what commands print against the JSON Schemas that are shipped for it."""

import functools
import json

import jsonschema

from tunediff.knobs import OUTPUTS

NAMES = sorted(path.stem for path in OUTPUTS.glob("*-output.json") if path.stem != "progress-output")


@functools.cache
def validator(name):
    return jsonschema.Draft202012Validator(json.loads((OUTPUTS / f"{name}.json").read_text(encoding="utf-8")))


def validate(output, name):
    """Raise unless the output of a command has the keys and types of its schema, such as `search-output`."""
    validator(name).validate(json.loads(json.dumps(output, allow_nan=False, default=str)))


def validate_any(output):
    """Raise unless an output fits the schema with which it shares most keys; schemas allow no other keys."""

    def misfit(name):
        schema = validator(name).schema
        forms = [schema] if "properties" in schema else schema["$defs"].values()
        return min(len(form["properties"].keys() ^ output.keys()) for form in forms)

    validate(output, min(NAMES, key=misfit))
