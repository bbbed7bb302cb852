"""What Optuna is told and what it is asked, without a cluster."""

import pickle

import optuna
import pytest

from tests.helpers import point
from tunediff import environment, record, space
from tunediff.config import ConfigError, workload
from tunediff.record import End

FILE = {
    "workload": "digits",
    "budget": {"per_trial": "3s", "trials": 6},
    "search": {"loader.batch_size": [32, 64, 128], "loader.resident": [False, True]},
    "first": [{"loader.batch_size": 64}],
    "noise": 1,
}


@pytest.fixture
def make(tmp_path):
    from tunediff.tuning.searcher import Searcher

    (tmp_path / "trials").mkdir()

    def make(slots=1, spent_s=0.0, **changes):
        content = {key: value for key, value in (FILE | changes).items() if value is not None}
        return Searcher(space.parse(content, "x.yaml"), tmp_path, slots, spent_s)

    return make


def end(searcher, suggestion, trial_id, status="ok", value=5.0, begin=True):
    """Write the journal of a trial as its driver and workers do, then complete it as Tune does."""
    drawn = {knob: v for knob, v in suggestion.items() if knob not in ("trial", "slot")}
    config = searcher.space.config(drawn)
    journal = record.Journal(searcher.experiment / "trials" / suggestion["trial"])
    if begin:
        journal.start(config, drawn, 3.0, int(suggestion["trial"][1:]))
    if status == "ok":
        for index in range(1, 5):
            journal.point(point(index, index * 1.0, frechet=value))
    if status is not None:
        journal.end(End(status, "why"))
    if trial_id is not None:
        searcher.on_trial_complete(trial_id, {})


def study(searcher):
    return searcher.study.trials


def test_first_points_come_first_and_every_configuration_once(make):
    searcher = make()
    drawn = []
    for i in range(6):
        suggestion = searcher.suggest(f"tune{i}")
        drawn.append((suggestion["loader.batch_size"], suggestion["loader.resident"]))
        assert suggestion["trial"] == f"t{i:04d}"
        end(searcher, suggestion, f"tune{i}", value=float(i))
    assert drawn[:2] == [(128, False), (64, False)]
    assert len(set(drawn)) == 6  # the whole space
    assert searcher.suggest("tune6") == "FINISHED"


def test_a_small_space_ends_the_search(make):
    searcher = make(budget={"per_trial": "3s", "trials": 50})
    for i in range(6):
        end(searcher, searcher.suggest(f"tune{i}"), f"tune{i}")
    assert searcher.suggest("tune6") == "FINISHED"


def test_a_raised_limit_goes_on_where_the_grid_was_cut(make):
    """The points of a grid come in their order, before and after `--trials` was raised, and none that is not in it."""
    grid = {
        "grid": {"loader.batch_size": [32, 64, 128], "optimizer.lr": [1e-3, 2e-3]},
        "search": None,
        "first": None,
        "noise": None,
    }
    content = {key: value for key, value in (FILE | grid).items() if value is not None}
    expected = [dict(point) for point in space.parse(content | {"budget": {"per_trial": "3s"}}, "x.yaml").candidates]
    seen = []
    for trials in (2, 5, 6):
        searcher = make(**grid, budget={"per_trial": "3s", "trials": trials})
        while (suggestion := searcher.suggest(f"tune{len(seen)}")) != "FINISHED":
            end(searcher, suggestion, f"tune{len(seen)}")
            seen.append({knob: value for knob, value in suggestion.items() if knob not in ("trial", "slot")})
        assert len(seen) == trials
    assert seen == expected


def test_slots_are_not_given_twice(make):
    searcher = make(slots=2)
    first, second = searcher.suggest("a"), searcher.suggest("b")
    assert {first["slot"], second["slot"]} == {0, 1}
    assert searcher.suggest("c") is None
    end(searcher, first, "a")
    assert searcher.suggest("c")["slot"] == first["slot"]


