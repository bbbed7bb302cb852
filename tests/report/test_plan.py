"""What a search will cost, computed by hand; a limit, a disk and other load."""

import itertools
import re
import time

import pytest

from tests import searches
from tunediff.core import progress
from tunediff.core.journal import Journal
from tunediff.core.progress import EventLines
from tunediff.experiment.model import seconds_of
from tunediff.report import console, live_table, plan


@pytest.fixture(autouse=True)
def machine(this_machine):
    this_machine(2)


def planned(folder, measured=None, **content):
    return plan.values(searches.make(folder, searches.FILE | content), folder.parent, measured or {})


def test_an_unknown_evaluation_is_null_and_named(tmp_path):
    """0.0 would say that it costs nothing."""
    values = planned(tmp_path / "night")
    assert (values["seconds"]["evaluation"], values["wall_clock_lacks"]) == (None, ["evaluation"])
    assert "evaluation: unknown" in (said := plan.lines(values))
    assert any(line.startswith("wall-clock: about ") and line.endswith(" and evaluation") for line in said)
    timed = planned(tmp_path / "other", {"evaluation_s": 22.56})
    assert (timed["seconds"]["evaluation"] > 0, timed["wall_clock_lacks"]) == (True, [])


@pytest.mark.parametrize(("trials", "total", "confirming_s"), [(2, "2m30s", 91), (100, "10m", 9 * 22)])
def test_no_forecast_exceeds_the_limit_of_the_search(tmp_path, trials, total, confirming_s):
    """Of 2 trials, which leave 91 s of 132 to confirm, and of 100, which leave confirming what it is kept."""
    budget = {"per_trial": "20s", "trials": trials, "total": total}
    space = searches.make(tmp_path / "night", searches.FILE | {"confirm": {"of": 2, "seeds": 3}, "budget": budget})
    values = plan.values(space, tmp_path, {"evaluation_s": 0.0})
    seconds = values["seconds"]
    assert sum(spent for part, spent in seconds.items() if part != "wall_clock") == seconds["wall_clock"]
    assert seconds["wall_clock"] == pytest.approx(values["total_limit_s"])
    assert seconds["confirmation"] == confirming_s <= values["confirming_s"]
    left = console.Console(tmp_path / "night", space, planned=values).remaining_words()
    forecasts = re.findall(r"about ((?:\d+[hms])+)", left)
    assert sum(seconds_of(one) for one in forecasts) <= values["total_limit_s"]


def test_a_limit_below_one_trial_costs_one_trial_per_slot(tmp_path):
    """What starts at once runs to its end."""
    budget = {"per_trial": "300s", "total": "320s", "trials": 8, "price_per_device_hour": 3.0}
    values = planned(tmp_path / "night", {"evaluation_s": 200.0, "parameters": 1000}, budget=budget)
    assert (values["device_hours"], values["price"]) == (pytest.approx(300 / 3600), pytest.approx(0.25))
    assert values["disk_mib"] == pytest.approx(4 * 1000 * (1 + 8) / 2**20)


@pytest.mark.parametrize(("unit", "hours"), [("wall", 8), ("device", 4)])
def test_devices_share_a_budget_in_device_seconds_and_no_other(tmp_path, unit, hours):
    """Four trials of an hour on one or two devices."""
    budget = {"per_trial": "1h", "trials": 4, "unit": unit, "price_per_device_hour": 2.5}
    values = planned(tmp_path / "night", search={"parallel.workers": [1, 2]}, budget=budget)
    assert (values["device_hours"], values["price"]) == (hours, 2.5 * hours)


def test_the_disk_holds_all_weights_and_the_checkpoints_under_way(tmp_path):
    """Of float32: 4 bytes a parameter for each run; 16 for a checkpoint (weights, averages, two moments), of which
    there are two while one is written."""
    values = planned(tmp_path / "night", {"evaluation_s": 22.56, "parameters": 2**20}, confirm={"of": 1, "seeds": 4})
    assert (values["at_once"], values["trials"]) == (1, 8)
    assert values["disk_mib"] == 4 * (8 + 2 * 4) + 2 * 16
    adapter = {"parameters": 2**30, "saved_parameters": 2**20}
    assert planned(tmp_path / "other", adapter, budget={"per_trial": "20s", "trials": 8})["disk_mib"] == 4 * (8 + 8)


def test_a_search_of_more_than_a_month_is_refused(tmp_path):
    """By its training or by its evaluations."""
    for name, measured, budget in (("slow", {"evaluation_s": 1e5}, "20s"), ("long", {}, "900h")):
        found = planned(tmp_path / name, measured, budget={"per_trial": budget, "trials": 8})
        assert "days of wall-clock" in found["refused"]


# -------- what a search shows while it runs, beyond the golden files: time, faults, hardware, silence, narrow terminals
@pytest.fixture
def night(tmp_path):
    """A baseline, a better trial, one that failed and one that runs."""
    space = searches.make(tmp_path / "night")
    searches.write(tmp_path / "night", space, 0, curve=((10.0, 400, 20.0), (20.0, 800, 10.0)))
    searches.write(
        tmp_path / "night", space, 1, {"loader.batch_size": 64}, ((10.0, 400, 10.0), (20.0, 800, 5.0)), status="ok"
    )
    searches.write(tmp_path / "night", space, 2, {"loader.batch_size": 32}, (), status="oom", reason="no [memory] left")
    searches.write(tmp_path / "night", space, 3, {"precision.amp": "bf16"}, ((10.0, 400, 15.0),), status=None)
    return tmp_path / "night", space


# -------------------------------------------------------------------------------------------------------------- events


