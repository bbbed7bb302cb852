"""Several seeds: what is larger than the noise is named, what is not is not."""

import math
import statistics
from unittest import mock

import numpy as np
import pytest
import yaml
from scipy import stats

from tests.searches import FILE, make, noisy, write
from tunediff import analysis, search_space
from tunediff.analysis import evidence, importance, noise
from tunediff.analysis.noise import Noise
from tunediff.analysis.statistics import differences, estimate, holm
from tunediff.config import ConfigError
from tunediff.config.workload import Workload
from tunediff.core.outcomes import Verdict
from tunediff.report import reading, sentences
from tunediff.tuning import experiment


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
GRID = """
workload: digits
budget: {per_trial: 20s, compile: free}
seeds: 3
grid:
  timesteps.name: [uniform, stratified, speed]
  weighting.name: [constant, min_snr]
"""
LEVEL = {"uniform": 1.0, "stratified": 1.0, "speed": 0.5}
NOISE = [0.01, -0.01, 0.02, -0.02, 0.0, 0.015, -0.005]


def finished(folder, text=GRID, failed=(), left_out=0):
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


# ------------ what runs of one configuration differ by, and what follows from it: marks, finalists, and no claim beyond
def read(*args, **more):
    return analysis.read(noisy(*args, **more))


def named(trials):
    return [trial.name for trial in trials]


# ----------------------------------------------------------------------------------------------------------- how much
def test_the_noise_is_the_standard_deviation_of_logarithms(tmp_path):
    found = read(tmp_path / "night", repeats=(2.4, 1.9))
    told = noise.measured(found)
    assert told.sd == pytest.approx(statistics.stdev(map(math.log, (2.0, 2.4, 1.9))))
    assert (told.freedom, told.runs, told.configurations, told.ratios, told.is_rough) == (2, 3, 1, True, True)


def test_all_that_ran_twice_is_pooled_that_which_failed_is_not(tmp_path):
    """Configurations of the confirming runs count as well; the seed of a run is counted once."""
    found = read(tmp_path / "night", repeats=(2.4,), content=FILE | {"confirm": {"of": 2, "seeds": 3}})
    grid = FILE | {
        "search": None,
        "grid": {"loader.batch_size": [32, 64, 128]},
        "seeds": 3,
        "budget": {"per_trial": "20s"},
    }
    content = {key: value for key, value in grid.items() if value is not None}
    wanted = search_space.parse(content, "confirm.yaml")
    experiment.create(found.folder / "confirm", wanted, content)
    ends = {32: (1.0, 1.1, None), 64: (3.0, 2.5, 2.6), 128: (2.0, None, None)}
    for number, point in enumerate(wanted.candidates):
        end = ends[point["loader.batch_size"]][point["seed"]]
        curve = () if end is None else ((20.0, 4000, end),)
        write(found.folder / "confirm", wanted, number, point, curve, status="nan" if end is None else "ok")
    told = noise.measured(found, analysis.read(found.folder / "confirm"))
    groups = [[math.log(value) for value in values] for values in ((2.0, 2.4), (1.0, 1.1), (3.0, 2.5, 2.6))]
    squares = sum((len(values) - 1) * statistics.variance(values) for values in groups)
    assert told.sd == pytest.approx(math.sqrt(squares / 4))
    assert (told.freedom, told.runs, told.configurations) == (4, 7, 3)


@pytest.mark.parametrize(("freedom", "limit"), [(1, 4.352), (2, 2.667), (9, 1.956)])
def test_the_limit_is_a_quantile_of_a_difference_of_two_runs(freedom, limit):
    told = Noise(sd=0.1, freedom=freedom, runs=9, configurations=1, ratios=False, lower_is_better=True)
    assert told.limit == pytest.approx(0.1 * limit, abs=1e-4)
    assert told.limit == pytest.approx(stats.t.ppf(0.9, freedom) * math.sqrt(2) * 0.1)


def test_an_estimate_is_rough_that_may_be_half_of_the_truth():
    for freedom in range(1, 20):
        upper = math.sqrt(freedom / stats.chi2.ppf(0.025, freedom))
        assert Noise(0.1, freedom, 9, 1, True, True).is_rough == (upper > 2)


