"""What a search leaves on disk before its first trial, and when it stops one."""

import contextlib
import json
import pickle
import random
import statistics
import time
import types

import pytest
import yaml
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from tests.helpers import point
from tunediff import config as cfg
from tunediff import search_space
from tunediff.analysis import journals
from tunediff.config import ConfigError
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.trial_record import End
from tunediff.ray_backend import connection, tuner
from tunediff.report import sentences
from tunediff.tuning import experiment, sessions
from tunediff.tuning.stopping import GRACE, Halving, early_stopping

CONTENT = {
    "workload": "digits",
    "budget": {"per_trial": "8s", "trials": 8},
    "search": {"loader.batch_size": [32, 64, 128]},
}


def loaded(**more):
    return search_space.parse(CONTENT | more, "x.yaml")


# ------------------------------------------------------------------------------------------------------------ the folder
def test_a_folder_that_could_not_be_completed_is_not_there(tmp_path, monkeypatch):
    """A full disk: the name stays free, and nothing is left that --resume would trip over."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(yaml, "dump", full)
        with pytest.raises(ConfigError, match="night cannot be written: No space left on device"):
            experiment.create(tmp_path / "night", loaded(), CONTENT)
    assert list(tmp_path.iterdir()) == []
    experiment.create(tmp_path / "night", loaded(), CONTENT)
    assert experiment.reopen(tmp_path / "night").budget.trials == 8
    assert [path.name for path in tmp_path.iterdir()] == ["night"]


def spent(folder, lines):
    """Seconds of sessions with these lines (event, Unix time, monotonic time)."""
    told = [{"event": event, "time": time, "monotonic_s": s} for event, time, s in lines]
    folder.mkdir(parents=True)
    (folder / "sessions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told) + '{"event": "al')
    return sessions.spent_s(folder)


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        ([("begin", 1000, 5), ("end", 1100, 105)], 100),
        ([("begin", 1000, 5), ("end", 400, 105)], 100),  # the clock was set back meanwhile
        ([("begin", 1000, 5), ("end", 9000, 105)], 100),  # and forward
        ([("begin", 1000, 5), ("end", 1100, 105), ("begin", 500, 7), ("end", 530, 37)], 130),  # back between two
        ([("begin", 1000, 5)], 0),  # killed before its first trial
        ([("begin", 1000, 5), ("alive", 1050, 55)], 50),
        ([("begin", 1000, 5), ("alive", 400, 55)], 50),
        ([("begin", 1000, 5), ("begin", 500, 1), ("end", 510, 11)], 10),
    ],
)
def test_the_time_that_sessions_took_survives_a_clock_that_is_set(tmp_path, lines, seconds):
    assert spent(tmp_path / "night", lines) == seconds


@pytest.mark.parametrize("confirms", [False, True])
def test_a_search_is_charged_for_all_that_its_commands_took(tmp_path, monkeypatch, confirms):
    """Two commands of 100 s, whose sessions are 30 s of each: from the start of the process to the last charge."""
    now = [1000.0]
    monkeypatch.setattr(sessions, "time", types.SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    experiment.create(night := tmp_path / "night", loaded(), CONTENT)
    experiment.create(again := night / "confirm", loaded(), CONTENT)
    for number in (1, 2):
        command_time = sessions.CommandTime(night, begun=now[0])
        for part_s, folder in ((50, None), (30, night), (4, None), (6, again if confirms else None), (10, None)):
            with contextlib.nullcontext() if folder is None else sessions.recorded_session(folder, "search"):
                now[0] += part_s
            command_time.charge()
        assert sessions.all_spent_s(night) == 100 * number
        assert [period.spent_s for period in journals.sessions(night)] == [30] * number
    assert sessions.spent_s(again) == 12 * confirms


def test_a_running_session_notes_that_it_goes_on(tmp_path):
    night = tmp_path / "night"
    experiment.create(night, loaded(), CONTENT)
    began = time.monotonic()
    with sessions.recorded_session(night, "search"):
        time.sleep(0.05)
        sessions.alive(night)
        assert 0.05 <= sessions.spent_s(night) <= time.monotonic() - began
    sessions.alive(tmp_path / "gone")  # a disk that vanished is told otherwise


def test_start_of_a_session_counts_towards_its_limit(tmp_path, monkeypatch):
    experiment.create(night := tmp_path / "night", space := loaded(), CONTENT)
    before_s = []
    monkeypatch.setattr(tuner, "search", lambda folder, space, slots, spent_s, listener: before_s.append(spent_s))
    with sessions.recorded_session(night, "search"):
        time.sleep(0.05)  # Ray starts
        connection.search(night, space, None, None)
    assert before_s[0] >= 0.05


# --------------------------------------------------------------------------------------------------------- early stopping
def run_of(number, drawn=None):
    """A run; what Optuna drew for the first is the baseline."""
    drawn = drawn or {"loader.batch_size": 64 if number else 128}
    role = "repeat" if "seed" in drawn else "draw"
    return types.SimpleNamespace(name=f"t{number:04d}", drawn=drawn, role=role)


def rule_of(earlier=(), **changes):
    return early_stopping(loaded(early_stopping="asha", **changes), earlier)


def stopped_at(rule, curves, first=0, drawn=None):
    """Feed runs one after the other to the rule; training seconds at which each was stopped, or None."""
    found = []
    for number, curve in enumerate(curves, first):
        run, points = run_of(number, drawn), enumerate(curve, 1)
        results = (result_of(index, train_s, value) for index, (train_s, value) in points)
        found.append(next((result["train_s"] for result in results if stops(rule, run, result)), None))
    return found


def stops(rule, run, result):
    decision = rule.decide(run, result)
    return decision is not None and decision.outcome == "stopped"


def result_of(index, train_s, value, budget_s=8):
    return {"index": index, "train_s": train_s, "fraction": train_s / budget_s, "objective": value}


def at(*values):
    """A curve with points after 2, 4, 6 and 8 s."""
    return list(zip((2.0, 4.0, 6.0, 8.0), values, strict=True))


@pytest.mark.parametrize("seed", [{}, {"seed": 7}])
def test_the_baseline_is_never_stopped_and_others_are_held_against_it(seed):
    """With two slots others may be ahead of it from its first point on; without its end there is nothing to compare."""
    rule = rule_of()
    good, bad = at(9.0, 5.0, 4.0, 3.0), at(30.0, 29.0, 28.0, 27.0)
    assert stopped_at(rule, [good] * 4, first=1) == [None] * 4
    assert stopped_at(rule, [bad], first=5) == [4.0], "the rule stops nothing at all"
    assert stopped_at(rule, [bad], first=6, drawn={"loader.batch_size": 128} | seed) == [None]

    alone = rule_of()
    baseline = {"loader.batch_size": 128}
    for number, by in enumerate((1.0, 1.001, 1.003)):  # equal values would be those of a metric of few steps
        curve = [(train_s, value * by) for train_s, value in good]
        stopped_at(alone, [curve], first=number, drawn=baseline | {"seed": number})
    assert stopped_at(alone, [bad], first=3) == [4.0], "the baseline's results are not held against others"


def test_early_stopping_spares_what_is_within_the_noise_of_the_best():
    """Runs of the baseline tell the noise at each point; before a second one has, a margin takes its place."""
    baseline = {"loader.batch_size": 128}
    behind = [at(12.0 * by, 8.0 * by, 6.0 * by, 4.0 * by) for by in (1.02, 1.05, 1.08, 1.18)]
    worse = at(12.0 * 1.3, 8.0 * 1.3, 6.0 * 1.3, 4.0 * 1.3)
    for again, expected in ((), 4.0), ((1.1,), None), ((1.001,), 4.0):
        rule = rule_of()
        for seed, by in enumerate((1.0, *again)):
            curve = at(12.0 * by, 8.0 * by, 6.0 * by, 4.0 * by)
            assert stopped_at(rule, [curve], seed, baseline | {"seed": seed}) == [None]
        near = behind[:0] if again == (1.001,) else behind
        assert stopped_at(rule, near, first=3) == [None] * len(near), "stopped within the noise"
        stopped_at(rule, behind[:3], first=10)  # others that a rule needs before it stops any
        assert stopped_at(rule, [worse], first=7) == [expected]


def test_early_stopping_spares_a_small_difference_of_an_accuracy():
    rule = rule_of(workload="digits_classifier")
    assert stopped_at(rule, [at(0.6, 0.9, 0.9, 0.9)]) == [None]
    curves = [at(0.5, 0.87, 0.88, 0.89), at(0.5, 0.84, 0.85, 0.86)]
    assert stopped_at(rule, curves, first=1) == [None, 4.0]


def test_resumed_early_stopping_knows_the_noise():
    """The baseline ran twice in the session before."""

    def of_baseline(seed, by):
        points = [point(j, 2.0 * j, frechet=by * 10.0 / j) for j in range(1, 5)]
        return record.TrialRecord(f"t{seed:04d}", seed, {}, {"seed": seed} if seed else {}, "", points=points)

    earlier = [of_baseline(0, 1.0), of_baseline(1, 1.1), of_baseline(2, 1.05)]
    rule = rule_of(earlier)
    assert stopped_at(rule, [at(11.2, 5.6, 3.73, 2.8)], first=4) == [None]


def test_early_stopping_never_ends_a_trial_at_its_last_point():
    """Its worker still writes the weights, for however long: it ends by itself, with its own end."""
    rule = rule_of()
    stopped_at(rule, [at(9.0, 5.0, 4.0, 3.0)] * 4, first=1)
    results = [result_of(index, 2.0 * index, value) for index, value in enumerate((9.0, 5.0, 4.0, 30.0), 1)]
    assert [stops(rule, run_of(5), result) for result in results] == [False] * 4


def test_a_point_that_a_restarted_worker_tells_again_is_not_judged_again():
    """It survived its first judgement; only what it does next is news."""
    rule, restarted = rule_of(), run_of(1)
    results = [result_of(index, 2.0 * index, value) for index, value in enumerate((9.0, 8.0, 7.0), 1)]
    decisions = [stops(rule, restarted, result) for result in results[:2]]
    stopped_at(rule, [at(2.0, 1.0, 0.5, 0.25)] * 4, first=2)  # others were better meanwhile
    decisions += [stops(rule, restarted, result) for result in results]
    assert decisions == [False] * 5, "there is one rung"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_rung_is_that_of_rays_asha(mode):
    """Random curves of trials in turns: the same decisions, point by point."""
    ray_rule, rule = (
        ASHAScheduler(time_attr="f", max_t=1, grace_period=GRACE, reduction_factor=2),
        Halving(mode == "min"),
    )
    ray_rule.set_search_properties("value", mode)
    draw, decisions = random.Random(0), []
    for name in (f"t{number}" for number in range(50)):
        trial = types.SimpleNamespace(trial_id=name)
        ray_rule.on_trial_add(None, trial)
        for fraction in (0.25, 0.4, 0.55, 0.7, 0.9):
            value = draw.random()
            expected = ray_rule.on_trial_result(None, trial, {"f": fraction, "value": value}) == "STOP"
            found = rule.judge(name, {"fraction": fraction, "objective": value, "train_s": fraction})
            decisions.append((found is not None and found.outcome == "stopped", expected))
    assert all(found == expected for found, expected in decisions)
    assert 10 < sum(expected for _, expected in decisions) < 40


def test_tune_stops_what_the_rule_stops_and_may_keep_a_copy(tmp_path):
    scheduler = tuner.EarlyStoppingScheduler(rule := rule_of())
    stopped_at(rule, [at(9.0, 5.0, 4.0, 3.0)] * 4, first=1)
    run = run_of(5)
    run.folder = tmp_path / run.name
    Journal(run.folder).start({}, "", run.drawn, 8.0)
    trial = types.SimpleNamespace(config={tuner.SPEC: run})
    assert scheduler.on_trial_result(None, trial, result_of(1, 2.0, 30.0)) == TrialScheduler.CONTINUE
    assert scheduler.on_trial_result(None, trial, result_of(2, 4.0, 30.0)) == TrialScheduler.STOP
    assert pickle.dumps(scheduler)


def test_the_words_of_a_stop_are_what_the_rule_has_compared_also_after_a_kill(tmp_path):
    """Trials in turns, of which the last one is the best: it is no reason for what was stopped before it."""
    space, journals = loaded(early_stopping="asha"), {}
    rule, seconds = early_stopping(space), 4.0
    values, outcomes = {4: 5.0, 1: 6.0, 2: 7.0, 7: 6.5, 6: 5.9, 3: 2.0}, {}
    for number, value in values.items():
        run = run_of(number, {"loader.batch_size": 16 * number})
        run.folder = tmp_path / "trials" / run.name
        journals[number] = journal = Journal(run.folder)
        journal.start(*cfg.identity(space.config(run.drawn)), run.drawn, 8.0, number)
        journal.point(point(2, seconds, frechet=value))
        outcomes[number] = rule.stops(run, result_of(2, seconds, value))
    trials = {trial.number: trial for trial in record.read_trials(tmp_path)}
    found = [trial.decision and trial.decision.outcome for trial in map(trials.get, values)]
    assert found == [None, "within_noise", "stopped", "stopped", "better_half", "better_half"]
    assert outcomes == {number: trials[number].decision is not None and number in (2, 7) for number in values}

    stopped = trials[7].decision
    assert (stopped.others, stopped.median) == (
        ["t0004", "t0001", "t0002"],
        statistics.median(values[n] for n in (4, 1, 2)),
    )
    assert (stopped.value, stopped.best, stopped.limit) == (6.5, 5.0, pytest.approx(6.0))
    again = rule_of(trials.values())  # killed before it wrote the end
    assert again.decide(run_of(7), result_of(2, seconds, 6.5)) == stopped
    journals[7].end(End("pruned"))
    said = "6.5 after 4.0 s: worse than 6 (median of 3 trials) and than 6 (margin of the best, 5)"
    assert sentences.of_trial(record.read_trial(journals[7].folder)) == said
    journals[6].end(End("pruned"))  # by whoever asked for it, in the better half
    assert sentences.of_trial(record.read_trial(journals[6].folder)) == ""


def test_nothing_is_stopped_unless_asked_for():
    assert early_stopping(loaded()) is None
