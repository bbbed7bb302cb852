"""Runs of real programs, and what they may do wrong."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tunediff import config as cfg
from tunediff.command import process, trial
from tunediff.command.definition import CommandDefinition
from tunediff.command.run import POINTS, CommandRun, RunReader, execute
from tunediff.command.workload import make
from tunediff.core import trial_record
from tunediff.core.environment import RAY_BEFORE, of_user
from tunediff.core.journal import Journal
from tunediff.core.point import Point
from tunediff.core.target import TIME_TO_TARGET
from tunediff.core.trial_record import End

HANGS = "import time\ntime.sleep(1000)"
FOREVER = "import time, itertools\nfor i in itertools.count():\n print(f'loss: {1 / (i + 1)}'); time.sleep(0.01)\n"


def definition(program, **settings):
    words = (sys.executable, "-c", program, "{seed}")
    return CommandDefinition(command=words, objective="loss", **{"grace": 0.5, **settings})


def run(folder, program, budget_s=None, **settings):
    *events, end = execute(CommandRun(definition(program, **settings), {}, 3, folder, budget_s))
    assert isinstance(end, End)
    return [event for event in events if isinstance(event, Point)], end


def alive(process, folder):
    """Return whether a process belongs to the run in a folder, by its environment, and still runs."""
    try:
        ours = process.environ().get("TUNEDIFF_FOLDER") == str(folder)
        return ours and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it has ended
        return False


def processes_of(folder):
    return [process for process in psutil.process_iter() if alive(process, folder)]


def wait_until(condition):
    while not condition():
        time.sleep(0.05)


def test_the_value_at_the_budget_counts_and_the_curve_has_seconds(tmp_path):
    points, end = run(tmp_path, FOREVER, 2.0, clock_from="loss")
    assert end.status == "ok"
    assert points[-1].index == POINTS
    assert points[-1].train_s <= 2.0 <= end.seconds["train"]
    assert [point.index for point in points] == sorted({point.index for point in points})
    assert [point.train_s for point in points] == sorted(point.train_s for point in points)
    assert points[-1]["loss"] == pytest.approx(1 / points[-1].steps)
    assert not processes_of(tmp_path)
    assert "loss: 1.0\n" in (tmp_path / process.LOG).read_text()


def test_what_is_printed_after_the_budget_does_not_count(tmp_path):
    reader = RunReader(CommandRun(definition(""), {}, 3, tmp_path, 2.0), begun=100.0)
    for line, now in (("loss: 1", 101.0), ("loss: 0.5", 102.5)):
        reader.read(line, now)
    assert (reader.values, reader.curve.last()["loss"]) == (1, 1.0)


ENDS = {
    "two values": (
        "import sys\nprint('METRIC loss=3 acc=0.5'); print(f'METRIC loss={sys.argv[1]} acc=0.75')",
        {}, {"loss": 3.0, "acc": 0.75},
    ),
    "colours, no part of names and numbers": (
        r"print('\x1b[1m\x1b[32mloss\x1b[0m: \x1b[33m1.25\x1b[0m')", {}, {"loss": 1.25},
    ),
    "its output is a file": (
        "import os, time\nfile = os.open(os.environ['TUNEDIFF_FOLDER'] + '/m.json', os.O_CREAT | os.O_WRONLY)\n"
        "os.closerange(0, 3)\ntime.sleep(0.5)\nos.write(file, b'{\"loss\": 0.5}')",
        {"metrics": "{folder}/m.json"}, {"loss": 0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_command_that_ends_by_itself_has_the_values_of_its_end(tmp_path, name):
    program, settings, values = ENDS[name]
    points, end = run(tmp_path, program, outcome="final", **settings)
    assert (end.status, {name: points[-1][name] for name in values}) == ("ok", values)


def test_the_seconds_until_the_target_are_the_outcome(tmp_path):
    settings = {"outcome": "time", "target": "loss<=0.1"}
    program = f"print('\\n'.join(f'loss: {{1 / i}}' for i in range(1, 30)))\n{FOREVER}"  # many at once, then more
    points, end = run(tmp_path, program, 60.0, **settings)
    assert end.status == "ok"
    assert points[-1]["time_to_target_s"] <= points[-1].train_s < 60
    assert points[-1].steps > 10, "the mean of three has met it, and not one value"
    _, end = run(tmp_path / "never", "print('loss: 1')", 60.0, **settings)
    assert end.status == "missed"
    assert "loss<=0.1" in end.reason


LAUNCHER = (  # what torchrun prints after the error of a rank
    "import sys\nprint('[rank1]: ValueError: no workers', file=sys.stderr)\n"
    "for _ in range(40): print('  boilerplate', file=sys.stderr)\nsys.exit(1)"
)
FAILURES = {
    "own seconds": ("print('t=soon'); print('loss: 1')", "error", "time: 'soon' is no number"),
    "half a number": ("print('loss: 0,31')", "error", "loss: '0,31' is no clear number"),
    "nothing printed": ("print('no value')", "error", "no value of loss"),
    "what was printed instead": ("print('Loss: 3 of 4')", "error", "its last lines:\n  Loss: 3 of 4"),
    "a launcher's words": (LAUNCHER, "error", "[rank1]: ValueError: no workers\n  boilerplate"),
    "not finite": ("print('loss: 1'); print('loss: nan')", "nan", "loss is nan"),
    "exit code": ("import sys\nprint('loss: 1'); sys.exit('no such data')", "error", "no such data"),
    "memory": ("import sys\nsys.exit('torch.OutOfMemoryError: CUDA out of memory.')", "oom", "out of memory"),
    "killed": ("import os\nprint('loss: 1'); os.kill(os.getpid(), 9)", "error", "signal 9"),
}


def test_a_check_takes_the_first_value_of_a_program_that_prints_many_at_once(tmp_path):
    reader = RunReader(CommandRun(definition(""), {}, 3, tmp_path, 9.0, enough=1), 0.0)
    for value in (2.0, 1.0, 0.5):
        reader.read(f"loss: {value}\n", 1.0)
    assert reader.curve.last()["loss"] == reader.value == 2.0


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_a_result_with_its_reason(tmp_path, name):
    program, status, reason = FAILURES[name]
    _, end = run(tmp_path, program, outcome="final", time=r"t=(\S+)")
    assert end.status == status
    assert reason in end.reason


def test_a_program_that_does_not_exist_is_a_failure(tmp_path):
    command = CommandDefinition(command=("no-such-program", "{seed}"), objective="loss")
    (end,) = execute(CommandRun(command, {}, 0, tmp_path, 1.0))
    assert end.status == "error"
    assert "no-such-program" in end.reason


HARD_TO_END = {
    "ignores SIGTERM": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
    "has children": "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n",
    "detaches": (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
    ),
}


@pytest.mark.parametrize("name", HARD_TO_END)
def test_nothing_of_a_run_is_left(tmp_path, name):
    _, end = run(tmp_path, HARD_TO_END[name] + FOREVER, 1.0, clock_from="loss")
    assert end.status == "ok"
    wait_until(lambda: not processes_of(tmp_path))  # who was killed is gone a moment later


def test_a_command_that_hangs_at_its_start_ends_at_its_budget(tmp_path):
    _, end = run(tmp_path, "import time\ntime.sleep(1000)", 0.5)
    assert end.status == "error"
    assert "no value of loss" in end.reason


def test_a_run_that_does_not_end_is_a_failure_with_its_words(tmp_path):
    for program in (f"print('loss: 1')\n{HANGS}", f"print('TUNEDIFF pause'); print('loss: 1')\n{HANGS}"):
        command = CommandRun(definition(program), {}, 3, tmp_path, 60.0, timeout_s=0.5)
        *_, end = execute(command)
        assert end.status == "timeout"
        assert "had not ended after" in end.reason
        assert end.reason.endswith("its last lines:\n  loss: 1") or "pause" in end.reason


SAVES = (
    "import os, signal, sys\n"
    "def save(*_): print('loss: 0.5'); print('CHECKPOINT saved'); sys.exit()\n"
    "signal.signal(signal.SIGTERM, save)\n"
)


def test_a_run_that_is_interrupted_may_save_its_work(tmp_path):
    notes = []
    run = CommandRun(definition(SAVES + FOREVER), {}, 3, tmp_path, 1000.0)
    events = execute(run, note=lambda event, **content: notes.append(content))
    next(event for event in events)
    events.close()
    assert (notes[0]["path"], notes[0]["state"]["reduced"]) == ("saved", ["0.5"])
    assert not processes_of(tmp_path)


def test_a_run_sees_nothing_of_the_ray_of_tunediff(tmp_path, monkeypatch):
    for name, value in (("RAY_ADDRESS", "x:1"), (RAY_BEFORE, '{"RAY_OWN": "y"}')):
        monkeypatch.setenv(name, value)
    run(tmp_path, "import os; print([n for n in os.environ if 'RAY_' in n]); print('loss: 1')", 60.0)
    assert (tmp_path / process.LOG).read_text().startswith("['RAY_OWN']")
    monkeypatch.delenv(RAY_BEFORE)
    assert of_user()["RAY_ADDRESS"] == "x:1", "where tunediff runs no Ray it is the user's"


def test_odd_output_neither_fills_memory_nor_hides_values(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "LOG_LIMIT", 1 << 20)
    program = (
        "import sys\n"
        "out = sys.stdout.buffer\n"
        "out.write(bytes(range(256)) * 40 + b'\\n')\n"
        "for _ in range(200): out.write(b'x' * 100_000)\n"  # 20 MB without a newline
        "out.write(b'\\rloss: 0.5\\rloss: 0.25\\r')\n"
        "out.flush()\n"
    )
    points, end = run(tmp_path, program, outcome="final")
    assert (end.status, points[-1]["loss"]) == ("ok", 0.25)
    assert (tmp_path / process.LOG).stat().st_size < (1 << 20) + 200_000


def test_a_full_disk_costs_the_log_and_no_value(tmp_path):
    (tmp_path / process.LOG).symlink_to("/dev/full")
    points, end = run(tmp_path, "print('loss: 0.5')", outcome="final")
    assert (end.status, points[-1]["loss"]) == ("ok", 0.5)


def test_a_run_can_be_stopped_early(tmp_path):
    seen = []
    *_, end = execute(
        CommandRun(definition(FOREVER), {}, 0, tmp_path, 1000.0), lambda: seen.append(1) or len(seen) > 20
    )
    assert end.status == "pruned"
    assert not processes_of(tmp_path)


def test_a_program_gets_its_seed_folder_port_and_budget(tmp_path):
    names = "SEED", "FOLDER", "BUDGET_S", "RESUME"
    program = (
        f"import os\nprint([os.environ['TUNEDIFF_' + n] for n in {names}], os.environ['MASTER_PORT'])\nprint('loss: 1')"
    )
    run(tmp_path, program, 60.0)
    line = (tmp_path / process.LOG).read_text()
    assert f"['3', '{tmp_path}', '60.0', '0']" in line


def test_nothing_survives_a_judge_that_is_killed_as_it_starts_a_program(tmp_path):
    script = (
        "import os, subprocess\nfrom tunediff.command import guard\nguard.watch('early')\n"
        f"told = {{'TUNEDIFF_RUN': 'early', 'TUNEDIFF_FOLDER': {str(tmp_path)!r}}}\n"
        "subprocess.Popen(['sleep', '1000'], env=told, start_new_session=True)\nos.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    wait_until(lambda: not processes_of(tmp_path))


def test_nothing_survives_a_judge_that_is_killed(tmp_path):
    script = (
        "from tests.command.test_run import *\n"
        f"list(execute(CommandRun(definition(HARD_TO_END['detaches'] + FOREVER), {{}}, 3, Path({str(tmp_path)!r}), 1000.0)))"
    )
    root = Path(__file__).parents[2]
    judge = subprocess.Popen([sys.executable, "-c", script], cwd=root, env=os.environ | {"PYTHONPATH": str(root)})
    wait_until(lambda: len(processes_of(tmp_path)) >= 2 or judge.poll() is not None)
    assert judge.poll() is None
    judge.kill()
    judge.wait()
    wait_until(lambda: not processes_of(tmp_path))


# -------------------------------------------------- a run that goes on in another process knows what the first one knew
PROGRAM = """
import json, os, pathlib, sys
how, folder, metrics = sys.argv[1], pathlib.Path(os.environ["TUNEDIFF_FOLDER"]), None
state = folder / "state"
first = int(state.read_text()) if os.environ["TUNEDIFF_RESUME"] == "1" else 0
if how != "plain": print("TUNEDIFF start", flush=True)
file = folder / "m.jsonl"
if how == "cut" and file.exists():
    file.write_text("".join(file.read_text().splitlines(True)[:first]))
