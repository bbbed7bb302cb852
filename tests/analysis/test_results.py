"""What follows from the trials of a search, whichever way its objective runs."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from sklearn.isotonic import isotonic_regression

from tests.helpers import point
from tests.searches import FILE, make, write
from tunediff import analysis
from tunediff.analysis import evidence, importance, noise, reach, speed
from tunediff.analysis.confirming_runs import nothing_to_confirm
from tunediff.analysis.journals import MANY, SHARE, Following, Throttle
from tunediff.analysis.outcome import Outcome
from tunediff.analysis.pareto import front, pareto, trade_offs
from tunediff.core import trial_record
from tunediff.core.outcomes import Status, Verdict
from tunediff.core.trial_record import End, TrialRecord
from tunediff.report import reading
from tunediff.search_space.sections import Confirm


@pytest.fixture
def found(night):
    return analysis.read(night)


def upwards(found):
    """The same search with an objective that is better the larger it is."""
    return dataclasses.replace(found, space=dataclasses.replace(found.space, mode="max"))


def test_a_finished_baseline_is_what_a_speedup_is_measured_by(found):
    best = found.leader
    assert found.speedup(best).ratio == pytest.approx(20 / (5 + 5 / 1.2))
    assert found.speedup(found.baseline).ratio == 1.0
    found.baseline.end = End("nan")
    assert (found.speedup(best), found.versus_baseline(best)) == (None, None)


def test_best_and_front_follow_the_direction(found):
    assert [outcome.trial.name for outcome in found.ranked] == ["t0001", "t0000", "t0002"]
    assert [outcome.trial.name for outcome in upwards(found).ranked] == ["t0002", "t0000", "t0001"]
    assert (found.leader.name, upwards(found).leader.name) == ("t0001", "t0002")
    for trial in found.trials:
        trial.points[-1] = dataclasses.replace(trial.points[-1], peak_memory_mib=None)
    assert "peak_memory_mib" not in found.table(), "no empty column, as of commands"
    for trial, cost in zip(found.trials, (500.0, 600.0, 500.0), strict=True):
        trial.points[-1] = dataclasses.replace(trial.points[-1], peak_memory_mib=cost)
    of_two = dataclasses.replace(found, space=dataclasses.replace(found.space, cost="peak_memory_mib"))
    assert [row["trial"] for row in pareto(of_two)] == ["t0001", "t0000"]
    assert [row["trial"] for row in pareto(upwards(of_two))] == ["t0002"]


def test_the_front_compares_means_over_runs(tmp_path):
    """As the headline does: the baseline's lucky first run, 0.9, is no trade-off beside 0.87, since its mean is 0.85."""
    content = FILE | {"workload": "digits_classifier", "objective": ["accuracy", "peak_memory_mib"]}
    content["search"] = {"loader.batch_size": [32, 64, 128]}
    wanted = make(tmp_path / "night", content)
    runs = [({}, 0.9), (wanted.candidates[0] | {"seed": 1}, 0.8), ({"loader.batch_size": 64}, 0.87)]
    for number, (knobs, value) in enumerate(runs):
        drawn = knobs if "seed" in knobs else wanted.expand(knobs, "test")
        write(tmp_path / "night", wanted, number, drawn=drawn, curve=((20.0, 4000, value),))
    found = analysis.read(tmp_path / "night")
    best, base = pareto(found)
    assert (best["trial"], best["value"], best["cost"]) == ("t0002", 0.87, 502.0)
    assert best["versus_baseline"] == pytest.approx(0.02)
    assert (base["trial"], base["value"], base["cost"]) == ("t0000", pytest.approx(0.85), 500.5)
    frame = trade_offs(found)
    assert frame["accuracy"].tolist() == pytest.approx([0.87, 0.85])
    assert frame["on_front_peak_memory_mib"].tolist() == [True, True]


def test_knob_with_the_name_of_another_column_has_a_column_of_its_own(found):
    for trial in found.trials:
        trial.config |= {"samples": 5, "speedup": 7}
    assert list(found.table()["samples"]) == [trial.points[-1].samples for trial in found.trials]
    frame = evidence.read(found).table()
    assert (set(frame["knobs.samples"]), set(frame["knobs.speedup"])) == ({5}, {7})
    assert frame["speedup"].isna().all()
    assert "loader.batch_size" in frame


