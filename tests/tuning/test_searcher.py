"""What Optuna is told and what it is asked, without a cluster."""

import errno
import pickle
import sys

import optuna
import pytest

from tests.helpers import point
from tests.tuning.asked import BIG, FILE, drawn_of, end, study
from tunediff import config as cfg
from tunediff import search_space
from tunediff.core import trial_record as record
from tunediff.core.errors import Failure
from tunediff.core.journal import Journal, repeat_lost
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import End
from tunediff.tuning.resources import Machine, Pool, ResourcePartition


@pytest.mark.parametrize("sampler", ["TPESampler", "GPSampler", "NSGAIISampler"])
def test_first_points_come_first_and_every_configuration_once(make, sampler):
    searcher = make(sampler=sampler)
    drawn = []
    for i in range(6):
        suggestion = searcher.suggest(f"tune{i}")
        drawn.append((drawn_of(suggestion)["loader.batch_size"], drawn_of(suggestion)["loader.resident"]))
        assert suggestion["spec"].name == f"t{i:04d}"
        end(searcher, suggestion, f"tune{i}", value=float(i))
    assert drawn[:2] == [(128, False), (64, False)]
    assert len(set(drawn)) == 6  # the whole space
    assert searcher.suggest("tune6") == "FINISHED"
    assert type(searcher.proposer.study.optuna.sampler).__name__ == sampler, "as the file names it"


def test_a_raised_limit_goes_on_where_the_grid_was_cut(make):
    """The points of a grid come in their order, before and after `--trials` was raised, and none that is not in it."""
    grid = {
        "grid": {"loader.batch_size": [32, 64, 128], "optimizer.lr": [1e-3, 2e-3]},
        "search": None,
        "first": None,
        "noise": None,
    }
    content = {key: value for key, value in (FILE | grid).items() if value is not None}
    expected = [
        dict(point) for point in search_space.parse(content | {"budget": {"per_trial": "3s"}}, "x.yaml").candidates
    ]
    seen = []
    for trials in (2, 5, 6):
        searcher = make(**grid, budget={"per_trial": "3s", "trials": trials})
        while (suggestion := searcher.suggest(f"tune{len(seen)}")) != "FINISHED":
            end(searcher, suggestion, f"tune{len(seen)}")
            seen.append(drawn_of(suggestion))
        assert len(seen) == trials
    assert seen == expected


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (status, "PRUNED" if status == "pruned" else "COMPLETE")
        for status in Status
        if status not in ("ok", "unfinished")
    ],
)
def test_failures_are_bad_and_not_unknown(make, status, state):
    searcher = make()
    end(searcher, searcher.suggest("a"), "a", value=7.0)
    end(searcher, searcher.suggest("b"), "b", status=status)
    assert study(searcher)[1].state.name == state
    assert study(searcher)[1].user_attrs["status"] == status
    if state == "COMPLETE":
        assert study(searcher)[1].value > 7.0


def test_a_trial_stopped_by_the_scheduler_is_pruned(make):
    searcher = make()
    suggestion = searcher.suggest("a")
    end(searcher, suggestion, None, status=None)
    checkpoint = searcher.proposer.experiment / "trials" / "t0000" / record.CHECKPOINT
    checkpoint.touch()
    searcher.on_trial_complete("a", {})
    assert record.read_trial(searcher.proposer.experiment / "trials" / "t0000").status == "pruned"
    assert not checkpoint.exists()


def test_a_trial_whose_driver_died_is_no_lesson(make):
    searcher = make()
    suggestion = searcher.suggest("a")
    end(searcher, suggestion, None, status=None)
    searcher.on_trial_complete("a", None, error=True)
    assert study(searcher)[0].state.name == "FAIL"


