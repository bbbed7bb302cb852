"""JSON Schemas of what commands print: `python -m tests.json_schemas` writes those that have a model."""

import functools
import json
from pathlib import Path

import jsonschema
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

import tunediff
from tunediff.core import text
from tunediff.report.result import Result

OUTPUTS = Path(tunediff.__file__).parent / "schemas"
"""JSON Schemas of what commands print, `result-output.json` of `search --json`."""
MODELS = {"result": Result}
"""Models by name; the other schemas are written by hand."""
NAMES = sorted(path.stem for path in OUTPUTS.glob("*-output.json"))


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema):
        return False


def generated(command):
    """Return the text of a schema that is made of its model."""
    adapter = TypeAdapter(MODELS[command])
    schema = adapter.json_schema(mode="serialization", schema_generator=_WithoutTitles)
    root = schema["$defs"]["Result"]  # its confirmations are results, too
    for model in schema["$defs"].values():
        model.pop("title", None)
        description = None
        for name, key in model.get("properties", {}).items():
            key.pop("default", None)
            description = key.pop("description", description)  # it also covers the undescribed keys below it
            words = {"description": " ".join(description.split())} if description is not None else {}
            model["properties"][name] = key | words
    version = {"const": text.SCHEMA, "description": "version of these keys and their types"}
    content = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tunediff search --json, tunediff compare --json",
        "type": "object",
        "properties": {"schema": version, **root["properties"]},
        "required": ["schema", *root["required"]],
        "additionalProperties": False,
        "$defs": schema["$defs"],
    }
    lines = []  # one for each key, property and definition
    for key, value in content.items():
        written = json.dumps(value, ensure_ascii=False)
        if key in ("properties", "$defs"):
            inside = (f"    {json.dumps(name)}: {json.dumps(of, ensure_ascii=False)}" for name, of in value.items())
            written = "{\n" + ",\n".join(inside) + "\n  }"
        lines += [f"  {json.dumps(key)}: {written}"] if value != {} else []
    return "{\n" + ",\n".join(lines) + "\n}\n"


@functools.cache
def validator(name):
    return jsonschema.Draft202012Validator(json.loads((OUTPUTS / f"{name}.json").read_text(encoding="utf-8")))


def validate(output, name):
    """Raise unless the output of a command has the keys and types of its schema, such as `result-output`."""
    validator(name).validate(json.loads(json.dumps(output, allow_nan=False, default=str)))


def validate_any(output):
    """Raise unless an output fits the schema with which it shares most keys; schemas allow no other keys."""

    def misfit(name):
        schema = validator(name).schema
        forms = [schema] if "properties" in schema else schema["$defs"].values()
        return min(len(form["properties"].keys() ^ output.keys()) for form in forms)

    validate(output, min(NAMES, key=misfit))


if __name__ == "__main__":
    for command in MODELS:
        (OUTPUTS / f"{command}-output.json").write_text(generated(command), encoding="utf-8")