def test_what_differs_from_the_baseline(tmp_path):
    """Of what was drawn only that; of a whole configuration also the knobs that came with another member of a union."""
    wanted = make(tmp_path / "night")
    assert wanted.changed({"loader.batch_size": 128, "precision.amp": "bf16"}) == {"precision.amp": "bf16"}
    write(tmp_path / "night", wanted, 0, {"precision.amp": "bf16"}, config={"weighting.gamma": 5.0, "seed": 3})
    found = analysis.read(tmp_path / "night")
    assert found.changed(found.trials[0]) == {"precision.amp": "bf16", "weighting.gamma": 5.0}, "the seed is no knob"


def test_a_gain_is_a_gain_in_either_direction():
    def trial(number, *curve):
        points = [point(i, s, samples=n, accuracy=a) for i, (s, n, a) in enumerate(curve, 1)]
        return TrialRecord(f"t{number:04d}", number, {}, {}, "", points=points)

    told = speed.why(
        trial(0, (5, 100, 0.2), (10, 200, 0.4)), trial(1, (5, 200, 0.4), (10, 400, 0.8)), "accuracy", "max"
    )
    assert told.at_samples == pytest.approx((0.4, 0.4))
    assert told.total < 0
    assert told.throughput == pytest.approx(told.total), "equal at equal images: all of it is speed"


def shared_seconds(folder, unit):
    """20 s each: the baseline on one device; on four, with a quarter of the device-seconds, twice as good."""
    budget = {"per_trial": "20s", "trials": 2, "unit": unit, "price_per_device_hour": 18}
    wanted = make(folder, {"workload": "digits", "budget": budget, "grid": {"parallel.workers": [1, 4]}})
    write(folder, wanted, 0, curve=((5.0, 1000, 8.0), (10.0, 2000, 4.0), (20.0, 4000, 2.0)))
    curve = ((1.25, 1000, 4.0), (2.5, 2000, 2.0), (5.0, 4000, 1.0))
    write(folder, wanted, 1, {"parallel.workers": 4}, curve, found={"price": 0.1})
    return analysis.read(folder)


@pytest.mark.parametrize(("unit", "ratio"), [("wall", 8.0), ("device", 2.0)])
def test_four_devices_are_compared_with_one_by_the_seconds_of_all(tmp_path, unit, ratio):
    """It is as good as the baseline at its end after 2.5 s on four devices: 10 device-seconds instead of 20."""
    found = shared_seconds(tmp_path / "night", unit)
    other = found.trials[1]
    assert found.speedup(other).ratio == pytest.approx(ratio)
    assert [trial.budget_s for trial in found.trials] == ([20.0, 5.0] if unit == "device" else [20.0, 20.0])
    assert [seconds for seconds, _ in analysis.curve(other, "frechet")] == (
        [5.0, 10.0, 20.0] if unit == "device" else [1.25, 2.5, 5.0]
    )


def test_what_trainings_used_together(tmp_path):
    """The baseline 20 s on one device, the other 5 s on four."""
    found = shared_seconds(tmp_path / "night", "device")
    assert found.used() == {"device_s": 40.0, "price": 0.2}
    assert list(found.table()["device_s"]) == [20.0, 20.0]
    failed = write(tmp_path / "night", found.space, 1, {"parallel.workers": 4}, (), status="nan")
    assert trial_record.read_trial(failed).points == []
    found = analysis.read(tmp_path / "night")
    assert found.used() == {"device_s": 20.0 + 4 * 20.0, "price": 0.5}, "20 s of its clock"


def test_table_has_its_columns_before_the_first_trial(tmp_path):
    found = evidence.read(analysis.Results((night := make(tmp_path / "night")) and tmp_path / "night", night, []))
    assert list(found.table()[["trial", "status", "frechet"]].columns) == ["trial", "status", "frechet"]
    assert found.table().empty


# ------------------------------------------------------------------- numbers that are missing in a journal, or are none
def test_device_seconds_of_a_journal_without_the_number_of_workers_are_those_of_one(night):
    path = night / "trials" / "t0001" / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[0]["config"]["parallel.workers"]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:2], lines[-1] | {"status": "oom"}]))
    assert analysis.device_s(analysis.read(night).trials[1]) == 20.0


@pytest.mark.parametrize("value", ["NaN", "1e999"])
def test_a_number_that_is_none_counts_as_not_measured(night, value):
    path = night / "trials" / "t0001" / "journal.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"samples_per_s": ', f'"samples_per_s": {value}, "was": '))
    assert analysis.read(night).trials[1].points[0].get("samples_per_s") is None


