"""Trials that pause and continue, without a cluster: what a search proposes, and what it leaves on disk."""

import math
import shutil
import types

import pytest

from tests.helpers import point
from tests.tuning.asked import FILE, end, pool, study
from tunediff import search_space
from tunediff.config import ConfigError
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.tuning import curve_model, experiment, warm_start
from tunediff.tuning.allocation import Decision, Promotion
from tunediff.tuning.loop import Searcher
from tunediff.tuning.optuna_proposer import OptunaProposer

POINTS = 4
SEARCH = {
    "budget": {"per_trial": "3s", "trials": 5}, "early_stopping": "pause",
    "search": {"loader.batch_size": [16, 32, 64, 128, 256], "loader.resident": [False, True]}, "first": None,
}  # fmt: skip


class PairsRule:
    """Pauses at every first point, and continues the better of every two trials."""

    def __init__(self, size=2):
        self.size, self.asked = size, []

    def after_point(self, trial, trials):
        self.asked.append((trial.name, trial.points[-1].index))
        return Decision.PAUSE if len(trial.points) == 1 else Decision.GO_ON

    def next_trial(self, trials, may_draw):
        paused = [trial for trial in trials if trial.paused]
        best = min(paused, key=lambda trial: trial.points[-1]["frechet"], default=None)
        return best.name if best is not None and (len(paused) >= self.size or not may_draw) else None


@pytest.fixture
def search(make, tmp_path):
    """A search of one slot, or several, asked and told as Tune does; `again` opens it anew, as a resume does."""

    class Search:
        rule = PairsRule()

        def __init__(self, slots=1, **changes):
            self.slots, self.changes, self.ids = slots, SEARCH | changes, iter(range(1000))
            self.again()

        def again(self):
            self.searcher = make(self.slots, **self.changes)
            if self.searcher.proposer.pausing is not None:
                self.searcher.proposer.pausing._rule = self.rule

        def suggest(self):
            self.id = f"tune{next(self.ids)}"
            self.suggestion = self.searcher.suggest(self.id)
            return self.suggestion["trial"] if isinstance(self.suggestion, dict) else self.suggestion

        def run(self, value, to=POINTS):
            """Run what was suggested last to point `to`; return where it stopped."""
            spec, journal = self.suggestion["spec"], Journal(self.suggestion["spec"].folder)
            spec.begin()
            journal.write("worker", device="cpu", threads=2)
            known = [one.index for one in record.read_trial(spec.folder).points]
            for index in range(1, to + 1):
                journal.point(point(index, float(index), frechet=value / index))
                (spec.folder / record.CHECKPOINT).write_bytes(bytes(1000))
                result = {"index": index, "objective": value / index}
                if self.searcher.proposer.decide(spec, result) is not Decision.GO_ON:
                    self.searcher.on_trial_complete(self.id, result)
                    return index
                if index not in known:
                    self.searcher.on_trial_result(self.id, result)
            if to == POINTS:
                end(self.searcher, self.suggestion, None, begin=False)
                self.searcher.on_trial_complete(self.id, result)
            return to

        def trial(self, name):
            return record.read_trial(tmp_path / "trials" / name)

    return Search


def test_trials_pause_at_their_first_point_and_the_better_one_continues(search):
    one = search()
    assert (one.suggest(), one.run(9.0)) == ("t0000", POINTS), "the baseline is never paused"
    assert (one.suggest(), one.run(3.0)) == ("t0001", 1)
    assert (one.suggest(), one.run(2.0)) == ("t0002", 1)
    assert [one.trial(name).status for name in ("t0000", "t0001", "t0002")] == ["ok", "paused", "paused"]
    assert one.suggest() == "t0002"
    assert one.run(2.0) == POINTS
    assert (one.trial("t0002").status, one.trial("t0002").attempts) == ("ok", 2)
    assert one.suggest() == "t0003"


