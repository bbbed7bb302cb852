"""Judge runs by a script of the user that neither side can change: `compare --judge judge.py`.

The script is copied into the folder of the comparison before the first run, its SHA-256 is one of
the rules, and it is checked before each use. It gets the folder of a run that ended ok, with what
the run left there (a command its files, a workload `weights.safetensors`), and prints the metric.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tunediff.analysis import sides
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.sides import HOLDOUT, JUDGE
from tunediff.command.metrics import MetricPattern
from tunediff.core import text, trial_record
from tunediff.core.errors import TunediffError
from tunediff.core.files import write_text
from tunediff.core.journal import Journal
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import End, TrialRecord
from tunediff.tuning.rounds import Rounds
from tunediff.tuning.trial_spec import TrialSpec

LOG = "judge.log"
"""File in the folder of a run with what the judge printed."""
LIMIT_S = 3600.0
"""Seconds that a judge may take for one run."""


class JudgeError(TunediffError, RuntimeError):
    """The judge failed, printed no value, or is not the one that was locked."""


def lock(source: Path | None, name: str, folder: Path) -> None:
    """Copy a judge into the folder of a comparison, where nobody writes to it."""
    if source is not None:
        shutil.copyfile(source, folder / name)
        (folder / name).chmod(0o444)


def value_by(judge: Path, digest: str, run: Path, metric: str) -> float:
    """Return the value that a judge prints of a run. Raises `JudgeError`.

    It runs in a new folder: Python imports from the folder of a script what it finds there, and a
    side may write into that of the comparison.
    """
    content = judge.read_bytes() if judge.is_file() else b""
    if hashlib.sha256(content).hexdigest() != digest:
        raise JudgeError(f"{judge}: is not the judge that was locked")
    with (
        tempfile.TemporaryDirectory(prefix="tunediff-judge-") as own,
        open(run / LOG, "a+b") as log,
    ):
        (script := Path(own, judge.name)).write_bytes(content)
        start = log.seek(0, os.SEEK_END)
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(script), str(run.absolute())],
                cwd=own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.PIPE,
                timeout=LIMIT_S,
                env={**os.environ, "TUNEDIFF_FOLDER": str(run.absolute())},
            )
        except subprocess.TimeoutExpired:
            raise JudgeError(f"{judge.name}: was ended after {text.seconds(LIMIT_S)}") from None
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
        log.write(done.stderr)
    if done.returncode != 0:
        errors = done.stderr.decode(errors="replace").splitlines()
        last = next(reversed(errors or lines), "it printed nothing")
        raise JudgeError(f"{judge.name}: exit code {done.returncode}: {last}")
    pattern = MetricPattern(metric, None, "--judge")
    found = [value for line in lines if (value := pattern.find(line)) is not None]
    if not found:
        raise JudgeError(f"{judge.name}: no value of {metric} in what it printed ({run / LOG})")
    if not math.isfinite(found[-1]):
        raise JudgeError(f"{judge.name}: {metric} is {found[-1]}; allowed: a finite number")
    return found[-1]


class JudgedRounds(Rounds):
    """Rounds whose runs count by what a locked judge says of them."""

    comparison: Comparison

    def settle(self, spec: TrialSpec, trial_record: TrialRecord) -> None:
        super().settle(spec, judged(self.comparison, spec.folder, trial_record))


def judged(comparison: Comparison, run: Path, record: TrialRecord) -> TrialRecord:
    """Write into the journal of a run what the judge says of it; return its record.

    A run of which it has no value has failed.
    """
    digest = comparison.experiment.judge
    if digest is None or record.status != Status.OK or not record.points:
        return record
    if record.value(comparison.metric) is not None:  # a resumed comparison has judged it
        return record
    journal = Journal(run)
    try:
        value = value_by(comparison.folder / JUDGE, digest, run, comparison.objective)
        journal.write("final", steps=record.points[-1].steps, **{comparison.objective: value})
    except JudgeError as error:
        journal.end(End(Status.ERROR, str(error)))
    return trial_record.read_begun(run)


def show_holdout(folder: Path) -> None:
    """Let the second judge, if there is one, judge all runs of a comparison that is over.

    Its values, or why it has none, decide nothing, and are there only now.
    """
    comparison = Comparison.read(folder)
    digest, file = comparison.experiment.holdout, folder / sides.HOLDOUT_VALUES
    if digest is None or not comparison.ended or file.is_file():
        return
    values: dict[str, list[float]] = {side: [] for side in sides.SIDES}
    try:
        for run in (run for run in comparison.runs if run.status == Status.OK):
            place, metric = folder / "trials" / run.name, comparison.objective
            value = value_by(folder / HOLDOUT, digest, place, metric)
            values[run.drawn["side"]].append(value)
        content = json.dumps(values)
    except JudgeError as error:
        content = json.dumps({"failure": str(error)})
    write_text(file, content + "\n")