def test_a_skipped_trial_is_announced_once(night, capsys):
    folder, space = night
    lines = console.Console(folder, space)
    searches.write(folder, space, 4, {"precision.amp": "bf16"}, (), status="skipped", reason="as t0002")
    for _ in range(2):
        lines.listen("end", "t0003", {})
    assert capsys.readouterr().out.count("t0004 skipped") == 1


def test_names_of_confirming_runs_have_their_folder(tmp_path, capsys):
    searches.night(tmp_path / "night")
    content = {"workload": "digits", "budget": {"per_trial": "8s"}, "trials": [{"loader.batch_size": 64}], "seeds": 3}
    space = searches.make(folder := tmp_path / "night" / "confirm", content)
    for number, point in enumerate(space.candidates[:3]):
        searches.write(folder, space, number, drawn=point)
    lines = console.Console(folder, space, EventLines(begun=time.monotonic() - 440))
    lines.listen("end", "t0001", {})
    end = capsys.readouterr().out
    assert end.startswith("[confirm  7m20s] confirm/t0001 ok")
    assert "best" not in end, "no single run is the best"


# ------------------------------------------------------------------------------------------------------ remaining time
def test_the_remaining_time_counts_trials_of_this_session_and_counts_down(night, clock):
    """Three trials had ended before; one took a minute of this session, and four are left."""
    folder, space = night
    lines = console.Console(folder, space, EventLines(quiet=False))
    Journal(folder / "trials" / "t0003").write("end", status="ok")
    clock.s = 60.0
    lines.listen("end", "t0003", {})
    for clock.s, left in ((60.0, "4m00s"), (75.0, "3m45s"), (90.0, "3m30s"), (600.0, "0s")):
        assert lines.remaining_words() == f"about {left} left"


def test_the_remaining_time_of_a_limit_counts_earlier_sessions(tmp_path, clock):
    budget = {"budget": {"per_trial": "20s", "trials": 8, "total": "5m"}}
    space = searches.make(folder := tmp_path / "night", searches.FILE | budget)
    (folder / "sessions.jsonl").write_text(
        '{"event": "begin", "time": 0, "monotonic_s": 10}\n{"event": "end", "time": 9, "monotonic_s": 280}'
    )
    lines = console.Console(folder, space)
    clock.s = 20.0
    searches.write(folder, space, 0)
    lines.listen("end", "t0000", {})
    assert lines.remaining_words() == "about 10s left"


# -------------------------------------------------------------------------------------------------------------- faults
def test_a_table_that_cannot_be_drawn_ends_no_search(night, monkeypatch, capsys):
    monkeypatch.setattr(live_table, "curve", lambda *_: 1 / 0)
    with live_table.LiveTable(*night) as table:
        table.say("a line")
    printed = capsys.readouterr().out
    assert "a line" in printed
    assert "the table cannot be drawn: ZeroDivisionError" in printed


def test_progress_that_nobody_can_read_ends_no_work():
    heard = []

    def closed(work):
        heard.append(work.done)
        raise BrokenPipeError

    with progress.subscribe(closed), progress.Progress("reading", 3) as work:
        work.step()
    assert (work.done, heard) == (1, [0])


# ------------------------------------------------------------------------------------------------------------- silence
def test_silence_is_broken_by_what_goes_on(tmp_path, monkeypatch):
    space = searches.make(folder := tmp_path / "night")
    monkeypatch.setattr(console, "SILENCE_S", 0.05)
    printed = []
    beating = console.Heartbeat(folder, printed.append)

    def next_line():
        printed.clear()
        beating.beat()
        until = time.monotonic() + 1200
        while not printed and time.monotonic() < until:
            time.sleep(0.01)
        return printed[0]

    with beating:
        place = searches.write(folder, space, 0, status=None)
        assert next_line().startswith("starting the workers for ")
        (place / progress.DOING).write_text('{"part": "a new one", "since": 0, "work": ""}')
        beating.beat()
        time.sleep(0.3)  # a part that it does not know does not end it


def test_heartbeat_says_which_part_of_a_trial_runs(tmp_path):
    space = searches.make(folder := tmp_path / "night")
    place = searches.write(folder, space, 0, status=None)
    beating = console.Heartbeat(folder, print, limit_s=960)
    assert beating.doing().startswith("starting the workers for "), "of the session before nothing is said"
    Journal(place).write("worker", device="cpu", threads=1)  # it goes on
    doing = progress.ProgressFile(place)
    doing.part("evaluation")
    with progress.subscribe(doing), progress.Progress("sampling 64 images", 640, "steps") as work:
        work.more(120)
        doing._due = 0.0
        work.step()
        line = r"t0000 evaluating for \d.*s: sampling 64 images: 121 of 640 steps, about \d.*s left"
        assert re.fullmatch(line, beating.doing())
    doing.part("train")
    assert re.fullmatch(r"t0000 training for \d+s \(at most 16m00s\)", beating.doing())


def test_a_search_says_once_where_the_seconds_to_its_first_step_went(night, capsys, monkeypatch):
    folder, space = night
    seconds = itertools.count(1000.0, 10.0)  # each look at the clock is ten seconds later
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    lines = console.Console(folder, space, EventLines(begun=990.0), planned={"lines": []})
    monkeypatch.setattr(console.plan, "start_lines", lambda planned: [])
    lines.greet(None)
    for event in ("start", "point", "point"):
        lines.listen(
            event, "t0003", {"train_s": 1.0, "samples_per_s": 1.0, "before_first_batch_s": 1.0, "first_step_s": 2.0}
        )
    said = [line for line in capsys.readouterr().out.splitlines() if "first step after" in line]
    assert len(said) == 1
    assert re.search(r"data, evaluation and Ray \d+s, .*set-up 1s, the step 2s", said[0])