if how in ("anew", "whole"): file.unlink(missing_ok=True)
values = [abs(step - 7.5) + 1 / (step + 1) for step in range(14)]
for step, value in [*enumerate(values)][first:]:
    if how == "target": print(f"t={step + 1}", flush=True)
    print(f"METRIC acc={step} loss={value}" if how in ("plain", "line", "target") else f"step {step}", flush=True)
    written = values[:step + 1] if how == "whole" else [value]
    with open(file, "w" if how == "whole" else "a") as rows:
        for value in written: rows.write(json.dumps({"loss": value}) + "\\n")
    if step % 4 == 3:
        state.write_text(str(step + 1))
        print("CHECKPOINT state", flush=True)
"""
WAYS = [
    ("plain", "last"),
    ("target", "last"),
    ("line", "mean:3"),
    ("append", "min"),
    ("cut", "mean:6"),
    ("anew", "max"),
    ("whole", "mean:2"),
]


def outcome_of(folder, how, reduce):
    """Run a trial, or go on with one; return its result."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(PROGRAM)
    words = sys.executable, "-IS", str(folder / "train.py"), how, "{seed}"
    settings = {} if how in ("plain", "line", "target") else {"metrics": "{folder}/m.jsonl"}
    if how == "target":  # printed seconds and values: when they are read decides nothing
        settings = {"outcome": "time", "target": "loss<=1.5", "time": r"t=(\d+)"}
    command = CommandDefinition(command=words, objective="loss", **{"reduce": reduce, "outcome": "final", **settings})
    config = cfg.take_along(make(command, {}, "test").schema.default(), folder)
    (folder / "config.yaml").write_text(cfg.dump(config, folder=folder))
    Journal(folder).start(*cfg.identity(config), {}, None)
    list(trial.run(trial.run_of(config, folder, None), lambda: False))
    record = trial_record.read_trial(folder)
    last = record.points[-1]
    seconds = last.get(TIME_TO_TARGET)
    return record.end.status, last.steps, last["loss"], last.get("acc"), record.end.steps, seconds


