"""`--json`: the schemas of the models, values computed by hand, and no word that JSON does not have."""

import json
from pathlib import Path

import pytest

from tests.json_schemas import MODELS, OUTPUTS, generated, validate
from tests.searches import FILE, make, noisy, write
from tunediff import cli, search
from tunediff.core import text
from tunediff.report import reading


@pytest.mark.parametrize("name", MODELS)
def test_shipped_schema_is_that_of_the_model(name):
    assert (OUTPUTS / f"{name}-output.json").read_text() == generated(name)


def test_search_json_without_a_result(tmp_path, capsys):
    """A search whose only trial failed has all keys as well."""
    space = make(tmp_path / "night", FILE | {"budget": {"per_trial": "20s", "trials": 1}})
    write(tmp_path / "night", space, 0, curve=(), status="oom", reason="needs 9 GiB")
    assert search.main(["--resume", "night", "--storage", str(tmp_path), "--json"]) == cli.NO_SUCCESS
    block = json.loads(capsys.readouterr().out)
    validate(block, "result-output")
    assert (block["best"], block["candidates"], block["search"]["statuses"]) == (None, [], {"oom": 1})


def test_best_value_of_the_baseline_is_the_mean_of_its_runs(tmp_path):
    """The baseline is best with 2.0 and 2.2 on its two seeds; all else is worse."""
    noisy(folder := tmp_path / "night", repeats=(2.2,), others=(3.0, 4.0))
    (found,) = reading.of_folder(folder).candidates
    assert (found.name, found.trial, found.values) == ("baseline", "t0000", [2.0, 2.2])
    assert found.value == pytest.approx(2.1)


def test_a_sentence_is_in_no_key_but_summary(tmp_path, monkeypatch):
    noisy(folder := tmp_path / "night", repeats=(2.2,), others=(1.0, 4.0))
    before = reading.as_json(reading.of_folder(folder))
    monkeypatch.setattr(reading.sentences, "headline", lambda result: "another sentence")
    after = reading.as_json(reading.of_folder(folder))
    assert before.pop("summary")[1:] == after.pop("summary")[1:]
    assert before == after


def test_json_has_no_nan(capsys):
    metrics = {"a": {"name": "a", "value": float("nan")}, "b": {"name": "b", "value": float("inf")}}
    cli.print_json({"model": "m", "weights": Path("x"), "json": "y", "metrics": metrics})
    output = json.loads(capsys.readouterr().out)
    assert output["metrics"] == {name: {"name": name, "value": None} for name in "ab"}
    assert (output["schema"], output["weights"]) == (text.SCHEMA, "x")
