"""What runs of one configuration differ by, and what follows from it: marks, finalists, and no claim beyond."""

import math
import statistics
from unittest import mock

import pytest
from scipy import stats

from tests.searches import FILE, make, noisy, write
from tunediff import analysis, search_space
from tunediff.analysis import evidence, importance, noise
from tunediff.analysis.noise import Noise
from tunediff.config import ConfigError
from tunediff.config.workload import Workload
from tunediff.report import reading, sentences
from tunediff.tuning import experiment


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