# ---------------------------------------- shares of knobs in the differences between trials; fronts are what none beats
def test_knob_that_makes_the_difference_has_the_largest_share(tmp_path):
    space = {"ema.max_decay": [0.999, 0.9995, 0.9999], "optimizer.beta2": [0.9995, 0.9999, 0.999]}
    wanted = make(tmp_path / "night", FILE | {"search": space})
    decays, ends = space["ema.max_decay"], (1.0, 1.5, 1.1)
    for number in range(12):
        curve = ((20.0, 4000, ends[number % 3] + 0.001 * number),)
        point = {"ema.max_decay": decays[number % 3], "optimizer.beta2": space["optimizer.beta2"][number % 2]}
        write(tmp_path / "night", wanted, number, point, curve)
    results = analysis.read(tmp_path / "night")
    shares = importance.importance(results, lambda trial: trial.value(results.metric))
    assert (shares.unvaried, max(shares.shares, key=shares.shares.get)) == ([], "ema.max_decay")


def test_few_trials_are_not_judged(night):
    assert importance.importance(analysis.read(night), speed.rate) is None


def test_the_front_is_what_none_beats():
    rng = np.random.default_rng(1)
    points = [tuple(map(float, point)) for point in rng.integers(0, 12, (80, 2))]
    brute = [not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points) for p in points]
    assert front(points) == brute
    assert front([]) == []


# ------------------- what is read of a search that runs, and how often what takes longer with every trial is done again
def test_what_has_ended_is_read_once(tmp_path, monkeypatch):
    """A look reads what runs and what is new; a trial that began later may end first."""
    wanted, looked, read_trial = make(tmp_path / "night"), [], trial_record.read_trial
    monkeypatch.setattr(trial_record, "read_trial", lambda folder: looked.append(folder.name) or read_trial(folder))
    following = Following(tmp_path / "night")
    assert following.read() == following.trials == []
    write(tmp_path / "night", wanted, 1)
    write(tmp_path / "night", wanted, 0, status=None)
    (tmp_path / "night" / "trials" / "t0002").mkdir()  # its journal has not begun
    assert [trial.name for trial in following.read()] == ["t0001"]
    assert ([trial.name for trial in following.trials], following.ended) == (["t0000", "t0001"], 1)
    looked.clear()
    assert following.read() == []
    assert looked == ["t0000", "t0002"]
    with (tmp_path / "night" / "trials" / "t0000" / trial_record.JOURNAL).open("a") as file:
        file.write(json.dumps({"event": "end", "time": 2000.0, "status": "nan"}) + "\n")
    assert [(trial.name, trial.status) for trial in following.read()] == [("t0000", "nan")]
    assert (following.ended, following.records["t0000"].status) == (2, "nan")


def test_what_takes_longer_is_done_again_so_that_it_takes_a_twentieth_of_the_time():
    times = iter([100.0, 102.0, 102.0, 141.9, 142.0])
    seldom = Throttle(lambda: next(times))
    with seldom.timed():  # 2 s
        pass
    assert SHARE == 0.05
    assert seldom.due(MANY), "of few everything is made anew"
    assert not seldom.due(MANY + 1)
    assert seldom.due(MANY + 1), "40 s later"


# ------------------ a configuration holds its failures as well as its values: what survived on some seeds leads nothing
LUCKY = {"precision.amp": "bf16"}
"""It reaches 0.1 once; the baseline reaches 1.0 and all others about 0.9."""


@pytest.fixture
def lucky(tmp_path):
    """A search whose best single run was luck: both runs on other seeds diverged."""
    return searched(tmp_path / "night", [0.1, None, None])


def searched(folder, of_lucky, baseline=(1.0, 1.01)):
    """A search of the baseline, `LUCKY` and two others, each with its values on seeds 0, 1, …; None: diverged."""
    wanted, numbers = make(folder), itertools.count()
    runs = [({}, baseline), (LUCKY, of_lucky), ({"loader.batch_size": 256}, [0.9]), ({"loader.batch_size": 64}, [0.91])]
    for knobs, values in runs:
        for seed, value in enumerate(values):
            drawn = wanted.expand(knobs, "test") | ({"seed": seed} if seed else {})
            curve, status = (((20.0, 4000, value),), "ok") if value is not None else ((), "nan")
            write(folder, wanted, next(numbers), curve=curve, status=status, drawn=drawn)
    return analysis.read(folder)


def test_luck_whose_repeats_diverge_is_neither_best_nor_better_nor_a_finalist(lucky):
    told = evidence.read(lucky)
    said = reading.of_search(told)
    assert (said.leader.trial, said.leader.failures) == ("t0005", 0)
    assert told.better(lucky.trials[2]) is False
    assert told.speedup(lucky.trials[2]) is None
    assert [trial.name for trial in noise.finalists(lucky, 3)] == ["t0005", "t0006"]
    assert "t0002" not in said.search.within_noise_of_best
    assert "t0002" not in set(trade_offs(lucky)["trial"])
    assert list(told.table()["failures"]) == [0, 0, 2, 2, 2, 0, 0]


