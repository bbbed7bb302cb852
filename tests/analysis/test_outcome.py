"""A configuration holds its failures as well as its values: what survived on some seeds leads nothing."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.searches import make, write
from tunediff import analysis
from tunediff.analysis import evidence, noise
from tunediff.analysis.confirming_runs import nothing_to_confirm
from tunediff.analysis.outcome import Outcome
from tunediff.analysis.pareto import pareto, trade_offs
from tunediff.core.outcomes import Status, Verdict
from tunediff.core.trial_record import End, TrialRecord
from tunediff.report import reading
from tunediff.search_space.sections import Confirm

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
    for point, values in runs:
        for seed, value in enumerate(values):
            drawn = wanted.expand(point, "test") | ({"seed": seed} if seed else {})
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
    from tests.helpers import point

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
