"""`--json` of a search: the same keys whatever the outcome, each with its type."""

import html
import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest

from tests.json_schemas import MODELS, OUTPUTS, generated, validate
from tests.report.test_evidence import GRID, curve, searched, told
from tests.searches import FILE, make, night, noisy, write
from tunediff import analysis, cli, search
from tunediff.api import search_run
from tunediff.report import context, result_json
from tunediff.report.files import Files
from tunediff.report.headline import headline
from tunediff.report.sections import won
from tunediff.tuning import experiment


def seeds(folder):
    """A grid on three seeds."""
    wanted = make(folder, GRID)
    for number, point in enumerate(wanted.candidates):
        end = 2.0 if point["loader.batch_size"] == 64 else 1.0
        write(folder, wanted, number, point, curve(4, 3, 2.3, end * (1.01, 1.0, 0.99)[point["seed"]]))
    return analysis.read(folder)


def finished(folder, build):
    """A search that is over: as many trials as there are."""
    build(folder)
    experiment.reopen(folder, {"trials": len(list((folder / "trials").iterdir()))}, keep=True)
    return analysis.read(folder)


OUTCOMES = {
    "confirmed": lambda folder: searched(
        folder, {64: (2.6, 1.5, 1.1, 1.0)}, lambda seed: (2.6, 1.5, 1.1, 1.0)
    ),
    "lower bound": lambda folder: searched(folder, {64: (1.2, 1.1, 1.0, 0.9)}),
    "not confirmed": lambda folder: searched(folder, {64: (3, 2.5, 2.2, 1.9)}, lambda seed: (4, 2.6, 2.3, 2.05)),
    "one run each": lambda folder: finished(folder, night),
    "noise": lambda folder: finished(folder, noisy),
    "several seeds": seeds,
}  # fmt: skip


@pytest.mark.parametrize("command", MODELS)
def test_shipped_schema_is_that_of_the_model(command):
    assert (OUTPUTS / f"{command}-output.json").read_text() == generated(command)


@pytest.mark.parametrize("build", OUTCOMES.values(), ids=OUTCOMES)
def test_search_json_has_the_documented_keys_and_types_for_every_outcome(tmp_path, capsys, build):
    _, block = told(build(tmp_path / "night"), capsys)
    validate(block, "search-output")
    assert block["schema"] == cli.SCHEMA
    assert (block["metric"], block["objective"], block["direction"]) == ("FD (classifier)", "frechet", "min")
    assert all(isinstance(value, float) for value in (block["best_value"], block["baseline_value"]))
    assert block["statuses"]["ok"] == block["trials"]


@pytest.mark.parametrize("build", OUTCOMES.values(), ids=OUTCOMES)
def test_console_json_and_report_say_the_same_sentence_first(tmp_path, capsys, build):
    found = build(tmp_path / "night")
    text, block = told(found, capsys)
    read = context.read(found.folder)
    assert block["headline"] == headline(read.evidence)
    assert text.count(block["headline"]) == 1
    page = re.sub(r"<[^>]+>", "", won.won(read, Files(tmp_path / "data")))
    assert html.unescape(page).startswith(block["headline"])


def test_search_json_of_a_confirmed_winner(tmp_path, capsys):
    found = OUTCOMES["confirmed"](tmp_path / "night")
    _, block = told(found, capsys)
    assert (block["confirmed"], block["finalist"]) == (True, None)
    assert block["winner"] == block["best_configuration"] == {"loader.batch_size": 64}
    assert block["confirmed_ratio_low"] < block["confirmed_ratio"] < block["confirmed_ratio_high"]
    assert block["confirmed_difference"] is None
    assert len(block["confirmed_values"]) > 2
    assert block["confirmed_sd"] > 0
    assert (block["value_when_chosen"], block["confirmed_metric"]) == (1.0, "FD (classifier)")
    rows = block["confirmed_configurations"]
    assert [row["configuration"] for row in rows] == [{}, {"loader.batch_size": 64}]
    assert rows[1]["verdict"] == "better"
    assert rows[1]["speedup"] == pytest.approx(block["speedup"])


def test_search_json_lists_trials_within_the_noise(tmp_path, capsys):
    _, block = told(OUTCOMES["noise"](tmp_path / "night"), capsys)
    assert block["within_noise_of_best"] == ["t0002", "t0004"]
    assert (block["noise"]["relative"], block["noise"]["runs"], block["noise"]["rough"]) == (True, 2, True)


def test_search_json_without_a_result(tmp_path, capsys):
    """A search whose only trial failed has all keys as well."""
    wanted = make(tmp_path / "night", FILE | {"budget": {"per_trial": "20s", "trials": 1}})
    write(tmp_path / "night", wanted, 0, curve=(), status="oom", reason="needs 9 GiB")
    assert search.main(["--resume", "night", "--storage", str(tmp_path), "--json"]) == cli.NO_SUCCESS
    block = json.loads(capsys.readouterr().out)
    validate(block, "search-output")
    assert (block["best_trial"], block["best_value"], block["statuses"]["oom"]) == (None, None, 1)


def test_best_value_of_the_baseline_is_the_mean_of_its_runs(tmp_path, capsys):
    """The baseline is best with 2.0 and 2.2 on its two seeds; all else is worse."""
    found = searched(tmp_path / "night", {64: (4, 3, 3, 3)}, repeats=(2.2,))
    text, block = told(found, capsys)
    assert block["best_trial"] == "t0000"
    assert block["best_values"] == block["baseline_values"] == [2.0, 2.2]
    assert block["best_value"] == block["baseline_value"] == pytest.approx(2.1)
    assert "best_value: 2.10 ± 0.14\n" in text


def test_small_numbers_of_tables_keep_their_digits():
    table = pd.DataFrame({"p": [1.23456789e-11, math.nan], "runs": [3, 4], "name": ["a", None]})
    rows = [{"p": 1.23456789e-11, "runs": 3, "name": "a"}, {"p": None, "runs": 4, "name": None}]
    assert json.loads(json.dumps(result_json.records(table))) == rows


def test_a_trial_ahead_of_the_baselines_mean_alone_is_compared_with_that(tmp_path):
    found = search_run.read(noisy(tmp_path / "night", repeats=(6.5,), others=(4.5, 7, 8), baseline=4.0))
    assert "is ahead: after 20 training seconds its FD (classifier) is 4.5 beside the 5.25 of the baseline" in headline(
        found
    )
    assert "the mean of 2 runs" in headline(found)


def test_json_has_no_nan(capsys):
    metrics = {"a": {"name": "a", "value": float("nan")}, "b": {"name": "b", "value": float("inf")}}
    cli.print_json({"model": "m", "weights": Path("x"), "json": "y", "metrics": metrics})
    output = json.loads(capsys.readouterr().out)
    assert output["metrics"] == {name: {"name": name, "value": None} for name in "ab"}
    assert (output["schema"], output["weights"]) == (cli.SCHEMA, "x")