def test_what_fails_is_the_best_where_everything_fails_and_says_so(tmp_path):
    found = searched(tmp_path / "night", [0.1, 0.12, None], baseline=(1.0, None))
    found = dataclasses.replace(found, trials=[trial for trial in found.trials if trial.number < 5])
    said = reading.of_search(evidence.read(found))
    assert (said.leader.trial, said.leader.failures, said.baseline.failures) == ("t0002", 1, 1)
    assert said.search.better_than_noise is False
    assert "failed on 1 of 3 seeds" in said.summary[0]
    assert noise.finalists(found, 3) == []
    asked = dataclasses.replace(found, space=dataclasses.replace(found.space, confirm=Confirm()))
    assert nothing_to_confirm(asked)


STUDY = {
    "workload": "digits", "seeds": 5, "budget": {"per_trial": "20s"}, "objective": ["frechet", "peak_memory_mib"],
    "trials": [{"optimizer.lr": 0.003}, {"optimizer.lr": 0.002}],
}  # fmt: skip


def test_a_study_does_not_prefer_what_fails_on_two_of_five_seeds(tmp_path):
    wanted, rng = make(tmp_path / "study", STUDY), np.random.default_rng(1)
    for number, drawn in enumerate(wanted.candidates):
        value = {0.003: 0.90, 0.002: 0.93}.get(drawn["optimizer.lr"], 1.0) + 0.01 * rng.standard_normal()
        failed = drawn["optimizer.lr"] == 0.003 and drawn["seed"] in (1, 3)
        curve, status = ((), "nan") if failed else (((20.0, 4000, value),), "ok")
        write(tmp_path / "study", wanted, number, curve=curve, status=status, drawn=drawn)
    found = analysis.read(tmp_path / "study")
    told = evidence.read(found)
    said = reading.of_search(told)
    assert (said.best, said.verdict) == ("optimizer.lr=0.002", "better")
    assert any("optimizer.lr=0.003, with 0.90" in line and "failed on 2 of 5 seeds." in line for line in said.summary)
    rows = {row.configuration.get("optimizer.lr"): row for row in said.candidates}
    assert [rows[lr].failures for lr in (None, 0.003, 0.002)] == [0, 2, 0]
    assert (rows[0.003].verdict, rows[0.003].effect) == (Verdict.FAILS, None)
    assert {row["trial"]: row["failures"] for row in pareto(found)} == {"t0002": 0, "t0000": 0}


# ------------------------------------------------------------------------------------------------- what is a failure
def record(number, value, end, seed=0):
    points = [point(1, 20.0, frechet=value)] if value is not None else []
    return TrialRecord(f"t{number:04d}", number, {}, {"seed": seed}, "", points=points, end=end)


@pytest.mark.parametrize(
    ("end", "counts"),
    [
        *(
            (End(status), status in ("oom", "nan", "timeout", "missed", "error"))
            for status in Status
            if status != "unfinished"
        ),
        (None, False),  # under way, killed by the user, or on a node that was lost
        (End("error", process_died=True), False),
    ],
)
def test_a_configuration_answers_for_its_own_failures_only(end, counts):
    outcome = Outcome([record(0, 1.0, End("ok")), record(1, None, end, seed=1)], "frechet", True)
    assert bool(outcome.failures) is counts
    assert outcome.failure_note == ("failed on 1 of 2 seeds" if counts else "")


@pytest.mark.parametrize("falls", [True, False])
def test_what_fails_on_a_seed_never_ranks_before_what_does_not(falls):
    rng = np.random.default_rng(0)
    outcomes = []
    for _ in range(300):
        ends = [None if rng.random() < 0.2 else rng.normal() for _ in range(rng.integers(1, 6))]
        runs = [record(i, v, End("nan" if v is None else "ok"), seed=i) for i, v in enumerate(ends)]
        outcomes.append(Outcome(runs, "frechet", falls, int(rng.integers(1, 6))))
    ranked = sorted((outcome for outcome in outcomes if outcome.values), key=lambda outcome: outcome.rank)
    fails = [bool(outcome.failures) for outcome in ranked]
    assert fails == sorted(fails)
    assert True in fails
    complete = [o.value for o in ranked if not o.failures and len(o.values) >= o.seeds]
    assert complete == sorted(complete, reverse=not falls)