def test_what_is_lost_may_be_drawn_again_and_listed_points_run_again_on_resume(make, tmp_path):
    """No other trial can take the place of the baseline; it keeps its name."""
    died = End("error", "the workers died 2 times: killed", process_died=True)
    limits, ran = {"budget": {"per_trial": "3s", "trials": 8}}, []
    searcher = make(**limits)  # of six points
    while isinstance(suggestion := searcher.suggest("a"), dict):
        is_lost = len(ran) in (0, 2)
        ran.append(drawn_of(suggestion))
        end(searcher, suggestion, None if is_lost else "a", status=None if is_lost else "ok")
        if is_lost:
            Journal(suggestion["spec"].folder).end_trial(died)
            searcher.on_trial_complete("a", {})
    assert (len(ran), len({repr(drawn) for drawn in ran})) == (6, 6), "none is drawn again in its session"

    for _ in range(2):  # the second time it is under way
        repeat_lost(tmp_path, searcher.proposer.space.candidates)
        searcher = make(**limits)
        again = searcher.suggest("b")
        assert (again["spec"].name, drawn_of(again)) == ("t0000", ran[0])
    end(searcher, again, "b")
    assert record.read_trial(tmp_path / "trials" / "t0000").status == "ok"
    assert drawn_of(make(**limits).suggest("c")) == ran[2]


def test_resume_continues_what_ran_under_its_name_and_repeats_nothing(make):
    first = make()
    end(first, first.suggest("a"), "a")
    running = first.suggest("b")
    end(first, running, None, status=None)  # killed while it trained

    second = make()
    again = second.suggest("x")
    assert (drawn_of(again), again["spec"].name) == (drawn_of(running), running["spec"].name)
    end(second, again, "x")
    assert second.suggest("y")["spec"].name == "t0002"


def test_a_trial_that_was_killed_before_its_worker_began_goes_on_as_what_it_is(make):
    """Also one of whose journal the first line was cut."""
    first = make(slots=2)
    cut, whole = first.suggest("a"), first.suggest("b")  # neither had a driver
    (cut["spec"].folder / record.JOURNAL).write_text('{"event": "start", "ti')

    second = make(slots=2)
    again, new = second.suggest("x"), second.suggest("y")
    assert (again["spec"].name, drawn_of(again)) == (whole["spec"].name, drawn_of(whole))
    assert (new["spec"].name, drawn_of(new)["loader.batch_size"]) == ("t0000", 128), "the baseline"
    for suggestion, attempts in ((again, 2), (new, 1)):
        found = record.read_trial(suggestion["spec"].folder)
        assert (found.attempts, found.finished, found.drawn) == (attempts, False, drawn_of(suggestion))
        assert cfg.configuration_of(record.read_begun(suggestion["spec"].folder)) == second.proposer.space.config(
            found.drawn
        )


def test_study_of_a_session_is_a_file_for_the_dashboard(make, tmp_path):
    first = make()
    for i in range(3):
        end(first, first.suggest(f"a{i}"), f"a{i}", value=float(i))
    for searcher in (first, make()):
        searcher.proposer.study.write(tmp_path / "study.db")
        written = optuna.load_study(study_name="tunediff", storage=f"sqlite:///{tmp_path}/study.db").trials
        runs = [[(t.params, t.value, t.intermediate_values) for t in of if "trial" in t.user_attrs]
                for of in (written, study(first))]  # fmt: skip
        assert runs[0] == runs[1]


def test_no_trial_starts_that_would_not_end_in_time(make):
    budget = {"per_trial": "3s", "trials": 6, "total": "1h"}
    assert make(budget=budget, spent_s=3540.0).suggest("a")["spec"].name == "t0000"
    assert make(budget=budget, spent_s=3598.0).suggest("b")["spec"].name == "t0000"  # what was begun is finished


def test_first_trial_runs_however_long_the_start_took(make, tmp_path):
    """The shortest allowed limit is one training, which leaves no time for start-up."""
    searcher = make(budget={"per_trial": "3s", "trials": 6, "total": "5s"}, spent_s=4.0)
    end(searcher, first := searcher.suggest("a"), "a")
    assert first["spec"].name == "t0000"
    assert not (tmp_path / "sessions.jsonl").exists()
    assert [searcher.suggest("b"), searcher.suggest("c")] == ["FINISHED"] * 2
    assert (tmp_path / "sessions.jsonl").read_text().count('"time is up"') == 1