@pytest.mark.parametrize(
    ("status", "state"),
    [("oom", "COMPLETE"), ("nan", "COMPLETE"), ("timeout", "COMPLETE"), ("error", "COMPLETE"), ("pruned", "PRUNED")],
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
    searcher.on_trial_complete("a", {})
    assert record.read_trial(searcher.experiment / "trials" / "t0000").status == "pruned"


def test_a_trial_whose_driver_died_is_no_lesson(make):
    searcher = make()
    suggestion = searcher.suggest("a")
    end(searcher, suggestion, None, status=None)
    searcher.on_trial_complete("a", None, error=True)
    assert study(searcher)[0].state.name == "FAIL"


def test_resume_continues_what_ran_under_its_name_and_repeats_nothing(make):
    first = make()
    end(first, first.suggest("a"), "a")
    running = first.suggest("b")
    end(first, running, None, status=None)  # killed while it trained

    second = make()
    again = second.suggest("x")
    assert {k: v for k, v in again.items() if k != "slot"} == {k: v for k, v in running.items() if k != "slot"}
    end(second, again, "x", begin=False)
    assert second.suggest("y")["trial"] == "t0002"


def test_a_trial_killed_before_its_journal_began_keeps_its_name(make):
    first = make()
    end(first, first.suggest("a"), "a")
    named = first.suggest("b")  # the driver never wrote a line

    second = make(slots=2)
    again, new = second.suggest("x"), second.suggest("y")
    assert (again["trial"], new["trial"]) == ("t0001", "t0002")
    assert again["loader.batch_size"] == named["loader.batch_size"]
    assert (new["loader.batch_size"], new["loader.resident"]) != (again["loader.batch_size"], again["loader.resident"])


def test_a_finished_trial_that_optuna_did_not_hear_of_is_told(make):
    first = make()
    suggestion = first.suggest("a")
    end(first, suggestion, None, value=4.5)  # killed between the journal and the study
    second = make()
    assert [(t.state.name, t.value) for t in study(second)][:1] == [("COMPLETE", 4.5)]
    assert second.suggest("x")["trial"] == "t0001"


@pytest.mark.parametrize("damage", ["gone", "empty", "half written", "no database"])
def test_a_lost_study_is_made_anew_from_the_journals(make, tmp_path, damage, caplog):
    first = make()
    for i in range(3):
        end(first, first.suggest(f"a{i}"), f"a{i}", value=float(i))
    values = {t.user_attrs["trial"]: (t.params, t.value) for t in study(first) if "trial" in t.user_attrs}
    file, content = tmp_path / "study.db", (tmp_path / "study.db").read_bytes()
    file.unlink()  # a new inode: `first` still holds the old one
    if damage != "gone":
        file.write_bytes(
            {"empty": b"", "half written": content[: len(content) // 2], "no database": b"x" * 999}[damage]
        )
    second = make()
    assert ("is damaged" in caplog.text) == (damage in ("half written", "no database"))
    assert len(list(tmp_path.glob("study.db.damaged"))) == (damage in ("half written", "no database"))
    assert {t.user_attrs["trial"]: (t.params, t.value) for t in study(second) if "trial" in t.user_attrs} == values
    assert second.suggest("x")["trial"] == "t0003"


def test_a_study_of_an_older_run_is_brought_up_to_the_journals(make, tmp_path):
    """Its queue still holds what was run since; every result belongs to its own knobs."""
    first, file = make(), tmp_path / "study.db"
    older = file.read_bytes()
    ran = {}
    for i in range(3):
        suggestion = first.suggest(f"a{i}")
        end(first, suggestion, f"a{i}", value=float(i))
        ran[suggestion["trial"]] = (suggestion["loader.batch_size"], suggestion["loader.resident"], float(i))
    file.unlink()
    file.write_bytes(older)
    second = make()
    named = {t.user_attrs["trial"]: t for t in study(second) if "trial" in t.user_attrs}
    told = {n: (t.params["loader.batch_size"], t.params["loader.resident"], t.value) for n, t in named.items()}
    assert told == ran
    again = second.suggest("x")
    assert again["trial"] == "t0003"
    assert (again["loader.batch_size"], again["loader.resident"]) not in [one[:2] for one in ran.values()]


def test_no_trial_starts_that_would_not_end_in_time(make):
    budget = {"per_trial": "3s", "trials": 6, "total": "1m"}
    assert make(budget=budget, spent_s=56.0).suggest("a")["trial"] == "t0000"
    assert make(budget=budget, spent_s=58.0).suggest("b")["trial"] == "t0000"  # what was begun is finished
    fresh = make(budget=budget, spent_s=58.0)
    end(fresh, fresh.suggest("c"), "c")
    assert fresh.suggest("d") == "FINISHED"


def test_contradicting_knobs_are_drawn_again(make):
    searcher = make(search={"loader.batch_size": [96, 128], "parallel.workers": [1, 5]}, first=[])
    sizes = set()
    for name in ("a", "b"):
        suggestion = searcher.suggest(name)
        sizes.add((suggestion["loader.batch_size"], suggestion["parallel.workers"]))
        end(searcher, suggestion, name)
    assert sizes == {(96, 1), (128, 1)}  # 5 workers divide neither
    assert searcher.suggest("c") == "FINISHED"
    assert optuna.trial.TrialState.RUNNING not in {t.state for t in study(searcher)}


def test_the_curve_is_in_the_study(make):
    searcher = make()
    suggestion = searcher.suggest("a")
    for index, value in ((1, 9.0), (2, 7.0), (2, 7.0)):  # a restarted driver tells a point again
        searcher.on_trial_result("a", {"index": index, "objective": value})
    end(searcher, suggestion, "a")
    searcher.on_trial_result("a", {"index": 3, "objective": 1.0})  # of a trial that ended: of no use
    assert study(searcher)[0].intermediate_values == {1: 9.0, 2: 7.0}


def test_tune_may_keep_a_copy_of_the_searcher(make, tmp_path):
    """It pickles all it was given; a configuration's class is made at run time and cannot be."""
    searcher = make()
    assert pickle.dumps(searcher)
    searcher.save_to_dir(str(tmp_path), "now")
    assert not list(tmp_path.glob("searcher-state*"))


# ------------------------------------------------------------------------------------------------- the baseline again
def run(searcher, statuses="", first=0):
    """Run it to its end; the knobs of every trial. `statuses`: of the first ones, by their letters, e.g. `no`."""
    seen, known = [], {"o": "ok", "m": "oom", "n": "nan"}
    while (suggestion := searcher.suggest(f"tune{first + len(seen)}")) != "FINISHED":
        status = known[statuses[len(seen)]] if len(seen) < len(statuses) else "ok"
        end(searcher, suggestion, f"tune{first + len(seen)}", status=status, value=5.0 + len(seen))
        seen.append({knob: value for knob, value in suggestion.items() if knob not in ("trial", "slot")})
    return seen


def test_the_baseline_runs_again_on_another_seed(make):
    searcher = make(noise=2, fixed={"seed": 7}, budget={"per_trial": "3s", "trials": 50})
    baseline, again, listed, *others = run(searcher)
    assert again == {**baseline, "seed": 8}
    assert listed["loader.batch_size"] == 64
    assert len(others) == 4, "the whole space of 6 points besides"
    assert not any("seed" in point for point in [baseline, listed, *others])
    trials = record.read_trials(searcher.experiment)
    assert [trial.config["seed"] for trial in trials] == [7, 8, *[7] * 5]
    assert trials[1].drawn == again
    told = [(t.params, t.value) for t in study(searcher)[:2]]
    assert told == [(baseline, 5.0), (baseline, 6.0)], "Optuna learns both values of one point"


def test_a_resumed_search_knows_which_run_repeats_the_baseline(make, tmp_path):
    first = make(noise=2)
    end(first, first.suggest("a"), "a")
    running = first.suggest("b")
    end(first, running, None, status=None)  # killed while it trained
    assert running["seed"] == 1
    (tmp_path / "study.db").unlink()  # and the study with it
    second = make(noise=2)
    again = second.suggest("x")
    assert {**again, "slot": 0} == {**running, "slot": 0}
    end(second, again, "x", begin=False)
    assert make(noise=2).suggest("y") | {"slot": 0} == {
        "trial": "t0002", "slot": 0, "loader.batch_size": 64, "loader.resident": False,
    }  # fmt: skip


def test_a_raised_limit_brings_the_second_run_of_the_baseline(make):
    """Five trials are too few for it, eight are not; and no point runs twice because there are others before it now."""
    budget = {"per_trial": "3s", "trials": 3}
    before = run(make(noise=None, budget=budget))
    after = run(make(noise=None, budget=budget | {"trials": 8}), first=3)
    assert after[0] == {**before[0], "seed": 1}
    points = [tuple(point.values()) for point in before + after[1:]]
    assert len(set(points)) == len(points) == 6, "the whole space"
    lowered = make(noise=None, budget=budget | {"trials": 4})
    assert lowered.suggest("z") == "FINISHED"


def test_a_limit_that_is_raised_before_the_queue_was_empty_loses_nothing(make):
    two = {"first": [{"loader.batch_size": 64}, {"loader.batch_size": 32}], "noise": None}
    make(**two, budget={"per_trial": "3s", "trials": 5})  # killed before anything began
    points = run(make(**two, budget={"per_trial": "3s", "trials": 7}))
    assert {**points[0], "seed": 1} in points
    assert len(points) == 7, "the whole space of 6, and the baseline again"


def test_a_baseline_that_ran_out_of_memory_is_not_run_again(make):
    """Its place is for others; one that was not finite might be at another seed."""
    searcher = make(noise=2, search={"precision.amp": ["none", "bf16"]}, first=None)
    assert run(searcher, "m") == [{"precision.amp": "none"}, {"precision.amp": "bf16"}]
    assert [trial.name for trial in record.read_trials(searcher.experiment)] == ["t0000", "t0001"]


def test_a_baseline_that_was_not_finite_is_tried_on_another_seed(make):
    points = run(make(noise=2, search={"precision.amp": ["none", "bf16"]}, first=None), "n")
    assert [point.get("seed") for point in points] == [None, 1, None]


def test_the_repeated_run_of_an_earlier_search_is_no_point_of_this_one(make, tmp_path):
    """Its baseline is: at another budget the best points of the earlier search are tried first, each of them once."""
    from tunediff.tuning import experiment
    from tunediff.tuning.searcher import Searcher

    earlier = FILE | EARLIER | {"budget": {"per_trial": "3s", "trials": 4}, "noise": 2}
    earlier |= {"baseline": {"loader.batch_size": 32}, "first": [{"loader.batch_size": 64}]}
    wanted = space.parse(earlier, "x.yaml")
    experiment.create(tmp_path / "earlier", wanted, earlier)
    searcher = Searcher(wanted, tmp_path / "earlier", 1)
    for value in (3.0, 2.0, 4.0, 5.0):
        end(searcher, searcher.suggest("a"), "a", value=value)
    later = make(
        **EARLIER | {"first": None}, warm_start=str(tmp_path / "earlier"), budget={"per_trial": "9s", "trials": 4}
    )
    queued = [t.system_attrs["fixed_params"]["loader.batch_size"] for t in study(later) if "from" in t.user_attrs]
    assert queued[:2] == [32, 64]
    assert len(queued) == 3


# ---------------------------------------------------------------------------------------------- what failures teach
BIG = {
    "search": {"loader.batch_size": [64, 1024], "precision.amp": ["none", "bf16"], "optimizer.lr": [1e-4, 1e-3]},
    "first": [{"loader.batch_size": 1024}],
    "fixed": {"loader.resident": True},
    "baseline": {"loader.batch_size": 64},
}  # fmt: skip


def test_what_needs_more_memory_than_what_ran_out_is_not_run(make):
    """1,024 images in float32 ran out: so do they at any other learning rate, but perhaps not in bfloat16."""
    searcher = make(**BIG, budget={"per_trial": "3s", "trials": 50})
    run = []
    for i in range(50):
        if (suggestion := searcher.suggest(f"tune{i}")) == "FINISHED":
            break
        size, amp = suggestion["loader.batch_size"], suggestion["precision.amp"]
        run.append((size, amp, suggestion["optimizer.lr"]))
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
    trials = record.read_trials(searcher.experiment)
    assert [t.status for t in trials] == ["ok", "oom", "oom", "oom"]
    assert trials[3].reason.startswith("not run: 1024 images at once in none precision need at least as much memory")
    assert [t.user_attrs["status"] for t in study(searcher)] == ["ok", "oom", "oom", "oom"]
    again = make(**grid, budget={"per_trial": "3s"})  # resumed: nothing is asked again
    assert again.suggest("d") == "FINISHED"


def test_a_stopped_trial_says_when_and_from_when_on(make):
    searcher = make(early_stopping="asha")
    suggestion = searcher.suggest("a")
    end(searcher, suggestion, None, status=None)
    record.Journal(searcher.experiment / "trials" / "t0000").point(point(2, 1.5, frechet=9.0))
    searcher.on_trial_complete("a", {})
    stopped = record.read_trial(searcher.experiment / "trials" / "t0000")
    assert stopped.status == "pruned"
    assert stopped.reason.startswith("stopped by asha after 1.5 s; no trial is stopped before 1.5 s")


# ---------------------------------------------------------------------------------------------------- an earlier search
EARLIER = {
    "search": {"loader.batch_size": [32, 64, 128], "optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}},
    "first": [{"loader.batch_size": 64}, {"loader.batch_size": 32}, {"optimizer.lr": 5e-3}],
}


@pytest.fixture
def earlier(tmp_path):
    """A finished search: baseline 5, batch 64 best with 3, batch 32 not finite, another learning rate 4."""
    from tunediff.tuning import experiment
    from tunediff.tuning.searcher import Searcher

    folder, content = tmp_path / "earlier", FILE | EARLIER | {"budget": {"per_trial": "3s", "trials": 4}}
    wanted = space.parse(content, "x.yaml")
    experiment.create(folder, wanted, content)
    searcher = Searcher(wanted, folder, 1)
    for status, value in (("ok", 5.0), ("ok", 3.0), ("nan", None), ("ok", 4.0)):
        suggestion = searcher.suggest("a")
        end(searcher, suggestion, "a", status=status, value=value)
    return folder


def test_a_search_starts_from_what_an_earlier_one_measured(make, earlier):
    searcher = make(**EARLIER, warm_start=str(earlier), budget={"per_trial": "3s", "trials": 6})
    known = [t for t in study(searcher) if t.state.is_finished()]
    assert [(t.user_attrs["from"], t.value) for t in known] == [
        ("earlier/t0001", 3.0), ("earlier/t0003", 4.0), ("earlier/t0002", 8.0),
    ]  # fmt: skip
    first = searcher.suggest("a")
    assert first["loader.batch_size"] == 128  # the baseline is measured anew
    end(searcher, first, "a")
    second = searcher.suggest("b")
    assert second["trial"] == "t0001"
    assert (second["loader.batch_size"], second["optimizer.lr"]) not in [(64, 1e-3), (32, 1e-3), (128, 5e-3)]
    assert len(study(make(**EARLIER, warm_start=str(earlier)))) == len(study(searcher))  # resumed: not added twice


def test_with_another_budget_the_best_are_tried_first(make, earlier):
    content = EARLIER | {"first": None}
    searcher = make(**content, warm_start=str(earlier), budget={"per_trial": "9s", "trials": 6})
    assert not any(t.state.is_finished() for t in study(searcher))
    drawn = [searcher.suggest("a")]
    end(searcher, drawn[0], "a")
    for name in ("b", "c"):
        drawn.append(searcher.suggest(name))
        end(searcher, drawn[-1], name)
    assert [(d["loader.batch_size"], d["optimizer.lr"]) for d in drawn] == [(128, 1e-3), (64, 1e-3), (128, 5e-3)]


def test_a_search_of_an_earlier_version_is_refused_with_the_reason(make, earlier):
    """Its knobs meant something else: not misread, whoever opens it."""
    from tunediff.tuning import experiment

    baseline = earlier / "baseline.yaml"
    baseline.write_text("".join(line for line in baseline.open() if not line.startswith("workload:")))
    for read in (experiment.reopen, lambda folder: make(**EARLIER, warm_start=str(folder))):
        with pytest.raises(ConfigError, match="earlier: was made by an earlier version and cannot be read"):
            read(earlier)


def test_what_lies_outside_the_space_is_left_out(make, earlier):
    searcher = make(
        search={"loader.batch_size": [128, 256], "optimizer.lr": {"low": 1e-4, "high": 1e-2}}, first=None,
        warm_start=str(earlier),
    )  # fmt: skip
    assert [t.user_attrs["from"] for t in study(searcher) if t.state.is_finished()] == ["earlier/t0003"]


def test_a_study_that_cannot_be_written_ends_the_search_and_loses_nothing(make, monkeypatch):
    """A full disk, when a trial ends: no further one is started; the resumed search knows what the journal says."""
    searcher = make()
    suggestion = searcher.suggest("a")

    def full(*_, **__):
        raise optuna.exceptions.StorageInternalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(searcher.study, "tell", full)
        end(searcher, suggestion, "a", value=4.5)
        searcher.on_trial_complete("a", {}, error=True)  # Tune tells it again
    assert "disk is full" in str(searcher.broken)
    assert searcher.suggest("b") == "FINISHED"
    again = make()
    assert [t.value for t in study(again) if t.state.is_finished()] == [4.5]
    assert again.suggest("b")["trial"] == "t0001"


def test_a_trial_that_a_full_disk_ended_is_neither_good_nor_bad(make, monkeypatch):
    """Its end cannot be told from the disk's: it has none, and the resumed search takes it up."""
    searcher = make()
    suggestion = searcher.suggest("a")
    end(searcher, suggestion, None, status=None)
    with monkeypatch.context() as patch:
        patch.setattr(environment, "unwritable", lambda folder: "No space left on device")
        searcher.on_trial_complete("a", None, error=True)
    assert "No space left" in str(searcher.broken)
    assert not record.read_trial(searcher.experiment / "trials" / suggestion["trial"]).finished
    again = make().suggest("b")
    assert {key: again[key] for key in suggestion} == suggestion


@pytest.mark.parametrize(
    ("results", "mode", "told"),
    [([5.0, 12.0], "min", 24.0), ([-9.0, -3.0], "min", 0.0), ([0.0], "min", 1.0), ([0.4, 0.9], "max", 0.0),
     ([-7.0, -2.0], "max", -14.0), ([0.0, 0.3], "max", -1.0), ([], "min", 2e9), ([], "max", -2e9)],
)  # fmt: skip
def test_a_failure_is_worse_than_every_result(results, mode, told):
    from tunediff.tuning.searcher import penalty

    assert penalty(results, mode) == told
    assert all(told > one if mode == "min" else told < one for one in results)


def test_failures_of_a_search_for_the_highest_are_told_as_low(make, monkeypatch):
    monkeypatch.setitem(workload.SHIPPED, "ranker", "tests.ranker")
    searcher = make(workload="ranker")
    for name, value in (("a", -5.0), ("b", -2.0)):
        suggestion = searcher.suggest(name)
        config = searcher.space.config({k: v for k, v in suggestion.items() if k not in ("trial", "slot")})
        journal = record.Journal(searcher.experiment / "trials" / suggestion["trial"])
        journal.start(config, {}, 3.0, int(suggestion["trial"][1:]))
        journal.point(point(1, 3.0, accuracy=value))
        journal.end(End("ok"))
        searcher.on_trial_complete(name, {})
    for name in ("c", "d"):
        end(searcher, searcher.suggest(name), name, status="nan")
    assert [t.value for t in study(searcher) if t.state.name == "COMPLETE"] == [-5.0, -2.0, -10.0, -10.0]


# ---------------------------------------------------------------------------------------------------------- two objectives
def measured(searcher, suggestion, frechet, memory, trial_id="a"):
    """A trial that ended ok with both objectives."""
    folder = searcher.experiment / "trials" / suggestion["trial"]
    end(searcher, suggestion, None, status=None)
    record.Journal(folder).point(point(1, 3.0, worker_s=3.0, frechet=frechet, peak_memory_mib=memory))
    record.Journal(folder).end(End("ok"))
    searcher.on_trial_complete(trial_id, {})


def test_two_objectives_end_with_their_trade_offs(make):
    """Optuna is told both; a failure is bad in both; what another trial beats in both is not on the front."""
    from tunediff import results

    two = {"objective": ["frechet", "peak_memory_mib"], "first": None, "budget": {"per_trial": "3s", "trials": 9}}
    searcher = make(**(EARLIER | two))
    values = [(5.0, 300.0), (4.0, 400.0), (6.0, 310.0), (3.0, 900.0), (5.5, 250.0), (4.0, 390.0)]
    for frechet, memory in values:
        suggestion = searcher.suggest("a")
        searcher.on_trial_result("a", {"objective": frechet, "index": 1})  # Optuna keeps no curves of two objectives
        measured(searcher, suggestion, frechet, memory)
    failed = searcher.suggest("a")
    end(searcher, failed, "a", status="nan")
    told = {t.user_attrs["trial"]: t.values for t in study(searcher) if "trial" in t.user_attrs}
    assert [told[f"t{i:04d}"] for i in range(6)] == [list(pair) for pair in values]
    assert told[failed["trial"]] == [12.0, 1800.0]

    found = results.Results(searcher.experiment, searcher.space, record.read_trials(searcher.experiment))
    assert [trial.name for trial in found.pareto] == ["t0003", "t0005", "t0000", "t0004"]
    rows = found.pareto_table()
    assert list(rows["peak_memory_mib"]) == [900.0, 390.0, 300.0, 250.0]
    assert list(rows["frechet"]) == sorted(rows["frechet"])
    assert rows["configuration"][2] == "baseline"
    again = make(**(EARLIER | two))
    assert again.suggest("b")["trial"] == "t0007"  # resumed: the study of two objectives opens again