@pytest.mark.parametrize(
    ("ratios", "falls", "inside", "outside"),
    [(True, True, 1.54, 1.55), (True, False, 0.648, 0.647), (False, True, 1.43, 1.44), (False, False, 0.57, 0.56)],
)
def test_what_is_behind_by_less_than_the_limit_is_within_the_noise(ratios, falls, inside, outside):
    told = Noise(0.1, 1, 2, 1, ratios, falls)  # 4.352 standard deviations: e^0.4352 = 1.545
    assert told.within(inside, 1.0)
    assert not told.within(outside, 1.0)
    assert told.within(1 / inside if ratios else 2 - inside, 1.0), "what is ahead is not behind"


def test_equal_runs_of_a_coarse_metric_have_the_noise_of_rounding(tmp_path):
    """Two accuracies of a small test set are often equal. 1.99 and 1.98 are behind by one and two items of 200."""
    found = read(tmp_path / "night", repeats=(2.0,), others=(1.99, 1.98, 1.5))
    measured = noise.measured(found)
    assert measured.sd == pytest.approx(0.01 / math.sqrt(12) / 2)
    assert evidence.read(found).better(found.leader) is True
    assert measured.within(1.995, 1.99)


@pytest.mark.parametrize("more", [{"repeats": ()}, {"status": "oom", "curve": ()}, {"status": None, "curve": ()}])
def test_one_run_tells_of_no_noise(tmp_path, more):
    found = read(tmp_path / "night", **more)
    assert noise.measured(found) is None
    assert (noise.within_best(found, None, found.leader), evidence.read(found).better(found.leader)) == ([], None)
    assert evidence.read(found).table()[evidence.NEAR].isna().all()


# --------------------------------------------------------------------------------------------------------- what is best
def test_the_first_run_that_ended_ok_stands_for_a_baseline_that_failed(tmp_path):
    found = read(tmp_path / "night", repeats=(1.0,), others=(1.2,), status="nan", curve=())
    assert named(outcome.trial for outcome in found.ranked) == ["t0002", "t0001"], "the baseline has failed once"
    assert found.baseline_of(found.trials[2]) is found.trials[1]
    assert noise.finalists(found, 3) == [found.trials[2]], "nor is it a finalist"


@pytest.mark.parametrize(
    ("more", "ratio"),
    [
        ({"repeats": (), "status": "pruned", "curve": ((5.0, 1000, 8.0),)}, None),
        ({"repeats": (), "curve": ((20.0, 4000, None),)}, None),
        ({}, 2.0),
    ],
)
def test_without_a_finished_baseline_there_is_no_speedup(tmp_path, more, ratio):
    said = reading.of_search(evidence.read(read(tmp_path / "night", **more)))
    assert (said.leader.value, said.leader.speedup and said.leader.speedup.value) == (1.0, ratio)
    assert (said.search.seconds_to_baseline is None) == (said.search.noise is None) == (ratio is None)


def test_rates_have_a_noise_as_well(tmp_path):
    wanted = make(tmp_path / "night", FILE | {"objective": "samples_per_s"})
    baseline = wanted.candidates[0]
    write(tmp_path / "night", wanted, 0, rate=200.0)
    write(tmp_path / "night", wanted, 1, drawn={**baseline, "seed": 1}, rate=204.0)
    for number, size, rate in ((2, 256, 300.0), (3, 64, 290.0), (4, 32, 150.0)):
        write(tmp_path / "night", wanted, number, {"loader.batch_size": size}, rate=rate)
    found = analysis.read(tmp_path / "night")
    told = noise.measured(found)
    assert told.sd == pytest.approx(math.log(204 / 200) / math.sqrt(2))
    assert (named(noise.within_best(found, told, found.leader)), evidence.read(found).better(found.leader)) == (
        ["t0003"],
        True,
    )