@pytest.mark.parametrize("cut", range(30))
def test_a_run_that_was_killed_at_any_line_has_the_result_of_one_that_was_not(tmp_path, cut):
    how, reduce = WAYS[cut % len(WAYS)]
    expected = outcome_of(tmp_path / "whole", how, reduce)
    assert expected[:2] == ("ok", 9 if how == "target" else 14)
    lines = [*map(json.loads, (tmp_path / "whole/journal.jsonl").read_text().splitlines())]
    kept = lines[: 1 + cut * (len(lines) - 1) // 30]
    saved = max((line["state"]["values"] for line in kept if line["event"] == "checkpoint"), default=0)
    for line in kept:  # what was not saved had come out otherwise
        if line["event"] == "point" and line["steps"] > saved:
            line["loss"] -= 100
    rows = (tmp_path / "whole/m.jsonl").read_text().splitlines(True)[: saved + 2]
    killed = tmp_path / "killed"
    Journal(killed).path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    (killed / "state").write_text(str(saved))
    (killed / "m.jsonl").write_text("".join([*rows[:saved], *(row.replace(": ", ": -") for row in rows[saved:])]))
    assert outcome_of(killed, how, reduce) == expected


def test_a_run_that_goes_on_from_its_last_value_has_that_value(tmp_path):
    (whole := tmp_path / "whole").mkdir()
    status, *_ = outcome_of(whole, "plain", "last")
    path = whole / "journal.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"end"' not in line))
    (whole / "state").write_text("14")  # nothing is left to be done behind its checkpoint, 12
    assert (status, *outcome_of(whole, "plain", "last")[:2]) == ("ok", "ok", 12)


def test_only_runs_that_ended_ok_shorten_the_time_that_a_run_may_take(tmp_path):
    command = CommandDefinition(command="python x.py {seed}", objective="loss")
    run = trial.CommandRun(command, {}, 0, tmp_path / "trials" / "t0002", 3600.0)
    journal = Journal(run.folder.parent / "t0001")
    journal.start(*cfg.identity(make(command, {}, "test").schema.default()), {}, 3600.0)
    journal.end(trial_record.End("error", "exit code 1", {"train": 1.2}, 0))
    assert trial._timeout_s(run) == 36_000
