"""Comparisons of two configurations, beyond the golden files: exit codes, numbers computed apart, users' files."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from tests.comparisons import BETTER, CLOSE, made, told
from tests.report.pages import rows, words
from tunediff import compare
from tunediff.analysis import sides
from tunediff.analysis.comparison import Comparison
from tunediff.api.compare import PairedComparison
from tunediff.report import reading
from tunediff.report import text as results


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Where results and users' files lie."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


UP = {"a": "digits_classifier", "b": ("digits_classifier", "loader.batch_size=64")}
CASES = {
    "falls, better": (BETTER, {}, "better", 0, "decided"),
    "falls, worse": ({"A": BETTER["B"], "B": BETTER["A"]}, {}, "worse", 11, "decided"),
    "falls, not": (CLOSE, {}, "no_difference", 10, "hopeless"),
    "falls below 0": ({"A": [0.1, -0.1, 0.0], "B": [-9.0, -9.1, -9.05]}, {}, "better", 0, "decided"),
    "rises, better": ({"A": [0.8, 0.81, 0.79], "B": [0.9, 0.915, 0.888]}, UP, "better", 0, "decided"),
    "rises, worse": ({"A": [0.9, 0.915, 0.888], "B": [0.8, 0.81, 0.79]}, UP, "worse", 11, "decided"),
    "equal": ({"A": [2.0, 2.2, 1.9], "B": [2.001, 2.202, 1.9015]}, {"within": 0.02}, "equivalent", 10, "equal"),
    "spent": ({"A": [2.0] * 4, "B": [1.7, 2.0, 1.6, 1.9]}, {"pairs": 4}, "no_difference", 10, "spent"),
    "failed": ({"A": [2.0], "B": [1.0]}, {"statuses": {("B", 1): "oom"}}, "failed", 12, "open"),
}  # fmt: skip


@pytest.mark.parametrize(("values", "options", "verdict", "code", "state"), CASES.values(), ids=CASES)
def test_the_verdict_and_its_exit_code(capsys, values, options, verdict, code, state):
    made(values, **options)
    printed, block = told(capsys, "--json")
    assert (printed, json.loads(block)["verdict"]) == (code, verdict)
    found = Comparison.read(Path("ray_results/x").absolute())
    assert (found.verdict, found.analysis.state, found.ended) == (verdict, state, True)


@pytest.mark.parametrize(("options", "others"), [({}, ["B", "A"]), (UP, ["A", "B"])], ids=["falls", "rises"])
def test_nobody_is_ahead_in_a_pair_of_equal_values(options, others):
    folder = made({"A": [0.9, 0.9, 0.8], "B": [0.9, 0.8, 0.9]}, **options)
    assert [row[3] for row in results.pair_rows(Comparison.read(folder))] == ["ahead", "–", *others]


def test_ratio_and_means_are_those_of_the_values(capsys):
    made(BETTER)
    said = json.loads(told(capsys, "--json")[1])
    (of_a, of_b), ratio = said["candidates"], scipy.stats.gmean(np.array(BETTER["B"]) / np.array(BETTER["A"]))
    assert (of_b["effect"]["kind"], of_b["effect"]["value"]) == ("ratio", pytest.approx(ratio))
    assert of_b["effect"]["low"] < ratio < of_b["effect"]["high"]
    a = np.array(BETTER["A"])
    assert (of_a["value"], of_a["sd"]) == (pytest.approx(a.mean()), pytest.approx(a.std(ddof=1)))
    assert said["seconds"]["train"] == 120
    table = rows(Path("ray_results/x/pairs.csv"))
    assert [(row["pair"], row["a_seed"], row["b_seed"], float(row["b_frechet"])) for row in table] == [
        ("1", "500", "500", 1.0), ("2", "501", "501", 1.08), ("3", "502", "502", 0.96),
    ]  # fmt: skip


@pytest.mark.parametrize("most", [12, 100])
@pytest.mark.parametrize("rounds", [1, 2, 8, 9, 12])
def test_one_run_each_never_detects_more_than_several_pairs(most, rounds):
    """Student's t with the deviation of a single pair, as soon as that is known."""
    a, b = 2 + np.random.default_rng(1).normal(size=(2, rounds)) / 50
    found = Comparison.read(made({"A": list(a), "B": list(b)}, pairs=most))
    assert found.noise_is_rough == (rounds < 9)
    single = sides.one_run_detects(found)
    assert (single is None) == found.noise_is_rough or most == 100
    if single is not None:
        assert found.analysis.differences[0].resolution < single
        sd = np.log(b / a).std(ddof=1)
        assert single == pytest.approx(math.expm1(scipy.stats.t.ppf(0.975, rounds - 1) * sd))
        assert reading.of_sides(found).sides.one_run_each_tells == single


def test_an_interval_inside_what_does_not_matter_is_equivalence(capsys):
    a = 2 + np.random.default_rng(0).normal(size=12) / 1000
    made({"A": list(a), "B": list(a[::-1])}, within=0.02, level=0.01, one_sided=True)
    assert (told(capsys)[0], told(capsys, "--fail-on", "worse")[0]) == (10, 0)
    said = json.loads(told(capsys, "--json")[1])
    rule, effect = said["rule"], said["candidates"][1]["effect"]
    assert (said["verdict"], said["state"], rule["level"], rule["within"]) == ("equivalent", "equal", 0.01, 0.02)
    assert rule["one_sided"]
    assert -0.02 < effect["low"] - 1 < 0 < effect["high"] - 1 < 0.02


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_open_comparison_has_no_verdict(count):
    """Neither in Python nor in the JSON that `result` of the MCP server returns, nor on the page."""
    folder = made({"A": [2.0, 2.4, 1.9][:count], "B": [1.7, 1.8, 1.85][:count]})
    comparison = PairedComparison(folder)
    assert (comparison.verdict.verdict, comparison.json()["verdict"], comparison.json()["state"]) == (
        "open",
        "open",
        "open",
    )
    assert "significant" not in words(comparison.report().read_text())


def test_a_comment_is_written_or_refused_first(capsys):
    made(BETTER)
    assert told(capsys, "--comment", "comment.md")[0] == 0
    assert Path("comment.md").read_text().startswith("**tunediff: better.** B (digits loader.batch_size=64) is better")
    Path("taken").write_text("")
    assert compare.main(["--resume", "x", "--comment", "taken/comment.md"]) == 2
    assert capsys.readouterr().err.startswith("error: --comment: taken/comment.md cannot be written")