# ------------------------------------------------------------------------------------------------------------ the marks
# ----------------------------------------------------------------------------------------------------------- finalists
@pytest.mark.parametrize(
    ("repeats", "of", "chosen"),
    [
        ((2.24,), 3, ["t0003", "t0002", "t0004"]),  # 1.0, and within 1.42 times it 1.2 and 1.3
        ((2.24,), 2, ["t0003", "t0002"]),
        ((2.04,), 3, ["t0003"]),  # nothing within 1.06 times the leader
        ((3.0,), 20, ["t0003", "t0002", "t0004", "t0005", "t0006"]),  # all but the baseline
        ((), 3, ["t0002", "t0001", "t0003"]),  # nothing is known: the best so many
    ],
)
def test_finalists_are_the_leader_and_what_lies_within_its_noise(tmp_path, repeats, of, chosen):
    assert named(noise.finalists(read(tmp_path / "night", repeats=repeats), of)) == chosen


def test_one_configuration_is_one_finalist_and_the_baseline_is_none(tmp_path):
    found = read(tmp_path / "night", others=(1.2, 1.0, 1.3))
    write(found.folder, found.space, 7, {"loader.batch_size": 64}, ((20.0, 4000, 1.1),))  # what t0003 ran
    assert named(noise.finalists(analysis.read(found.folder), 3)) == ["t0003", "t0002", "t0004"]
    behind = read(tmp_path / "other", others=(2.4, 9.0))
    assert behind.leader is behind.baseline
    assert named(noise.finalists(behind, 3)) == ["t0002"], "the leader of those that differ from the baseline"


# ------------------------------------------------------------------------------------------------------- what it is not
def test_a_repeat_says_nothing_about_knobs(tmp_path):
    others = (1.2, 1.0, 1.3, 1.9, 3.0, 2.7)
    once = read(tmp_path / "once", repeats=(), others=others)
    twice = read(tmp_path / "twice", repeats=(9.0, 0.1), others=others)
    assert sum(len(outcome.samples) for outcome in twice.outcomes) == len(once.trials) == 7
    for found in (once, twice):  # the eighth trial, for the forest
        write(found.folder, found.space, 20, {"optimizer.lr": 5e-3}, ((20.0, 4000, 2.5),))
    forests = [
        importance.importance(found, lambda trial: trial.value("frechet"))
        for found in (analysis.read(once.folder), analysis.read(twice.folder))
    ]
    assert forests[0] == forests[1]
    assert forests[0].trials == 8


@pytest.mark.parametrize(
    ("curves", "is_known"),
    [
        ([[(10, 2000, 4.0), (20, 4000, 2.0)], [(10, 2000, 4.0), (20, 4000, 2.05)]], True),
        ([[(10, 2000, 4.0), (20, 4000, 2.0)], [(10, 4400, 4.0), (20, 8800, 2.05)]], False),  # the baseline's own speed
        ([[(20, 4000, 2.0)], [(20, 4000, 2.05)]], False),  # one value ends a run
    ],
)
def test_no_speed_is_claimed_from_seconds_that_the_machine_may_have_made(tmp_path, curves, is_known):
    """One run each, of which the best is as good as the baseline in half the time."""
    wanted = make(tmp_path / "night")
    for number, curve in enumerate(curves):
        drawn = {**wanted.expand({}, "test"), "seed": wanted.baseline.seed + number}
        write(tmp_path / "night", wanted, number, drawn=drawn, curve=curve)
    best = [(10, 2000, 1.0)] if len(curves[0]) == 1 else [(5, 1000, 4.0), (10, 2000, 2.0), (20, 4000, 1.0)]
    write(tmp_path / "night", wanted, 2, {"loader.batch_size": 256}, curve=best)
    said = reading.of_folder(tmp_path / "night")
    assert said.search.better_than_noise
    assert (said.leader.speedup is None) == (said.search.seconds_to_baseline is None) == (not is_known)


@mock.patch.object(Workload, "unseeded", True)
def test_runs_without_a_seed_show_no_noise_and_confirm_nothing(tmp_path):
    """The second run of the baseline is the first one, repeated."""
    found = read(tmp_path / "night")
    shown = evidence.read(found)
    assert (shown.noise, shown.better(shown.best)) == (None, None)
    assert "this may be noise" in sentences.headline(reading.of_search(shown))
    with pytest.raises(ConfigError, match="confirm: is not allowed with unseeded: true"):
        search_space.parse(FILE | {"confirm": {"of": 1}}, "night.yaml")
