"""What a search shows while it runs."""

import io
import json
import re
import shutil
import time

import pytest
from rich.console import Console as Terminal

from tests import helpers, searches
from tests.searches import noisy
from tunediff import config as cfg
from tunediff import search_space
from tunediff.analysis import Results, following
from tunediff.core import progress, text
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.progress import EventLines
from tunediff.core.trial_record import End
from tunediff.report import console, heartbeat, live_table, plan, words
from tunediff.tuning import experiment

CONTENT = {
    "workload": "digits",
    "budget": {"per_trial": "8s", "trials": 8},
    "search": {"loader.batch_size": [32, 64, 128], "precision.amp": ["none", "bf16"]},
}


def write(folder, loaded, number, drawn, values, status=None, reason=""):
    config = loaded.config(drawn)
    journal = Journal(folder / "trials" / f"t{number:04d}")
    journal.write(
        "start", name=f"t{number:04d}", number=number, config=cfg.flat(config), drawn=drawn,
        fingerprint=cfg.fingerprint(config), budget_s=8.0,
    )  # fmt: skip
    for index, value in enumerate(values, 1):
        journal.write(
            "point", index=index, train_s=2.0 * index, frechet=value, samples=100 * index, steps=10 * index,
            samples_per_s=50.0, label="FD (classifier)", peak_memory_mib=321.0,
        )  # fmt: skip
    if status is not None:
        journal.write("end", status=status, reason=reason)


@pytest.fixture
def night(tmp_path):
    loaded = search_space.parse(CONTENT, "x.yaml")
    experiment.create(tmp_path / "night", loaded, CONTENT)
    write(tmp_path / "night", loaded, 0, {"loader.batch_size": 128, "precision.amp": "none"}, [40, 20, 12, 10.0], "ok")
    write(tmp_path / "night", loaded, 1, {"loader.batch_size": 64, "precision.amp": "none"}, [30, 10, 6, 5.0], "ok")
    write(
        tmp_path / "night", loaded, 2, {"loader.batch_size": 32, "precision.amp": "none"}, [], "oom", "no [memory] left"
    )
    write(tmp_path / "night", loaded, 3, {"loader.batch_size": 32, "precision.amp": "bf16"}, [25.0, 15.0])
    return tmp_path / "night", loaded


def shown(folder, loaded, height=30, events=(), width=140):
    """What a terminal shows in the end, line by line."""
    table = live_table.LiveTable(folder, loaded)
    table._terminal = Terminal(file=io.StringIO(), width=width, height=height, force_terminal=False)
    for event in events:
        table.listen(*event)
    table._terminal.print(table._render())
    return [line.rstrip() for line in table._terminal.file.getvalue().splitlines()]