@pytest.mark.parametrize(
    ("total", "spent_s", "confirm", "starts"),
    [
        ("1h", 3580.0, None, True),
        ("1h", 3570.0, {"of": 1}, True),
        ("1h", 3580.0, {"of": 1}, False),  # two configurations, three seeds of 3 s each
        ("20s", 5.0, {"of": 1}, True),
        ("20s", 9.0, {"of": 1}, False),  # trials get half of it
    ],
)
def test_trials_leave_time_for_confirming_runs(make, clock, total, spent_s, confirm, starts):
    """However long the draws take here: the clock stands still."""
    budget = {"per_trial": "3s", "trials": 6, "total": total}
    searcher = make(budget=budget, spent_s=spent_s, **({"confirm": confirm} if confirm else {}))
    for name in ("a", "b"):
        end(searcher, searcher.suggest(name), name)
    assert (searcher.suggest("c") != "FINISHED") == starts


def test_the_baseline_alone_leaves_confirming_runs_no_time(make, clock):
    searcher = make(budget={"per_trial": "3s", "trials": 6, "total": "1h"}, spent_s=3580.0, noise=2, confirm={"of": 1})
    for name in ("a", "b", "c"):
        end(searcher, searcher.suggest(name), name)
    assert searcher.suggest("d") == "FINISHED"


def test_contradicting_knobs_are_drawn_again(make):
    searcher = make(search={"loader.batch_size": [96, 128], "parallel.workers": [1, 5]}, first=[])
    sizes = set()
    for name in ("a", "b"):
        suggestion = searcher.suggest(name)
        sizes.add((drawn_of(suggestion)["loader.batch_size"], drawn_of(suggestion)["parallel.workers"]))
        end(searcher, suggestion, name)
    assert sizes == {(96, 1), (128, 1)}  # 5 workers divide neither
    assert searcher.suggest("c") == "FINISHED"
    assert optuna.trial.TrialState.RUNNING not in {t.state for t in study(searcher)}


@pytest.mark.parametrize("resumed", [False, True])
def test_curve_of_a_pruned_trial_is_in_the_study_without_its_void_points(make, resumed):
    """TPE sorts pruned trials by it."""
    searcher = make(early_stopping="asha")
    journal = Journal(searcher.suggest("a")["spec"].folder)
    for index, value in ((1, 9.0), (2, 8.5)):
        journal.point(point(index, index * 1.0, frechet=value))
    journal.restarted()
    for index, value in ((1, 3.0), (2, 2.0)):
        journal.point(point(index, index * 1.0, frechet=value))
    journal.end(End("pruned"))
    if resumed:
        searcher = make(early_stopping="asha")
    else:
        searcher.on_trial_complete("a", {})
    (trial,) = study(searcher)
    assert (trial.state.name, trial.user_attrs["trial"]) == ("PRUNED", "t0000")
    assert trial.intermediate_values == {1: 3.0, 2: 2.0}


def test_tune_may_keep_a_copy_of_the_searcher(make, tmp_path):
    """It pickles all it was given; a configuration's class is made at run time and cannot be."""
    searcher = make()
    assert pickle.dumps(searcher)
    searcher.save_to_dir(str(tmp_path), "now")
    assert not list(tmp_path.glob("searcher-state*"))


# ------------------------------------------------------------------------------------------ knobs that change nothing
IDLE = {"loader.resident": [False, True], "loader.workers": [0, 1, 2], "loader.pin_memory": [False, True]}