# -------------------------------------------------- how many times sooner: from noisy curves, without a bias for either
def test_a_smooth_curve_is_the_isotonic_regression():
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = np.linspace(3, 1, 8) + rng.normal(0, 0.5, 8)
        levels = [level for _, level in reach.smooth([(float(at), value) for at, value in enumerate(values)])]
        assert levels == pytest.approx(isotonic_regression(values, increasing=False))


@pytest.mark.parametrize(
    ("target", "seconds"), [(3.0, 15.0), (4.0, 10.0), (8.0, 5.0), (9.0, 5.0), (2.0, 20.0), (1.0, None)]
)
def test_a_curve_is_as_good_when_it_crosses_the_target(target, seconds):
    curve = [(5.0, 8.0), (10.0, 4.0), (20.0, 2.0)]
    assert reach.seconds_to(curve, target) == seconds, "straight between evaluations, no claim before the first"


def test_a_point_that_is_as_good_by_luck_is_not_there_yet():
    base = [(5.0, 4.0), (10.0, 3.0), (15.0, 2.2), (20.0, 2.0)]
    lucky = [(5.0, 1.9), (10.0, 3.0), (15.0, 2.3), (20.0, 2.0)]
    assert reach.time_to_target_speedup(base, lucky) == 1.0, "and not four times as fast"
    assert reach.time_to_target_speedup(base, [(at / 2, value) for at, value in base]) == 2.0
    assert reach.time_to_target_speedup(base, base) == 1.0
    assert reach.time_to_target_speedup(base, []) is None


def noisy(rng, speed, sd, points):
    at = np.arange(1, points + 1) / points
    return list(zip(at.tolist(), (-0.3 * np.log(speed * at) + rng.normal(0, sd, points)).tolist(), strict=True))


@pytest.mark.parametrize("points", [4, 20])
@pytest.mark.parametrize("sd", [0.05, 0.2])
def test_equal_noisy_curves_are_as_fast_on_average(points, sd):
    """First crossings, where there are any, make equal curves 1.18 to 2.2 times as fast as each other."""
    rng, ratios, first = np.random.default_rng(0), [], []
    for _ in range(1500):
        base, other = (noisy(rng, 1.0, sd, points) for _ in range(2))
        ratios.append(math.log(reach.time_to_target_speedup(base, other)))
        assert ratios[-1] == pytest.approx(-math.log(reach.time_to_target_speedup(other, base)))
        if (reached := reach.seconds_to(other, base[-1][1])) is not None:
            first.append(-math.log(reached))
    error = np.std(ratios) / math.sqrt(len(ratios))
    assert abs(np.mean(ratios)) < 3 * error
    assert 1.15 < math.exp(np.mean(first)) < 2.5


# --------------------------------------------------------------------------------- speed and learning per sample add up
def curve_of(points):
    return [{"train_s": s, "samples": n, "frechet": f, "index": i} for i, (s, n, f) in enumerate(points, 1)]


def why_of(baseline, winner):
    trials = [TrialRecord(f"t000{i}", i, {}, {}, "", points=curve_of(c)) for i, c in enumerate((baseline, winner))]
    return speed.why(*trials, "frechet")


def test_speed_and_learning_add_up():
    told = why_of([(5, 100, 8.0), (10, 200, 4.0)], [(5, 150, 4.0), (10, 300, 1.0)])
    assert (told.seconds, told.equal_samples, told.samples) == (10, 200, (200, 300))
    # Straight in samples, logarithmic in the distance: a third of the way from 4 to 1.
    assert told.at_samples == pytest.approx((4.0, 4.0 * (1 / 4) ** (1 / 3)))
    assert told.learning + told.throughput == pytest.approx(told.total) == pytest.approx(math.log(1 / 4))
    assert told.learning / told.total == pytest.approx(1 / 3)


def test_a_slower_winner_is_read_off_the_baselines_curve():
    told = why_of([(5, 100, 8.0), (10, 200, 2.0)], [(5, 75, 4.0), (10, 150, 1.0)])
    assert told.at_samples == pytest.approx((4.0, 1.0))
    assert told.throughput > 0 > told.learning


def test_runs_of_different_length_are_compared_where_both_are_known():
    told = why_of([(5, 100, 8.0), (10, 200, 4.0)], [(5, 100, 4.0)])
    assert (told.seconds, told.at_seconds, told.samples) == (5, pytest.approx((8.0, 4.0)), (100, 100))
    assert why_of([(5, 100, 8.0)], []) is None
    assert why_of([(5, 100, 0.0)], [(5, 100, 1.0)]) is None, "an exact zero has no logarithm"
    assert why_of([(10, 200, 4.0)], [(5, 100, 4.0)]) is None, "the baseline was not evaluated so early"
