"""Numbers as text: rounding hides no difference that a verdict rests on."""

import json
import math
from pathlib import Path

import pytest

from tests.json_schemas import MODELS, OUTPUTS, generated, validate
from tests.searches import FILE, make, noisy, write
from tunediff import cli, search
from tunediff.core import text as words
from tunediff.core.point import QUANTITIES
from tunediff.report import reading, sentences
from tunediff.report.result import Effect


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.32, 1.44, 1.56), "1.44 ± 0.12"),
        ((0.9510, 0.9512, 0.9514), "0.95120 ± 0.00020"),  # another is better by 0.0006
        ((1200.0, 1250.0, 1300.0), "1,250 ± 50"),
        ((12.0, 13.0, 14.0), "13.0 ± 1.0"),
        ((0.3, 0.3, 0.3), "0.300 ± 0.000"),
        ((0.1 + 0.2, 0.3, 0.3), "0.300 ± 0.000"),
        ((0.5,), "0.5"),
        ((-1.0, 1.0), "0.0 ± 1.4"),
        ((0.1, 0.2, -0.3), "0.00 ± 0.26"),
        ((0.0, 0.0), "0"),
        ((), ""),
    ],
)
def test_mean_and_deviation_have_the_digits_of_the_deviation(values, text):
    assert words.with_sd(values) == text


@pytest.mark.parametrize(
    ("said", "text"),
    [
        *((words.percent(share), f"{text}{words.SPACE}%") for share, text in (
            (0.38, "38"), (0.004, "0.4"), (0.0004, "0.04"), (0.00094, "0.09"), (0.00096, "0.1"), (-0.0004, "-0.04"),
            (0, "0"),
        )),
        (words.seconds(59.4), "59s"), (words.seconds(59.6), "1m00s"), (words.seconds(90.0), "1m30s"),
        (words.seconds(3599.4), "59m59s"), (words.seconds(3599.6), "1h00m"), (words.seconds(3723.0), "1h02m"),
    ],
)  # fmt: skip
def test_percents_have_a_significant_digit_and_seconds_a_unit(said, text):
    assert said == text
    assert {one.scale for one in QUANTITIES.values() if one.unit == "%"} == {100.0}, "measured as shares of 1"


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.612, "1.61"), (0.0123, "0.01"), (0.00412, "0.00412"), (4e-5, "4.00e-05"), (0.0, "0.00")]
)
def test_ratios_have_a_significant_digit(ratio, text):
    assert words.times(ratio) == f"{text}×"
    assert words.versus(ratio, ratios=True) == text
    assert words.times(math.nan) == ""


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        ((0.503, 0.471, 0.537), "0.503 (0.471 … 0.537)"),
        ((0.9997, 0.9995, 0.9998), "0.99970 (0.99950 … 0.99980)"),
        ((0.0004, 0.0003, 0.0005), "0.00040 (0.00030 … 0.00050)"),
        ((0.0001, 0.00001, 0.0004), "below 0.000400"),
        ((2.0, 1.15, 40.0), "above 1.150"),
        ((0.5, 0.5, 0.5), "0.500 (0.500 … 0.500)"),
        ((0.0004, None, None), "0.000400"),
    ],
)
def test_interval_of_a_ratio_has_the_decimals_of_its_width(ratio, text):
    value, low, high = ratio
    assert sentences.interval(Effect(kind="ratio", value=value, low=low, high=high)) == text


# -------------------- `--json`: the schemas of the models, values computed by hand, and no word that JSON does not have
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
    assert (output["schema"], output["weights"]) == (words.SCHEMA, "x")
