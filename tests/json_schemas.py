"""Validate what commands print against the JSON Schemas that are shipped for it."""

import functools
import json

import jsonschema

from tunediff.knobs import OUTPUTS


@functools.cache
def validator(name):
    return jsonschema.Draft202012Validator(json.loads((OUTPUTS / f"{name}.json").read_text(encoding="utf-8")))


def validate(output, name):
    """Raise unless the output of a command has the keys and types of its schema, such as `search-output`."""
    validator(name).validate(json.loads(json.dumps(output, allow_nan=False, default=str)))


def validate_any(output):
    """Raise unless an output fits the schema with which it shares most keys; schemas allow no other keys."""
    names = sorted(path.stem for path in OUTPUTS.glob("*-output.json") if path.stem != "progress-output")

    def misfit(name):
        schema = validator(name).schema
        keys = {key for form in (schema, *schema.get("$defs", {}).values()) for key in form.get("properties", ())}
        return len(keys ^ output.keys())

    fits = [name for name in names if validator(name).is_valid(json.loads(json.dumps(output, default=str)))]
    validate(output, fits[0] if fits else min(names, key=misfit))