def test_a_search_ends_what_it_never_continued_and_its_checkpoint(search, tmp_path):
    one = search()
    for value in (9.0, 3.0, 2.0, 2.0, 4.0):
        one.suggest()
        one.run(value)
    never = types.SimpleNamespace(next_trial=lambda trials, may_draw: None, after_point=one.rule.after_point)
    one.searcher.proposer.pausing._rule = never
    one.suggest()
    one.run(5.0)
    assert [one.trial(f"t000{i}").status for i in range(5)] == ["ok", "paused", "ok", "paused", "paused"]
    assert one.suggest() == "FINISHED"
    left = [one.trial(f"t000{i}") for i in (1, 3, 4)]
    assert [trial.status for trial in left] == ["pruned"] * 3
    assert left[0].reason == "paused after 1.0 s and not continued: others were better"
    assert [trial.end.steps for trial in left] == [trial.points[0].steps for trial in left]
    assert not list(tmp_path.glob(f"trials/t000[134]/{record.CHECKPOINT}"))
    states = {t.user_attrs["trial"]: t for t in study(one.searcher)}
    assert [states[f"t000{i}"].state.name for i in range(5)] == ["COMPLETE", "PRUNED", "COMPLETE", "PRUNED", "PRUNED"]
    assert states["t0001"].intermediate_values == {1: 3.0}, "Tune reports no point after which a trial stops"


def test_points_before_a_pause_are_not_decided_again(search):
    one = search()
    one.rule.asked.clear()
    for value in (9.0, 3.0, 2.0, 2.0):
        one.suggest()
        one.run(value)
    assert one.rule.asked == [("t0001", 1), ("t0002", 1), ("t0002", 2), ("t0002", 3)]


def test_resume_knows_who_is_paused_and_continues_what_ran(search):
    """Killed while t0002 runs, and again while it continues."""
    one = search()
    for value in (9.0, 3.0):
        one.suggest()
        one.run(value)
    one.suggest()
    one.suggestion["spec"].begin()
    one.again()
    assert (one.suggest(), one.run(2.0)) == ("t0002", 1)
    assert one.suggest() == "t0002"
    one.suggestion["spec"].begin()
    one.again()
    assert (one.suggest(), one.trial("t0001").status) == ("t0002", "paused")
    assert one.run(2.0) == POINTS
    assert one.suggest() == "t0003"


def test_resume_after_a_kill_between_a_point_and_its_pause_pauses_then(search):
    one = search()
    one.suggest()
    one.run(9.0)
    one.suggest()
    one.suggestion["spec"].begin()
    Journal(one.suggestion["spec"].folder).point(point(1, 1.0, frechet=3.0))
    one.again()
    assert (one.suggest(), one.run(3.0)) == ("t0001", 1)
    assert one.trial("t0001").status == "paused"


def test_a_kill_before_a_chosen_trial_begins_leaves_it_paused(search):
    one = search()
    for value in (9.0, 3.0, 2.0):
        one.suggest()
        one.run(value)
    assert one.suggest() == "t0002"
    one.again()
    assert one.suggest() == "t0002"


def test_a_lost_study_knows_paused_trials_from_their_journals(search, tmp_path):
    one = search()
    for value in (9.0, 3.0, 2.0):
        one.suggest()
        one.run(value)
    (tmp_path / "study.db").unlink()
    one.again()
    assert (one.suggest(), one.trial("t0001").status) == ("t0002", "paused")


def test_a_paused_trial_is_given_to_one_slot_only(search):
    one = search(slots=3)
    for value in (9.0, 3.0, 2.0):
        one.suggest()
        one.run(value)
    assert [one.suggest(), one.suggest(), one.suggest()] == ["t0002", "t0003", "t0004"]


def test_a_free_slot_waits_while_a_running_trial_may_still_pause(search):
    """All are drawn; whether a paused one continues depends on the one that runs."""
    one = search(slots=2, budget={"per_trial": "3s", "trials": 3})
    for value in (9.0, 3.0):
        one.suggest()
        one.run(value)
    assert one.suggest() == "t0002"
    running = one.suggestion, one.id
    one.searcher.proposer.pausing._rule = types.SimpleNamespace(
        next_trial=lambda trials, may_draw: PairsRule().next_trial(trials, True), after_point=PairsRule().after_point
    )
    assert one.suggest() is None
    one.suggestion, one.id = running
    assert one.run(2.0) == 1
    assert one.suggest() == "t0002"


def test_checkpoints_of_paused_trials_are_bounded_and_the_worst_trial_ends(search, tmp_path):
    one = search(paused_gib=2500 / 2**30)
    one.rule.size = 9
    for value in (9.0, 3.0, 5.0, 4.0):
        one.suggest()
        one.run(value)
    one.rule.size = 2
    assert [one.trial(f"t000{i}").status for i in range(4)] == ["ok", "paused", "pruned", "paused"]
    assert (
        "paused after 1.0 s; checkpoints of paused trials took over paused_gib = 2.32831e-06"
        in one.trial("t0002").reason
    )
    kept = sorted(path.parent.name for path in tmp_path.glob(f"trials/t000[123]/{record.CHECKPOINT}"))
    assert kept == ["t0001", "t0003"]


