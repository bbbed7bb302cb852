"""Schemas of search files: what editors check is what the reader takes."""

import functools
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from tunediff import config as cfg
from tunediff.search_space import json_schema

FILES = sorted((Path(__file__).parents[2] / "search_spaces").rglob("*.yaml"))


def schema_of(content):
    return json_schema.search_file(cfg.baseline(content["workload"]).schema, cfg.baseline_names())


@functools.cache
def validator(path):
    """Check with the schema that the first line of a search file names, as editors do."""
    (name,) = re.findall(r"\A# yaml-language-server: \$schema=(\S+)\n", path.read_text())
    return jsonschema.Draft202012Validator(json.loads((path.parent / name).read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_shipped_search_files_fit_the_schema_that_they_name(path):
    content = yaml.safe_load(path.read_text())
    validator(path).validate(content)
    generated = json.loads(json_schema.to_text(schema_of(content)))
    assert validator(path).schema == generated, "python -m tunediff.knobs --schema search writes it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_typing_mistake_in_a_shipped_search_file_is_found(path):
    content = yaml.safe_load(path.read_text())
    (section,) = {"search", "grid", "trials", "ladder"} & content.keys()
    content[f"{section}s"] = content.pop(section)
    (error,) = validator(path).iter_errors(content)
    assert f"'{section}s' was unexpected" in error.message


@pytest.mark.parametrize(
    ("section", "change", "where"),
    [
        ("search", {"loader.batchsize": [16]}, "search"),
        ("search", {"loader.batch_size": [0]}, "search"),
        ("fixed", {"precision": {"ampp": "bf16"}}, "fixed"),
        ("budget", {"per_trial": 60, "trials": 4}, "budget"),
        ("early_stoping", "asha", ""),
        ("search", {"compile.mode": {"low": 1, "high": 2}}, "search"),
        ("grid", {"precision.amp": "all"}, "grid"),
    ],
)
def test_schema_finds_typing_mistakes(section, change, where):
    content = {"workload": "digits", "budget": {"per_trial": "60s", "trials": 4}, section: change}
    errors = list(jsonschema.Draft202012Validator(schema_of(content)).iter_errors(content))
    assert errors
    assert {error.path[0] if error.path else "" for error in errors} == {where}


@pytest.mark.parametrize("name", ["digits", "cifar10", "digits_classifier"])
def test_configurations_fit_their_schema(name):
    config = cfg.baseline(name)
    validator = jsonschema.Draft202012Validator(json_schema.configuration(config.schema))
    validator.validate({"workload": name, **config.schema.to_dict(config)})
    assert list(validator.iter_errors({"loader": {"workers": -1}}))
