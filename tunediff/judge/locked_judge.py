"""Judge runs by a script of the user that neither side can change: `compare --judge judge.py`.

The script is copied into the folder of the comparison before the first run, its SHA-256 is one of
the rules, and it is checked before each use. It gets the folder of a run that ended ok, with what
the run left there (a command its files, a workload `weights.safetensors`), and prints the metric.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

from tunediff.analysis import pairs
from tunediff.analysis.pair_test import HOLDOUT, JUDGE
from tunediff.analysis.pairs import Pairs
from tunediff.command.metrics import MetricPattern
from tunediff.core import trial_record
from tunediff.core.errors import TunediffError
from tunediff.core.files import write_text
from tunediff.core.journal import Journal
from tunediff.core.trial_record import End, TrialRecord
from tunediff.judge.frozen_code import sha256
from tunediff.tuning.rounds import Proposed, Rounds

LOG = "judge.log"
"""File in the folder of a run with what the judge printed."""
R = TypeVar("R", bound=Proposed)


class JudgeError(TunediffError, RuntimeError):
    """The judge failed, printed no value, or is not the one that was locked."""


def lock(source: Path | None, name: str, folder: Path) -> None:
    """Copy a judge into the folder of a comparison, where nobody writes to it."""
    if source is not None:
        shutil.copyfile(source, folder / name)
        (folder / name).chmod(0o444)


def value_by(judge: Path, digest: str, run: Path, metric: str) -> float:
    """Return the value that a judge prints of a run. Raises `JudgeError`."""
    if not judge.is_file() or sha256(judge) != digest:
        raise JudgeError(f"{judge}: is not the judge that was locked")
    environment = {**os.environ, "TUNEDIFF_FOLDER": str(run)}
    done = subprocess.run(
        [sys.executable, str(judge), str(run)], capture_output=True, text=True, env=environment
    )
    with open(run / LOG, "a", encoding="utf-8") as file:
        file.write(done.stdout + done.stderr)
    lines = (done.stdout + done.stderr).splitlines()
    if done.returncode != 0:
        last = lines[-1] if lines else "it printed nothing"
        raise JudgeError(f"{judge.name}: exit code {done.returncode}: {last}")
    pattern = MetricPattern(metric, None, "--judge")
    found = [value for line in lines if (value := pattern.find(line)) is not None]
    if not found or found[-1] != found[-1]:
        raise JudgeError(f"{judge.name}: no value of {metric} in what it printed ({run / LOG})")
    return found[-1]


class JudgedRounds(Rounds[R]):
    """Rounds whose runs count by what a locked judge says of them."""

    comparison: Pairs

    def settle(self, spec: R, trial_record: TrialRecord | None) -> None:
        super().settle(spec, judged(self.comparison, spec.folder, trial_record))


def judged(comparison: Pairs, run: Path, record: TrialRecord | None) -> TrialRecord | None:
    """Write into the journal of a run what the judge says of it; return its record.

    A run of which it has no value has failed.
    """
    name, digest = comparison.test.objective, comparison.judges[0]
    done = (
        record is None or record.status != "ok" or record.value(comparison.test.metric) is not None
    )
    if digest is None or done or not record or not record.points:
        return record
    journal = Journal(run)
    try:
        value = value_by(comparison.folder / JUDGE, digest, run, name)
        journal.write("final", steps=record.points[-1].steps, **{name: value})
    except JudgeError as error:
        journal.end(End("error", str(error)))
    return trial_record.read_trial(run)


def show_holdout(folder: Path) -> None:
    """Let the second judge, if there is one, judge all runs of a comparison that is over.

    Its values decide nothing, and are there only now.
    """
    comparison = pairs.read(folder)
    digest, file = comparison.judges[1], folder / pairs.HOLDOUT_VALUES
    if digest is None or not comparison.over or file.is_file():
        return
    values: dict[str, list[float]] = {side: [] for side in pairs.SIDES}
    for run in comparison.test.begun:
        if run.status == "ok":
            place = folder / "trials" / run.name
            name = comparison.test.objective
            values[run.drawn["side"]].append(value_by(folder / HOLDOUT, digest, place, name))
    write_text(file, json.dumps(values) + "\n")