@pytest.mark.parametrize(("spent_s", "answer"), [(500.0, "t0002"), (750.0, "t0001"), (800.0, "FINISHED")])
def test_no_trial_starts_or_continues_that_would_not_end_in_time(search, spent_s, answer):
    """A new trial takes 300 s; three quarters are left of one that is paused at the first of four points."""
    one = search(budget={"per_trial": "300s", "trials": 5, "total": "1000s"})
    for value in (9.0, 3.0):
        one.suggest()
        one.run(value)
    one.searcher.proposer._spent_s = spent_s
    assert one.suggest() == answer


def test_pausing_is_refused_where_no_checkpoint_is_kept():
    content = {
        "workload": "digits",
        "budget": {"per_trial": "3s", "trials": 2},
        "search": {"loader.batch_size": [1, 2]},
    }
    with pytest.raises(ConfigError, match="early_stopping: 'pause' is not allowed for samples_per_s"):
        search_space.parse(content | {"objective": "samples_per_s", "early_stopping": "pause"}, "x.yaml")


def test_promotion_finishes_the_best_and_ends_the_search(search):
    one = search(budget={"per_trial": "3s", "trials": 9})
    one.searcher.proposer.pausing._rule = Promotion(one.searcher.proposer.space)
    values, turns = {"t0000": 9.0, "t0004": 2.0}, 0
    while (name := one.suggest()) != "FINISHED":
        one.run(values.get(name, 8.0 + 0.1 * int(name[1:])))
        turns += 1
    ended = {f"t000{i}": one.trial(f"t000{i}").status for i in range(9)}
    assert ended["t0004"] == "ok"
    assert set(ended.values()) == {"ok", "pruned"}
    assert turns < 9 * POINTS


def test_new_configurations_are_those_of_the_model_of_curves_also_after_a_resume(search, tmp_path):
    lr = {"low": 1e-4, "high": 1e-2, "log": True}
    one = search(search={"optimizer.lr": lr}, budget={"per_trial": "3s", "trials": 8})
    while (name := one.suggest()) != "t0005":
        one.run(9.0 - int(name[1:]))
    proposed = curve_model.propose(one.searcher.proposer.space, record.read_trials(tmp_path), 5)
    assert proposed is not None
    assert one.suggestion["optimizer.lr"] == proposed["optimizer.lr"]
    one.again()
    assert (one.suggest(), one.suggestion["optimizer.lr"]) == ("t0005", proposed["optimizer.lr"])


def test_model_of_curves_reads_the_trials_of_a_warm_start(make, tmp_path):
    """It draws where they were best from the second trial on, and goes on without them once they are gone."""
    lr = {"low": 1e-4, "high": 1e-2, "log": True}
    content = {key: value for key, value in FILE.items() if key != "first"} | {"search": {"optimizer.lr": lr}}
    content |= {"early_stopping": "pause", "budget": {"per_trial": "3s", "trials": 9}}
    space = search_space.parse(content, "x.yaml")
    folder = tmp_path / "earlier"
    experiment.create(folder, space, content)
    earlier = Searcher(OptunaProposer(space, folder), pool())
    earlier.proposer.pausing = None  # each one ends
    while isinstance(suggestion := earlier.suggest("a"), dict):
        end(earlier, suggestion, "a", value=1 + math.log10(suggestion["optimizer.lr"] / 2e-3) ** 2)
    changes = content | {"first": None, "warm_start": str(folder)}
    searcher = make(**changes)
    end(searcher, searcher.suggest("a"), "a", value=3.0)
    reused = warm_start.reused_trials(searcher.proposer.space, "cpu")
    assert len(reused) == 9
    assert [trial.number for trial in reused] == [-number for number in range(1, 10)]
    expected = curve_model.propose(searcher.proposer.space, [*reused, *record.read_trials(tmp_path)], 1)
    assert searcher.suggest("b")["optimizer.lr"] == expected["optimizer.lr"]
    shutil.rmtree(folder)
    assert make(**changes).suggest("c")["trial"] == "t0001"


def test_points_of_the_search_file_go_before_the_model(search):
    one = search(first=[{"loader.batch_size": size} for size in (64, 128, 256, 16, 32)], budget=SEARCH["budget"])
    drawn = []
    for _ in range(8):
        if one.suggest() == "FINISHED":
            break
        drawn.append(one.suggestion["loader.batch_size"])
        one.run(2.0)
    assert set(drawn) >= {64, 128, 256, 16}
