"""Several seeds: what is larger than the noise is named, what is not is not."""

import math

import numpy as np
import pytest
import yaml
from scipy import stats

from tests.searches import make, write
from tunediff import analysis
from tunediff.analysis.statistics import differences, estimate, holm
from tunediff.core.outcomes import Verdict
from tunediff.report import reading


# ---------------------------------------------------------------------------------------------------------- statistics
def test_two_configurations_are_compared_as_by_a_paired_t_test() -> None:
    values = np.array([[6.1, 5.8, 6.6, 5.9], [5.2, 5.3, 5.5, 5.6]])
    expected = stats.ttest_rel(np.log(values[1]), np.log(values[0]))
    (found,), ratios = differences(values)
    assert ratios
    assert found.p == found.p_holm == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert (found.low, found.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert found.estimate == pytest.approx(math.exp(np.log(values[1] / values[0]).mean()))
    assert found.verdict == Verdict.BETTER
    assert found.resolution == pytest.approx(found.high / found.estimate - 1), (
        "alone, half an interval is what can be told"
    )


def test_each_of_many_configurations_is_compared_by_its_own_noise() -> None:
    y = np.random.default_rng(3).normal(size=(5, 4)) * np.array([[1], [0.2], [1], [5], [1]])
    found, ratios = differences(y)
    assert not ratios, "a value is negative: plain differences"
    for row, difference in zip(y[1:], found, strict=True):
        theirs = stats.ttest_rel(row, y[0])
        assert difference.estimate == pytest.approx(row.mean() - y[0].mean())
        assert difference.p == pytest.approx(theirs.pvalue)
        assert (difference.low, difference.high) == pytest.approx(tuple(theirs.confidence_interval()))
        assert difference.resolution > (difference.high - difference.low) / 2, "it allows for the other three"


def test_a_configuration_that_lacks_a_seed_is_compared_on_its_own() -> None:
    nan = math.nan
    values = np.array([[6.0, 6.6, 5.5], [5.0, 5.6, 4.5], [6.2, 6.5, 5.7], [4.0, 4.5, nan], [nan, 3.0, nan], [nan] * 3])
    found, _ = differences(values)
    alone, _ = differences(values[:3])
    assert found[0].p == pytest.approx(alone[0].p), "the others' missing runs do not disturb those that are complete"
    assert found[2].p == pytest.approx(stats.ttest_rel(np.log([4.0, 4.5]), np.log([6.0, 6.6])).pvalue)
    assert (found[3].estimate, found[3].p, found[3].verdict) == (pytest.approx(3.0 / 6.6), None, Verdict.TOO_FEW)
    assert (found[4].estimate, found[4].verdict) == (None, Verdict.TOO_FEW)


def test_a_seed_that_the_baseline_lacks_tells_nothing() -> None:
    values = np.array([[6.0, 6.6, 5.5, math.nan], [5.0, 5.6, 4.6, 1.0], [6.2, 6.5, 5.7, math.nan]])
    assert differences(values) == differences(values[:, :3])


@pytest.mark.parametrize(
    ("values", "lower_is_better", "ratios", "verdicts"),
    [
        ([[100.0, 101.0, 99.0], [150.0, 151.0, 149.0], [50.0, 51.0, 49.5]], False, True, ["better", "worse"]),
        ([[1.0] * 3] * 2, True, True, ["no_difference"]),
        ([[0.0] * 9, [1.0] * 9], True, True, ["worse"]),  # their noise is that of rounding
        ([[0.90, 0.91], [0.89, 0.90]], False, False, ["no_difference"]),  # so is that of few equal differences
        ([[0.1, 0.1], [0.3, 0.3]], False, False, ["no_difference"]),
    ],
)
def test_verdicts_follow_the_direction_and_the_noise_of_rounding(values, lower_is_better, ratios, verdicts) -> None:
    assert [one.verdict for one in differences(np.array(values), lower_is_better, ratios)[0]] == verdicts


def test_a_mean_has_the_interval_of_students_t() -> None:
    plain, ratio = estimate([1.0, 2.0, 3.0]), estimate([1.0, 4.0], ratios=True)
    assert (plain.mean, plain.high - plain.mean) == pytest.approx((2.0, 4.302653 / math.sqrt(3)))
    assert (ratio.mean, ratio.low * ratio.high) == pytest.approx((2.0, 4.0))
    assert (estimate([2.0]).low, estimate([])) == (None, None)


def test_holm() -> None:
    """The example of R's p.adjust."""
    assert holm([0.01, None, 0.04, 0.03, 0.005]) == pytest.approx([0.03, None, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


# ------------------------------------------------------------------------------------------------------- whole searches
FILE = """
workload: digits
budget: {per_trial: 20s, compile: free}
seeds: 3
grid:
  timesteps.name: [uniform, stratified, speed]
  weighting.name: [constant, min_snr]
"""
LEVEL = {"uniform": 1.0, "stratified": 1.0, "speed": 0.5}
NOISE = [0.01, -0.01, 0.02, -0.02, 0.0, 0.015, -0.005]


def finished(folder, text=FILE, failed=(), left_out=0):
    """A search folder as a search with several seeds leaves it: `speed` halves the distance and runs at half the rate.

    Four evaluations; the baseline falls 8, 6, 4, 2 times a factor of the seed.
    """
    wanted = make(folder, yaml.safe_load(text))
    for i, drawn in enumerate(wanted.candidates[: len(wanted.candidates) - left_out]):
        config = wanted.config(drawn)
        rate = 50 if config.timesteps.name == "speed" else 100
        level = LEVEL[config.timesteps.name] * (1 + 0.1 * config.seed) * (1 + NOISE[i % 7])
        curve = [(5.0 * index, 5 * rate * index, (10 - 2 * index) * level) for index in range(1, 5)]
        validation = {"validation_loss": 0.05} if config.weighting.name == "constant" else {}
        status = "nan" if i in failed else "ok"
        write(folder, wanted, i, drawn=drawn, curve=curve, rate=rate, found=validation, status=status)
    return analysis.read(folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("results") / "night")


def rows_of(found):
    return {one.name: one for one in reading.of_folder(found.folder).candidates}


def test_a_result_says_who_is_better_and_what_it_costs(found):
    rows = rows_of(found)
    assert [*rows][:2] == ["baseline", "weighting.name=min_snr"]
    assert [row.verdict for row in rows.values()] == ["baseline", *["no_difference"] * 3, *["better"] * 2]
    base, speed = rows["baseline"], rows["timesteps.name=speed"]
    assert base.value == pytest.approx(2 * np.mean([1.01, 1.1 * 0.99, 1.2 * 1.0]), rel=0.02)
    assert speed.effect.value == pytest.approx(0.5, rel=0.03)
    assert speed.effect.low < 0.5 < speed.effect.high
    # half of 8, 6, 4, 2 is 2 at the third of four evaluations
    assert speed.speedup.value == pytest.approx(20 / 15, abs=0.05)
    assert (base.cost, speed.cost, speed.samples_per_s) == (1, 2, 50)
    assert (base.others, rows["weighting.name=min_snr"].others["validation_loss"]) == (
        {"validation_loss": [0.05] * 3},
        [],
    )


def test_runs_that_failed_are_missing_not_bad(tmp_path):
    rows = [*rows_of(finished(tmp_path / "night", failed=(4, 10, 9), left_out=2)).values()]
    assert [len(row.values) for row in rows] == [3, 3, 3, 2, 0, 2]
    assert [row.failures for row in rows] == [0, 0, 0, 1, 2, 0]
    assert [row.verdict for row in rows][1:5] == ["open", "open", "fails", "fails"], "two trials are left to run"


def test_a_baseline_that_fails_on_a_seed_ends_no_search(tmp_path):
    """The others are compared on its other seeds; without any the result says why there is no comparison."""
    finished(tmp_path / "night", failed=(6,))
    said = reading.of_folder(tmp_path / "night")
    assert (said.best, said.verdict, said.failure) == ("timesteps.name=speed", Verdict.BETTER, None)
    assert said.summary[0].startswith("timesteps.name=speed is better than the baseline")
    finished(tmp_path / "none", failed=(0, 6, 12))
    assert "the baseline has no result" in reading.of_folder(tmp_path / "none").summary[0]


def test_runs_are_measured_by_the_baseline_with_the_same_seed(found):
    last = found.trials[-2]  # speed with the third seed, 1.2 times as high as the first
    assert (last.config["seed"], found.baseline_of(last).name, found.baseline.name) == (2, "t0012", "t0000")
    assert found.versus_baseline(last) == pytest.approx(0.5, rel=0.04)
    assert found.leader.config["timesteps.name"] == "speed"
