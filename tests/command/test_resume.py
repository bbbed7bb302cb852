"""A run that goes on in another process knows what the first one knew."""

import json
import sys

import pytest

from tunediff import config as cfg
from tunediff.command import trial
from tunediff.command.definition import CommandDefinition
from tunediff.command.workload import make
from tunediff.core import trial_record
from tunediff.core.journal import Journal
from tunediff.core.target import TIME_TO_TARGET

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


def run(folder, how, reduce):
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
    expected = run(tmp_path / "whole", how, reduce)
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
    assert run(killed, how, reduce) == expected


def test_a_run_that_goes_on_from_its_last_value_has_that_value(tmp_path):
    (whole := tmp_path / "whole").mkdir()
    status, *_ = run(whole, "plain", "last")
    path = whole / "journal.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"end"' not in line))
    (whole / "state").write_text("14")  # nothing is left to be done behind its checkpoint, 12
    assert (status, *run(whole, "plain", "last")[:2]) == ("ok", "ok", 12)


def test_only_runs_that_ended_ok_shorten_the_time_that_a_run_may_take(tmp_path):
    command = CommandDefinition(command="python x.py {seed}", objective="loss")
    run = trial.CommandRun(command, {}, 0, tmp_path / "trials" / "t0002", 3600.0)
    journal = Journal(run.folder.parent / "t0001")
    journal.start(*cfg.identity(make(command, {}, "test").schema.default()), {}, 3600.0)
    journal.end(trial_record.End("error", "exit code 1", {"train": 1.2}, 0))
    assert trial._timeout_s(run) == 36_000