@pytest.mark.parametrize(("device", "different"), [("cpu", 4), ("cuda", 7)])
def test_what_trains_alike_is_drawn_once(make, device, different):
    """Loader processes change nothing beside samples that stay on the device, nor page-locked memory on a CPU."""
    budget = {"per_trial": "3s", "trials": 12}
    drawn = []
    for session in range(2):  # a resumed search draws no twin of what it ran before
        searcher = make(search=IDLE, first=None, budget=budget, device=device)
        for i in range(3 if session == 0 else 12):
            if (suggestion := searcher.suggest(f"tune{i}")) == "FINISHED":
                break
            drawn.append(tuple(drawn_of(suggestion)[knob] for knob in IDLE))
            end(searcher, suggestion, f"tune{i}")
    assert len(drawn) == len(set(drawn)) == different
    assert sum(resident for resident, *_ in drawn) == 1
    assert sum(t.state.name == "FAIL" for t in study(searcher)) < 100, "the search went on drawing what it knew"


def test_refused_capture_counts_as_the_eager_configuration(make):
    """Its step was not captured, so the same configuration without capture would only repeat it."""
    search = {"compile.capture": ["none", "step"], "loader.batch_size": [64, 128]}
    drawn = []
    searcher = make(search=search, first=None, budget={"per_trial": "3s", "trials": 12}, device="cuda")
    while (suggestion := searcher.suggest(f"tune{len(drawn)}")) != "FINISHED":
        refused = drawn_of(suggestion)["compile.capture"] == "step"
        drawn.append((drawn_of(suggestion)["loader.batch_size"], drawn_of(suggestion)["compile.capture"]))
        why = "a value is read on the host (mine.py:57)"
        end(searcher, suggestion, f"tune{len(drawn) - 1}", refusal=why if refused else "")
        if refused:
            found = record.read_trial(suggestion["spec"].folder)
            assert found.not_effective["compile.capture"] == f"refused: {why}"
    sizes = [size for size, capture in drawn if capture == "none"]
    assert len(drawn) <= 4
    for size, capture in drawn:
        later = drawn[drawn.index((size, capture)) + 1 :]
        assert capture != "step" or (size, "none") not in later
    assert 128 in sizes, "the baseline"


def test_what_the_file_lists_runs_although_it_changes_nothing(make):
    """Whoever wrote it down wants to see just that."""
    content = {"search": None, "first": None, "noise": None, "fixed": {"loader.resident": True}}
    searcher = make(**content, grid={"loader.workers": [0, 1, 2]}, budget={"per_trial": "3s"})
    for i, workers in enumerate((0, 1, 2)):
        suggestion = searcher.suggest(f"tune{i}")
        assert drawn_of(suggestion)["loader.workers"] == workers
        end(searcher, suggestion, f"tune{i}")
    assert searcher.suggest("x") == "FINISHED"


# ------------------------------------------------------------------------------------------------- the baseline again
def run(searcher, statuses="", first=0):
    """Run it to its end; the knobs of every trial. `statuses`: of the first ones, by their letters, e.g. `no`."""
    seen, known = [], {"o": "ok", "m": "oom", "n": "nan"}
    while (suggestion := searcher.suggest(f"tune{first + len(seen)}")) != "FINISHED":
        status = known[statuses[len(seen)]] if len(seen) < len(statuses) else "ok"
        end(searcher, suggestion, f"tune{first + len(seen)}", status=status, value=5.0 + len(seen))
        seen.append(drawn_of(suggestion))
    return seen


def test_the_baseline_runs_again_on_another_seed(make):
    searcher = make(noise=2, fixed={"seed": 7}, budget={"per_trial": "3s", "trials": 50})
    baseline, again, listed, *others = run(searcher)
    assert again == {**baseline, "seed": 8}
    assert listed["loader.batch_size"] == 64
    assert len(others) == 4, "the whole space of 6 points besides"
    assert not any("seed" in point for point in [baseline, listed, *others])
    trials = record.read_trials(searcher.proposer.experiment)
    assert [trial.config["seed"] for trial in trials] == [7, 8, *[7] * 5]
    assert trials[1].drawn == again
    told = [(t.params, t.value) for t in study(searcher)[:2]]
    assert told == [(baseline, 5.0), (baseline, 6.0)], "Optuna learns both values of one point"