def test_the_table_ranks_trials_and_says_what_runs(night):
    lines = [line for line in shown(*night) if line]
    assert lines[0].startswith("night · 3/8 trials · ")
    assert lines[0].endswith("best t0001 5"), "how many times as fast is not said before the noise is known"
    rows = [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == ["t0003", "1", "2", "t0002"]  # running, ranked, failed
    assert rows[0][1:] == [
        "loader.batch_size=32",
        "precision.amp=bf16",
        "█▁",
        "15",
        "0.75",
        "50",
        "321",
        "2/4",
        "points",
    ]
    assert rows[1][1:] == ["t0001", "loader.batch_size=64", "█▄▂▁", "5", "0.50", "50", "321", "ok"]
    assert rows[2][2] == "baseline"
    assert rows[3][-1] == "oom"


def test_what_lies_within_the_noise_of_the_best_is_marked(tmp_path):
    folder = noisy(tmp_path / "night")
    lines = [line for line in shown(folder, search_space.load(folder / "search.yaml"), width=200) if line]
    assert lines[0].endswith(
        "best t0003 1 · 2× as fast as the baseline · ≈ within the noise of the best: 8.01 % of one run "
        "(sd, from 2 runs of the baseline: a rough estimate)"
    )
    rows = [line.split() for line in lines[2:]]
    assert [row[:2] for row in rows[:5]] == [
        ["1", "t0003"],
        ["≈2", "t0002"],
        ["≈3", "t0004"],
        ["4", "t0005"],
        ["5", "t0000"],
    ]
    assert rows[5][:2] == ["t0001", "seed=1"], "a run that repeats another has no rank, and stands below it"
    assert rows[5][-5:] == ["2.24", "1.12", "200", "501", "ok"]
    assert rows[6][:2] == ["6", "t0006"]


def test_a_best_within_the_noise_of_the_baseline_is_no_victory(tmp_path):
    folder = noisy(tmp_path / "night", repeats=(3.0,))
    head = "".join(shown(folder, search_space.load(folder / "search.yaml"), width=300)[:2])
    assert "best t0003 1 · no significant difference from the baseline by one run each · ≈ within" in head


@pytest.mark.parametrize("status", ["oom", "pruned"])
def test_beside_a_baseline_that_failed_nothing_is_faster(tmp_path, status, capsys):
    folder = noisy(tmp_path / "night", (), status=status, curve=((5.0, 1000, 8.0),))
    loaded = search_space.load(folder / "search.yaml")
    head, _, *rows = (line for line in shown(folder, loaded) if line)
    assert head.endswith(f"best t0002 1 · no speed-up: the baseline t0000 ended as {status}")
    assert not any("×" in row for row in [head, *rows])
    assert rows[0].split()[-5:] == ["█▅▁", "1", "200", "502", "ok"], "no ratio to what has failed"
    lines = console.Console(folder, loaded)
    lines.listen("point", "t0002", {"index": 1, "train_s": 5.0, "frechet": 4.0, "samples_per_s": 50.0})
    lines.listen("end", "t0002", {})
    assert "baseline" not in capsys.readouterr().out


def test_failures_are_told_above_it_and_names_are_no_markup(night):
    lines = shown(*night, events=[("end", "t0002", {}), ("end", "t0001", {})])
    assert "t0002 oom  no [memory] left  loader.batch_size=32" in lines[0]
    assert not any("t0001 ok" in line for line in lines[:2])


def test_the_end_of_a_trial_shows_its_mean_rate(night, capsys):
    console.Console(*night).listen("end", "t0001", {})  # 400 samples in 8 seconds
    assert "FD (classifier) 5  0.50× baseline  50 images/s on average  loader.batch_size=64" in capsys.readouterr().out


def test_a_restart_is_told_with_its_reason(night, capsys):
    folder, loaded = night
    journal = Journal(folder / "trials" / "t0001")
    journal.write("restarted", reason="checkpoint.pt cannot be read (EOFError)")
    journal.point(helpers.point(4, 8.0, frechet=5.0))
    journal.end(End("ok"))
    lines = console.Console(folder, loaded)
    lines.listen("end", "t0001", {})
    assert "started from the beginning: checkpoint.pt cannot be read (EOFError)" in capsys.readouterr().out
    assert any("t0001 ok  started from the beginning" in line for line in shown(*night, events=[("end", "t0001", {})]))
    reasons = Results(folder, loaded, record.read_trials(folder)).table().set_index("trial")["reason"]
    assert reasons["t0001"] == "started from the beginning: checkpoint.pt cannot be read (EOFError)"


def test_where_a_trial_goes_that_has_no_end(night, capsys):
    """Its node was taken away, or will be: neither is a failure."""
    folder, loaded = night
    lines = console.Console(folder, loaded)
    for how in ({}, {"draining": True}):
        Journal(folder / "trials" / "t0003").write("lost", nodes=["a"], reason="died", **how)
        lines.listen("end", "t0003", {})
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert "t0003 has lost its node and will go on from its checkpoint" in first
    assert "t0003 leaves its node, which is draining, and will go on from its checkpoint" in second


def test_search_events_are_json_lines_on_stderr(night, capsys):
    folder, loaded = night
    lines = console.Console(folder, loaded, lines=EventLines(on_stderr=True, as_json=True))
    lines.listen("start", "t0001", {"loader.batch_size": 64, "trial": 1})
    lines.listen("point", "t0001", {"index": 1, "train_s": 2.0, "frechet": 4.0, "samples_per_s": 50.0})
    lines.listen("end", "t0001", {})
    out, error = capsys.readouterr()
    assert out == ""
    start, point, end = map(json.loads, error.splitlines())
    assert all({"event", "elapsed_s", "phase", "text"} <= one.keys() for one in (start, point, end))
    assert (start["event"], start["trial"], start["changes"]) == ("start", "t0001", {"loader.batch_size": 64})
    assert (point["event"], point["index"], point["seconds"], point["value"]) == ("point", 1, 2.0, 4.0)
    assert (end["event"], end["trial"], end["status"], end["reason"]) == ("end", "t0001", "ok", "")
    assert isinstance(end["value"], float)
    assert end["text"].startswith("t0001 ok")


@pytest.mark.parametrize(("as_json", "start"), [(False, "["), (True, '{"event": "message"')])
def test_trials_on_different_hardware_are_warned_of_once(night, capsys, as_json, start):
    """GPUs that Ray calls alike may differ in memory, form and power limit."""
    folder, loaded = night
    lines = console.Console(folder, loaded, lines=EventLines(as_json=as_json))
    for number, model in ((3, "A100-SXM4-40GB"), (4, "A100-SXM4-80GB"), (5, "A100-SXM4-80GB")):
        write(folder, loaded, number, {"loader.batch_size": 32, "precision.amp": "bf16"}, [25.0])
        worker = {"device": model, "threads": 1, "environment": {"gpus": [f"{model}, 400.00 W"]}}
        Journal(folder / "trials" / f"t{number:04d}").write("worker", **worker)
        for _ in range(2):
            point = {"index": 1, "train_s": 2.0, "frechet": 4.0, "samples_per_s": 50.0}
            lines.listen("point", f"t{number:04d}", point)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(start)
    ran = "t0003 ran on A100-SXM4-40GB (400 W), t0004 runs on A100-SXM4-80GB (400 W)"
    assert f"WARNING: {ran}: what they measure cannot be compared" in warnings[0]


def test_confirming_runs_on_other_hardware_than_the_search_are_warned_of(night, capsys):
    folder, loaded = night

    def on(place, model):
        worker = {"device": model, "threads": 1, "environment": {"gpus": [f"{model}, 400.00 W"]}}
        Journal(place / "trials" / "t0003").write("worker", **worker)

    on(folder, "A100")
    (folder / "confirm").mkdir()
    shutil.copy(folder / "search.yaml", folder / "confirm")
    lines = console.Console(folder / "confirm", loaded)
    write(folder / "confirm", loaded, 3, {"loader.batch_size": 32, "precision.amp": "bf16"}, [25.0])
    on(folder / "confirm", "H100")
    lines.listen("point", "t0003", {"index": 1, "train_s": 2.0, "frechet": 4.0, "samples_per_s": 50.0})
    assert "WARNING: t0003 ran on A100 (400 W), confirm/t0003 runs on H100 (400 W)" in capsys.readouterr().out


def test_search_events_are_text_on_stderr_beside_json(night, capsys):
    folder, loaded = night
    console.Console(folder, loaded, lines=EventLines(on_stderr=True)).listen("end", "t0001", {})
    out, error = capsys.readouterr()
    assert out == ""
    assert re.match(r"\[ +\d+s\] t0001 ok  ", error)


def test_what_is_left_is_told_from_this_session_alone(night, monkeypatch, capsys):
    """Three trials had ended before; one took this session a minute, and four are left."""
    folder, loaded = night
    moments = iter([0.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(moments, 60.0))
    lines = console.Console(folder, loaded)
    Journal(folder / "trials" / "t0003").write("end", status="ok")
    lines.listen("end", "t0003", {})
    assert "4/8, about 4m00s left" in capsys.readouterr().out


def test_what_is_left_counts_down_between_two_trials(night, monkeypatch):
    """A trial took a minute and four are left; half a minute later no other has ended."""
    folder, loaded = night
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    lines = console.Console(folder, loaded, EventLines(quiet=True))
    Journal(folder / "trials" / "t0003").write("end", status="ok")
    lines._read()
    now[0] = 60.0
    assert lines._left() == "about 4m00s left"
    for now[0], left in ((75.0, "3m45s"), (90.0, "3m30s"), (600.0, "0s")):
        assert lines._left() == f"about {left} left"


def test_a_plan_of_probes_names_a_rate_as_its_objective(tmp_path):
    probes = searches.make(tmp_path / "fast", searches.FILE | {"objective": "samples_per_s"})
    told = plan.values(probes, tmp_path, {})
    assert told["objective"] == "images/s of the training; no model is evaluated"


def test_an_unknown_evaluation_is_null_and_named(tmp_path):
    """0.0 would say that it costs nothing."""
    wanted = searches.make(tmp_path / "night")
    told = plan.values(wanted, tmp_path, {})
    assert (told["seconds"]["evaluation"], told["wall_clock_lacks"]) == (None, ["evaluation"])
    assert any(line.startswith("evaluation: unknown") for line in plan.cost_lines(told))
    timed = plan.values(wanted, tmp_path, {"evaluation_s": 22.56})
    assert timed["seconds"]["evaluation"] > 0
    assert timed["wall_clock_lacks"] == []


def test_a_start_says_what_all_will_take_and_what_became_of_the_files(tmp_path, capsys):
    wanted = searches.make(tmp_path / "night")
    told = plan.values(wanted, tmp_path, {"evaluation_s": 22.56, "data": ["skipped 1 of 65 files: 1 empty: a.png"]})
    console.Console(tmp_path / "night", wanted, planned=told).greet(None)
    said = capsys.readouterr().out
    for line in (
        "skipped 1 of 65 files: 1 empty: a.png", "training: 2m40s", "evaluation: 12m02s (4 × 23s per trial, as timed on",
        "evaluation takes 4.5 times as long as training", "wall-clock: about 15m",
    ):  # fmt: skip
        assert said.count(f"] {line}") == 1, line


def test_plan_and_start_name_first_points_without_a_trial(tmp_path, capsys):
    points = {"first": [{"loader.batch_size": 64}, {"precision.amp": "bf16"}]}
    wanted = searches.make(tmp_path / "night", searches.FILE | {"budget": {"per_trial": "20s", "trials": 2}} | points)
    told = plan.values(wanted, tmp_path, {})
    console.Console(tmp_path / "night", wanted, planned=told).greet(None)
    line = "first: only 1 of 2 points run: 2 trials, 1 of them the baseline"
    assert sum(line in entry for entry in plan.lines(told)) == capsys.readouterr().out.count(line) == 1


def test_a_start_says_when_the_first_trial_ends_where_the_limit_is_shorter(tmp_path):
    """15 s of start-up, 3 s of training and 2 s for a run are more than 10 s; evaluations come on top."""

    def wall_clock(total, measured):
        budget = {"per_trial": "3s", "trials": 8, "total": total}
        wanted = searches.make(tmp_path / f"night-{total}-{len(measured)}", searches.FILE | {"budget": budget})
        return next(line for line in plan.cost_lines(plan.values(wanted, tmp_path, measured)) if "wall-clock" in line)

    assert wall_clock("10s", {}) == (
        "wall-clock: about 20s and evaluation; one trial runs in any case, though the limit is 10s"
    )
    known = wall_clock("10s", {"evaluation_s": 1.0})
    assert known == "wall-clock: about 24s; one trial runs in any case, though the limit is 10s"
    assert wall_clock("30s", {}).endswith("; the limit of 30s has room for about 3 of 8 trials")
    assert wall_clock("3m", {}) == "wall-clock: about 55s and evaluation"


def test_no_forecast_exceeds_the_limit_of_the_search(tmp_path, monkeypatch):
    """Of 2 trials, which leave 91 s of 132 to confirm, and of 100, which leave confirming what it is kept."""
    confirm = {"confirm": {"of": 2, "seeds": 3}}
    for trials, total, confirming_s in ((2, "2m30s", 91), (100, "10m", 9 * 22)):
        budget = {"budget": {"per_trial": "20s", "trials": trials, "total": total}}
        wanted = searches.make(folder := tmp_path / f"night-{trials}", searches.FILE | confirm | budget)
        told = plan.values(wanted, tmp_path, {"evaluation_s": 0.0})
        seconds = told["seconds"]
        assert sum(spent for part, spent in seconds.items() if part != "wall_clock") == seconds["wall_clock"]
        assert seconds["wall_clock"] == pytest.approx(told["total_limit_s"])
        assert seconds["confirmation"] == confirming_s <= told["confirming_s"]
        lines = console.Console(folder, wanted, planned=told)
        forecasts = re.findall(r"about ((?:\d+[hms])+)", lines._left())
        assert sum(search_space.duration_s(each, "x") for each in forecasts) <= told["total_limit_s"]


def test_plan_of_a_limit_below_one_trial_costs_one_trial_per_slot(tmp_path, monkeypatch):
    """What starts at once runs to its end."""
    monkeypatch.setattr(plan.resources, "local", lambda: plan.resources.Machine(2, 0))
    budget = {"per_trial": "300s", "total": "320s", "trials": 8, "price_per_device_hour": 3.0}
    wanted = searches.make(tmp_path / "night", searches.FILE | {"budget": budget})
    told = plan.values(wanted, tmp_path, {"evaluation_s": 200.0, "parameters": 1000})
    assert (told["device_hours"], told["price"]) == (pytest.approx(300 / 3600), pytest.approx(0.25))
    assert told["disk_mib"] == pytest.approx(4 * 1000 * (1 + 8) / 2**20)


def test_no_refusal_rests_on_what_was_timed_beside_other_processes(tmp_path):
    """100,000 s of an evaluation would be a month; alone they are 1,000 times shorter."""
    wanted = searches.make(tmp_path / "night")
    quiet = plan.values(wanted, tmp_path, {"evaluation_s": 1e5, "other_load_share": 0.02, "disturbed": False})
    assert "days of wall-clock" in quiet["refused"]
    busy = plan.values(wanted, tmp_path, {"evaluation_s": 1e5, "other_load_share": 0.63, "disturbed": True})
    assert busy["refused"] is None
    assert busy["seconds"] == quiet["seconds"]
    warning = "WARNING: other processes use 63% of the cores: "
    assert any(line.startswith(warning) for line in plan.cost_lines(busy))
    assert not any("WARNING" in line for line in plan.cost_lines(quiet))
    night = searches.make(tmp_path / "long", searches.FILE | {"budget": {"per_trial": "900h", "trials": 8}})
    measured = {"evaluation_s": 1e5, "other_load_share": 0.63, "disturbed": True}
    assert "days of wall-clock" in plan.values(night, tmp_path, measured)["refused"], "by its training alone"


def test_the_disk_holds_all_weights_and_the_checkpoints_under_way(tmp_path, monkeypatch):
    """Of float32: 4 bytes a parameter for each run; 16 for a checkpoint (weights, averages, two moments), of which
    there are two while one is written."""
    monkeypatch.setattr(plan.resources, "local", lambda: plan.resources.Machine(2, 0))
    content = searches.FILE | {"confirm": {"of": 1, "seeds": 4}}
    wanted = searches.make(tmp_path / "night", content)
    told = plan.values(wanted, tmp_path, {"evaluation_s": 22.56, "parameters": 2**20})
    assert (told["at_once"], told["trials"]) == (1, 8)
    assert told["disk_mib"] == 4 * (8 + 2 * 4) + 2 * 16
    probes = searches.make(tmp_path / "fast", searches.FILE | {"objective": "samples_per_s"})
    assert plan.values(probes, tmp_path, {"parameters": 2**20})["disk_mib"] == 0, "speed alone leaves no weights"


def test_what_is_left_counts_judging_and_confirming(tmp_path, monkeypatch, capsys):
    """Before the first trial has ended by the estimate, then by the clock; confirming by the evaluations that were."""
    content = searches.FILE | {"confirm": {"of": 1, "seeds": 4}}
    wanted = searches.make(folder := tmp_path / "night", content)
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    told = plan.values(wanted, tmp_path, {"evaluation_s": 22.56})
    lines = console.Console(folder, wanted, planned=told)
    searching, again = 8 * (20 + 4 * 22.56 + 2) + 15, 8 * (20 + 4 * 22.56 + 2)
    then = f", then up to about {text.seconds(again)} of confirming"
    assert lines._left() == f"about {text.seconds(searching)} left{then}"
    now[0] = 60.0
    assert lines._left() == f"about {text.seconds(searching - 60)} left{then}"
    lines.listen("start", "t0000", {})
    now[0] = 90.0
    searches.write(folder, wanted, 0)  # evaluated for 2 s in 2 points
    lines.listen("end", "t0000", {})
    assert (
        f"1/8, about 3m30s left, then up to about {text.seconds(8 * (20 + 4 * 1.0 + 2))} of confirming"
        in capsys.readouterr().out
    )


def test_end_of_a_search_promises_no_confirming_where_only_the_baseline_finished(tmp_path, capsys):
    content = searches.FILE | {"confirm": {"of": 1, "seeds": 4}, "budget": {"per_trial": "20s", "trials": 2}}
    wanted = searches.make(folder := tmp_path / "night", content)
    lines = console.Console(folder, wanted)
    searches.write(folder, wanted, 0)
    searches.write(folder, wanted, 1, {"loader.batch_size": 64}, curve=((5.0, 1000, 9.0),), status="pruned")
    lines.listen("end", "t0001", {})
    said = capsys.readouterr().out
    assert "2/2, nothing to confirm: only the baseline finished" in said
    assert "of confirming" not in said


def test_trials_that_others_disturbed_are_marked(tmp_path, capsys):
    wanted = searches.make(folder := tmp_path / "night")
    searches.write(folder, wanted, 0, found={"disturbed": True})
    searches.write(folder, wanted, 1, {"loader.batch_size": 64}, curve=((5.0, 1000, 9.0), (20.0, 4000, 1.0)))
    head, _, *rows = (line for line in shown(folder, wanted, width=200) if line)
    assert head.endswith(" · † others used the machine meanwhile")
    assert [row.split()[-1] for row in rows] == ["ok", "†"]
    lines = console.Console(folder, wanted)
    point = {"index": 1, "train_s": 5.0, "frechet": 4.0, "samples_per_s": 50.0}
    for name, disturbed in (("t0000", True), ("t0001", False)):
        lines.listen("point", name, point | {"disturbed": disturbed})
        lines.listen("end", name, {})
        told = capsys.readouterr().out.splitlines()
        assert ["others used the machine meanwhile" in line for line in told] == [disturbed] * 2


def test_what_is_left_of_a_limit_counts_earlier_sessions(tmp_path):
    wanted = searches.make(folder := tmp_path / "night", searches.FILE | {"budget": {"per_trial": "20s", "trials": 8,
                                                                                     "total": "5m"}})  # fmt: skip
    (folder / "sessions.jsonl").write_text(
        '{"event": "begin", "time": 0, "monotonic_s": 10}\n{"event": "end", "time": 9, "monotonic_s": 280}'
    )
    lines = console.Console(folder, wanted, planned=plan.values(wanted, tmp_path, {}))
    assert lines._left() == "about 30s left"


def test_events_of_a_search_for_throughput_have_the_rate_as_their_value(tmp_path, capsys):
    wanted = searches.make(folder := tmp_path / "night", searches.FILE | {"objective": "samples_per_s"})
    searches.write(folder, wanted, 0, curve=((20.0, 4000, None),))
    lines = console.Console(folder, wanted, EventLines(on_stderr=True, as_json=True))
    lines.listen("point", "t0000", {"index": 1, "train_s": 20.0, "samples_per_s": 200.0})
    lines.listen("end", "t0000", {})
    assert [json.loads(line)["value"] for line in capsys.readouterr().err.splitlines()] == [200.0, 200.0]


def test_what_cannot_be_shown_ends_no_search(night, monkeypatch, capsys):
    """A table whose drawing fails, whatever prints; progress that nobody can be told, which is tried once."""
    folder, loaded = night
    monkeypatch.setattr(live_table.LiveTable, "_headline", lambda _: 1 / 0)
    with live_table.LiveTable(folder, loaded) as table:
        table.say("a line")
    said = capsys.readouterr().out
    assert "a line" in said
    assert "the table cannot be drawn: ZeroDivisionError" in said
    heard = []

    def closed(work):
        heard.append(work.done)
        raise BrokenPipeError

    with progress.subscribe(closed), progress.Progress("reading", 3) as work:
        work.step()
    assert (work.done, heard) == (1, [0])


def test_silence_is_broken_by_what_goes_on(tmp_path, monkeypatch):
    wanted = searches.make(folder := tmp_path / "night")
    monkeypatch.setattr(heartbeat, "SILENCE_S", 0.05)
    said = []
    beating = heartbeat.Heartbeat(folder, said.append)

    def next_line():
        said.clear()
        beating.beat()
        until = time.monotonic() + 1200
        while not said and time.monotonic() < until:
            time.sleep(0.01)
        return said[0]

    with beating:
        assert next_line().startswith("starting the workers for ")
        place = searches.write(folder, wanted, 0, status=None)
        assert re.fullmatch(r"t0000 waits for its workers for \d.*s: they start", next_line())
        doing = progress.ProgressFile(place)
        doing.part("evaluation")
        assert re.fullmatch(r"t0000 evaluating for \d.*s", next_line())
        with progress.subscribe(doing), progress.Progress("sampling 64 images", 640, "steps") as work:
            work.more(120)
            doing._due = 0.0
            work.step()
            assert re.fullmatch(
                r"t0000 evaluating for \d.*s: sampling 64 images: 121 of 640 steps, about \d.*s left", next_line()
            )
        assert re.fullmatch(r"t0000 evaluating for \d.*s", next_line())
        (place / progress.DOING).write_text('{"part": "a new one", "since": 0, "work": ""}')
        beating.beat()
        time.sleep(0.3)  # what it does not understand is no end of it
        searches.write(folder, wanted, 0)
        assert next_line() == "1 run ended, none is under way"
    assert not beating._thread.is_alive()


def test_heartbeat_after_a_resume_says_nothing_of_the_session_before(tmp_path):
    wanted = searches.make(folder := tmp_path / "night")
    place = searches.write(folder, wanted, 0, status=None)
    progress.ProgressFile(place).part("evaluation")
    beating = heartbeat.Heartbeat(folder, print)
    assert beating.doing().startswith("starting the workers for ")
    (place / progress.DOING).unlink()
    Journal(place).write("worker", device="cpu", threads=1)  # it goes on
    assert beating.doing().startswith("t0000 waits for its workers")
    progress.ProgressFile(place).part("train")
    assert beating.doing().startswith("t0000 training for ")
    Journal(place).write("end", status="ok")
    assert beating.doing() == "1 run ended, none is under way"


def test_heartbeat_counts_the_start_of_workers_from_their_request(night, monkeypatch):
    folder, loaded = night
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    lines = console.Console(folder, loaded)
    now[0] = 60.0
    lines.greet(None)
    now[0] = 90.0
    assert lines._heartbeat.doing() == "starting the workers for 30s"
    lines.listen("start", "t0004", {})  # it has no journal before its workers ask for one
    now[0] = 100.0
    assert lines._heartbeat.doing() == "starting the workers for 10s"


def test_the_heart_of_a_console_ends_with_it(tmp_path, monkeypatch):
    """Also where the terminal went away meanwhile; runs are called as they are everywhere."""
    wanted = searches.make(folder := tmp_path / "night")
    searches.make(folder / "confirm")
    place = searches.write(folder / "confirm", wanted, 0, status=None)
    monkeypatch.setattr(console.Console, "_print", lambda *_: 1 / 0)
    monkeypatch.setattr(heartbeat, "SILENCE_S", 0.05)
    with console.Console(folder / "confirm", wanted) as lines:
        Journal(place).write("worker", device="cpu", threads=1)
        assert lines._heartbeat.doing().startswith("confirm/t0000 waits for its workers")
        time.sleep(0.2)
        lines.quiet = True
    assert not lines._heartbeat._thread.is_alive()


def test_hundreds_of_trials_fit_a_terminal(night):
    folder, loaded = night
    for number in range(4, 200):
        write(folder, loaded, number, {"loader.batch_size": 64, "precision.amp": "bf16"}, [30, 20, 10, 7.0], "ok")
    lines = shown(folder, loaded, height=24)
    assert len(lines) <= 24
    assert any(line.startswith(f"… and {200 - 16} more in") for line in lines)


WIDTHS = [40, 60, 80, 100, 140, 200]


@pytest.mark.parametrize("width", WIDTHS)
def test_what_matters_least_goes_first_where_a_terminal_is_narrow(night, width):
    folder, loaded = night
    _, head, *rows = (line for line in shown(folder, loaded, width=width) if line and not line.startswith("…"))
    while not head.lstrip().startswith("rank"):  # the headline takes as many lines as it needs
        head, *rows = rows
    assert all(len(line) <= width for line in (head, *rows))
    assert re.search(r"rank +trial .*FD.+ ↓.* status$", head)
    assert [row.split()[-1] for row in rows] == ["points", "ok", "ok", "oom"]
    assert [row.split()[1] for row in rows[1:3]] == ["t0001", "t0000"]
    assert all(value in row for value, row in zip(("15", "5", "10"), rows, strict=False))
    left_out = [name not in head for name in ("MiB", "images/s", "× baseline", "curve")]
    assert left_out == sorted(left_out, reverse=True), "memory, then speed, the ratio and the curve"
    assert any(left_out) == (width <= 100)
    if width >= 80:
        assert any("batch_size=32" in row for row in rows), "what differs is told"


LONG = {f"model.a_rather_long_name_of_a_layer_{where}": 0.125 for where in ("first", "last")}


@pytest.mark.parametrize("width", WIDTHS)
def test_names_are_cut_in_the_middle_and_values_stay(width):
    said = words.fitted(text.knobs(LONG), width)
    assert len(said) <= width
    assert said.count("=0.125") == 2
    assert re.search("st=.+st=", said), "the ends of both names"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_at_the_end_fits_its_terminal(width):
    rows = [
        [f"loader.batch_size={size} optimizer.lr=1.00e-04", "no significant difference", "3 of 3", "2.09 ± 0.15"]
        for size in (32, 64)
    ]
    lines = [["configuration", "verdict", "runs", "FD (classifier), mean ± sd"], *rows]
    table = words.plain_table(lines, width)
    assert all(len(line) <= width for line in table.splitlines())
    assert all(" ".join(table.split()).count(cell) == 2 for cell in rows[0][1:]), "nothing is lost"
    assert table.count("64") == table.count("32") == 1
    assert table.startswith("configuration: loader" if width < 70 else "configuration   ")
    assert words.plain_table(lines, None) == words.plain_table(lines, 500), "what goes into a file is as wide as it is"


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([8.0, 4.0, 2.0, 1.0], "█▆▃▁"),
        ([1.0, 1.0], "▁▁"),
        ([], ""),
        ([1.0, float("nan"), 4.0], "▁?█"),
        ([float("inf")], ""),
    ],
)
def test_a_curve_as_bars(values, bars):
    assert live_table.sparkline(values, logs=True) == bars


