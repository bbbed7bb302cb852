"""`--json`: the schemas of the models, values computed by hand, and no word that JSON does not have."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from tests.json_schemas import MODELS, OUTPUTS, generated, validate
from tests.searches import FILE, make, noisy, write
from tunediff import analysis, cli, search
from tunediff.analysis import evidence
from tunediff.core import text
from tunediff.report import result_json, summary


@pytest.mark.parametrize("command", MODELS)
def test_shipped_schema_is_that_of_the_model(command):
    assert (OUTPUTS / f"{command}-output.json").read_text() == generated(command)


def test_search_json_without_a_result(tmp_path, capsys):
    """A search whose only trial failed has all keys as well."""
    space = make(tmp_path / "night", FILE | {"budget": {"per_trial": "20s", "trials": 1}})
    write(tmp_path / "night", space, 0, curve=(), status="oom", reason="needs 9 GiB")
    assert search.main(["--resume", "night", "--storage", str(tmp_path), "--json"]) == cli.NO_SUCCESS
    block = json.loads(capsys.readouterr().out)
    validate(block, "search-output")
    assert (block["best_trial"], block["best_value"], block["statuses"]["oom"]) == (None, None, 1)


def test_best_value_of_the_baseline_is_the_mean_of_its_runs(tmp_path):
    """The baseline is best with 2.0 and 2.2 on its two seeds; all else is worse."""
    block = summary.as_json(evidence.read(analysis.read(noisy(tmp_path / "night", repeats=(2.2,), others=(3.0, 4.0)))))
    assert block["best_trial"] == "t0000"
    assert block["best_values"] == block["baseline_values"] == [2.0, 2.2]
    assert block["best_value"] == block["baseline_value"] == pytest.approx(2.1)


def test_small_numbers_of_tables_keep_their_digits():
    table = pd.DataFrame({"p": [1.23456789e-11, math.nan], "runs": [3, 4], "name": ["a", None]})
    rows = [{"p": 1.23456789e-11, "runs": 3, "name": "a"}, {"p": None, "runs": 4, "name": None}]
    assert json.loads(json.dumps(result_json.records(table))) == rows


def test_json_has_no_nan(capsys):
    metrics = {"a": {"name": "a", "value": float("nan")}, "b": {"name": "b", "value": float("inf")}}
    cli.print_json({"model": "m", "weights": Path("x"), "json": "y", "metrics": metrics})
    output = json.loads(capsys.readouterr().out)
    assert output["metrics"] == {name: {"name": name, "value": None} for name in "ab"}
    assert (output["schema"], output["weights"]) == (text.SCHEMA, "x")