def test_a_raised_limit_brings_the_second_run_of_the_baseline(make):
    """Five trials are too few for it, eight are not; and no point runs twice because there are others before it now."""
    budget = {"per_trial": "3s", "trials": 3}
    before = run(make(noise=None, budget=budget))
    after = run(make(noise=None, budget=budget | {"trials": 8}), first=3)
    assert after[0] == {**before[0], "seed": 1}
    points = [tuple(point.values()) for point in before + after[1:]]
    assert len(set(points)) == len(points) == 6, "the whole space"
    assert make(noise=None, budget=budget | {"trials": 4}).suggest("z") == "FINISHED"


def test_a_baseline_that_ran_out_of_memory_is_not_run_again(make):
    """Its place is for others; one that was not finite might be at another seed."""
    searcher = make(noise=2, search={"precision.amp": ["none", "bf16"]}, first=None)
    assert run(searcher, "m") == [{"precision.amp": "none"}, {"precision.amp": "bf16"}]
    assert [trial.name for trial in record.read_trials(searcher.proposer.experiment)] == ["t0000", "t0001"]


def test_a_baseline_that_was_not_finite_is_tried_on_another_seed(make):
    points = run(make(noise=2, search={"precision.amp": ["none", "bf16"]}, first=None), "n")
    assert [point.get("seed") for point in points] == [None, 1, None]


# ---------------------------------------------------------------------------------------------- what failures teach
def test_what_needs_more_memory_than_what_ran_out_is_not_run(make):
    """1,024 images in float32 ran out: so do they at any other learning rate, but perhaps not in bfloat16."""
    searcher = make(**BIG, budget={"per_trial": "3s", "trials": 50})
    run = []
    for i in range(50):
        if (suggestion := searcher.suggest(f"tune{i}")) == "FINISHED":
            break
        size, amp = drawn_of(suggestion)["loader.batch_size"], drawn_of(suggestion)["precision.amp"]
        run.append((size, amp, drawn_of(suggestion)["optimizer.lr"]))
        end(searcher, suggestion, f"tune{i}", status="oom" if size >= 1024 and amp == "none" else "ok")
    assert [one for one in run if one[0] >= 1024 and one[1] == "none"] == [(1024, "none", 1e-3)]
    assert len(run) == len(set(run)) == 7
    ruled_out = [t for t in study(searcher) if "ruled_out" in t.user_attrs]
    assert ruled_out
    assert all("as t0001, which ran out" in t.user_attrs["ruled_out"] for t in ruled_out)
    assert all(t.state.name == "COMPLETE" and t.value >= 10.0 for t in ruled_out)  # bad, not unknown


def test_a_point_of_the_file_that_is_ruled_out_is_in_the_record(make):
    grid = {"grid": {"loader.batch_size": [128, 256, 512, 1024]}, "search": None, "first": None, "noise": None}
    searcher = make(**grid, budget={"per_trial": "3s"})
    first, second = searcher.suggest("a"), None
    end(searcher, first, "a", status="ok")
    second = searcher.suggest("b")
    end(searcher, second, "b", status="oom")
    assert searcher.suggest("c") == "FINISHED"
    trials = record.read_trials(searcher.proposer.experiment)
    assert [t.status for t in trials] == ["ok", "oom", "skipped", "skipped"]
    assert trials[3].reason.startswith("not run: 1024 images at once in none precision need at least as much memory")
    assert [t.user_attrs["status"] for t in study(searcher)] == ["ok", "oom", "skipped", "skipped"]
    assert {t.value for t in study(searcher)} == {5.0, 10.0}, "none that was skipped makes the next one worse"
    again = make(**grid, budget={"per_trial": "3s"})  # resumed: nothing is asked again
    assert again.suggest("d") == "FINISHED"


FULL = Failure("No space left on device", "OSError", errno.ENOSPC, "checkpoint.pt")