def test_a_start_says_what_is_believed_of_an_earlier_search(tmp_path, capsys):
    """And a search that goes on does not say it again."""
    searches.night(tmp_path / "earlier")
    wanted = searches.make(tmp_path / "night", searches.FILE | {"warm_start": str(tmp_path / "earlier")})
    console.Console(tmp_path / "night", wanted).say_reused("cpu", None)
    said = capsys.readouterr().out
    assert re.search(r"warm start: none of the 3 results of earlier is reused \(CPU slow one there, .+ here; ", said)
    searches.write(tmp_path / "night", wanted, 0)
    console.Console(tmp_path / "night", wanted).say_reused("cpu", None)
    assert "warm start" not in capsys.readouterr().out


def test_what_is_never_run_is_said_once(night, capsys):
    folder, loaded = night
    shows = console.Console(folder, loaded)
    write(folder, loaded, 4, {"loader.batch_size": 128, "precision.amp": "bf16"}, [], "skipped", "not run: as t0002")
    for event in ("point", "end"):
        shows.listen(event, "t0003", {"index": 2, "train_s": 4.0, "samples_per_s": 50.0, "frechet": 15.0})
    said = capsys.readouterr().out
    assert said.count("t0004 skipped  not run: as t0002  precision.amp=bf16") == 1
    row = next(line for line in shown(folder, loaded) if "t0004" in line)
    assert row.endswith("skipped")