def test_disk_without_room_for_a_checkpoint_stops_the_search_and_the_trial_is_repeated(make):
    """The probe of the disk finds room: it is smaller than a checkpoint."""
    searcher = make()
    suggestion = searcher.suggest("a")
    end(searcher, suggestion, None, status=None)
    folder = searcher.proposer.experiment / "trials" / suggestion["spec"].name
    Journal(folder).write("fault", kind="disk", **vars(FULL))
    searcher.on_trial_complete("a", None, error=True)
    assert (searcher.broken.errno, searcher.broken.filename) == (errno.ENOSPC, "checkpoint.pt")
    assert not record.read_trial(folder).finished
    again = make().suggest("b")
    assert (again["spec"].name, drawn_of(again)) == (suggestion["spec"].name, drawn_of(suggestion))


@pytest.mark.parametrize(
    ("results", "mode", "told"),
    [([5.0, 12.0], "min", 24.0), ([-9.0, -3.0], "min", 0.0), ([0.0], "min", 1.0), ([0.4, 0.9], "max", 0.0),
     ([-7.0, -2.0], "max", -14.0), ([0.0, 0.3], "max", -1.0), ([], "min", 2e9), ([], "max", -2e9), ([1e300], "min", 2e300),
     ([1.7e308], "min", sys.float_info.max)],
)  # fmt: skip
def test_a_failure_is_worse_than_every_result(results, mode, told):
    from tunediff.tuning.evaluated import penalty

    assert penalty(results, mode) == told
    assert all(told > one if mode == "min" else told < one for one in results)


def test_no_failure_makes_the_next_one_worse(make):
    """Not even a trial that ended ok with an objective that is no number."""
    searcher = make()
    end(searcher, searcher.suggest("a"), "a", value=7.0)
    for name, status in zip("bcdef", ("ok", "nan", "ok", "error", "oom"), strict=True):
        suggestion = searcher.suggest(name)
        if status == "ok":
            end(searcher, suggestion, None, status=None)
            journal = Journal(searcher.proposer.experiment / "trials" / suggestion["spec"].name)
            journal.point(point(4, 3.0))  # the evaluation found nothing
            journal.end(End("ok"))
            searcher.on_trial_complete(name, {})
        else:
            end(searcher, suggestion, name, status=status)
    assert [t.value for t in study(searcher) if t.value is not None] == [7.0] + [14.0] * 5


def test_a_trial_whose_node_was_lost_is_handed_out_again(make):
    """Under its name, and although the limit was reached meanwhile; no result is told to Optuna."""
    machines = tuple(Machine(64, 0, f"m{index}", f"id{index}") for index in range(2))
    places = Pool(ResourcePartition(machines, (1,), False, True), lambda: machines)
    searcher = make(places=places, budget={"per_trial": "3s", "trials": 2})
    first, second = searcher.suggest("a"), searcher.suggest("b")
    Journal(searcher.proposer.experiment / "trials" / first["spec"].name).write("lost", nodes=["a"], reason="died")
    end(searcher, second, "b")
    assert searcher.suggest("c") is None, "Tune would never ask again"
    searcher.on_trial_complete("a", {})
    again = searcher.suggest("d")
    assert (again["spec"].name, drawn_of(again)) == (first["spec"].name, drawn_of(first))
    end(searcher, again, "d")
    assert searcher.suggest("e") == "FINISHED"
    assert [trial.state.name for trial in study(searcher)] == ["COMPLETE", "COMPLETE"]


def test_a_large_trial_is_not_overtaken_by_small_ones(make):
    """Four devices: it waits until all are free, and then runs before what was drawn later."""
    places = Pool(ResourcePartition((Machine(8, 4),), (1, 2, 4), True, False))
    searcher = make(places=places, grid={"parallel.workers": [1, 4, 2]}, search=None, first=None, noise=None)
    small = searcher.suggest("a")
    assert (drawn_of(small)["parallel.workers"], searcher.suggest("b"), searcher.suggest("c")) == (1, None, None)
    end(searcher, small, "a")
    large = searcher.suggest("d")
    assert (drawn_of(large)["parallel.workers"], large["spec"].name, large["spec"].group.place.gpu) == (
        4,
        "t0001",
        True,
    )
    assert searcher.suggest("e") is None
    end(searcher, large, "d")
    assert drawn_of(searcher.suggest("f"))["parallel.workers"] == 2