def test_confirming_runs_are_told_apart_from_the_search(tmp_path, capsys):
    """By their names, which other commands know, by their clock, and by naming no run the best."""
    content = CONTENT | {"budget": {"per_trial": "8s"}, "trials": [{"loader.batch_size": 64}], "seeds": 3}
    content.pop("search", None)
    noisy(tmp_path / "night")
    folder = tmp_path / "night" / "confirm"
    loaded = search_space.parse(content, "x.yaml")
    experiment.create(folder, loaded, content)
    for number, point in enumerate(loaded.candidates[:3]):
        write(folder, loaded, number, point, [8.0, 4.0 - number], "ok")
    lines = console.Console(folder, loaded, EventLines(begun=time.monotonic() - 440))
    lines.listen("start", "t0002", loaded.candidates[2])
    lines.listen("end", "t0001", {})
    start, end = capsys.readouterr().out.splitlines()
    assert start.startswith("[confirm  7m20s] confirm/t0002 start")
    assert end.startswith("[confirm  7m20s] confirm/t0001 ok")
    assert "best" not in end
    head, _, *rows = (line for line in shown(folder, loaded, width=200) if line)
    assert head.startswith("night: confirming runs (confirm) · 3/")
    assert "best" not in head
    assert "as fast" not in head
    assert [row.split()[0] for row in rows] == ["confirm/t0000", "confirm/t0002", "confirm/t0001"], "by configuration"


def test_of_thousands_of_trials_the_summary_is_made_seldom_and_every_end_is_told(night, capsys, monkeypatch):
    """As if four were many: the best so far is that of the last time; the count and the trial itself are of now."""
    for module in (console, following):
        monkeypatch.setattr(module, "MANY", 1)
    monkeypatch.setattr(following, "SHARE", 1e-9)
    folder, loaded = night
    lines = console.Console(folder, loaded)
    write(folder, loaded, 4, {"loader.batch_size": 64, "precision.amp": "bf16"}, [30, 10, 6, 2.0], "ok")
    lines.listen("end", "t0004", {})
    told = capsys.readouterr().out
    assert "t0004 ok  8.0 s  FD (classifier) 2  0.20× baseline" in told
    assert "best t0001 5" in told
    assert "4/8, " in told
    monkeypatch.setattr(following, "MANY", 500)
    lines.listen("end", "t0004", {})
    assert "best t0004 2" in capsys.readouterr().out
