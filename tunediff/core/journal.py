"""Write the journal of a trial: an append-only file of JSON lines.

Every line is written, flushed and synced before anything else learns of it, so a kill at any moment
loses nothing that was measured. `tunediff.core.trial_record` lists the events and reads them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunediff.core import environment
from tunediff.core.clock import UnitName
from tunediff.core.files import FORMAT, naming_file
from tunediff.core.point import Point
from tunediff.core.trial_record import CHECKPOINT, JOURNAL, End, Role, Values, events, read_trials


class Journal:
    """Append to a trial's journal; lines are on disk on return. Full disks raise `OSError`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / JOURNAL

    def start(
        self,
        config: Values,
        fingerprint: str,
        drawn: Values,
        budget_s: float | None,
        number: int = 0,
        unit: UnitName = "wall",
        role: Role = "draw",
    ) -> None:
        """Write that an attempt begins. `config`: every knob by dotted name, and the workload;
        `fingerprint`: equal exactly for equal configurations of equal workloads (`cfg.identity`
        returns both); `budget_s`: training seconds of this trial."""
        self.write(
            "start",
            format=FORMAT,
            name=self.folder.name,
            number=number,
            role=role,
            config=config,
            seed=config.get("seed"),
            drawn=drawn,
            budget_s=budget_s,
            unit=unit,
            fingerprint=fingerprint,
            environment=environment.describe(),
            pid=os.getpid(),
        )

    def point(self, point: Point) -> bool:
        """Write an evaluation. Return False if the journal has it already (index and steps)."""
        if (point.index, point.steps) in self._written():
            return False
        self.write("point", **point.flat)
        return True

    def restarted(self, reason: str = "") -> bool:
        """Write that the training begins again at its first step: earlier points are void.

        `reason`: why its checkpoint cannot be used. Returns False for a first start, not written.
        """
        again = bool(reason) or bool(self._written())
        if again:
            self.write("restarted", reason=reason or "no checkpoint")
        return again

    def resumed(self, steps: int) -> None:
        """Write that the training goes on behind so many steps: points behind them are void."""
        self.write("resumed", steps=steps)

    def _written(self) -> set[tuple[int, int]]:
        """Return (index, steps) of the points since the last restart, which voids the others."""
        written: set[tuple[int, int]] = set()
        for line in events(self.folder):
            if line["event"] == "restarted":
                written.clear()
            elif line["event"] == "resumed":
                written = {(index, steps) for index, steps in written if steps <= line["steps"]}
            elif line["event"] == "point":
                written.add((line["index"], line["steps"]))
        return written

    def end(self, end: End) -> None:
        """Write that the trial has ended."""
        self.write("end", **vars(end))

    def end_trial(self, end: End) -> None:
        """Write the end of a trial; it will not run again, so its checkpoint goes.

        Until the end is on disk a restart needs the checkpoint.
        """
        self.end(end)
        for left in (*self.folder.glob(CHECKPOINT), *self.folder.glob(f".{CHECKPOINT}.*")):
            left.unlink(missing_ok=True)

    def write(self, event: str, **content: Any) -> None:
        """Append one line and wait until the disk has it."""
        line = to_json({"event": event, "time": time.time(), **content}) + "\n"
        with naming_file(self.path), open(self.path, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a kill cut the last line: end it
                    line = "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def repeat_lost(experiment: Path, points: Sequence[Values] | None = None) -> None:
    """Let trials run again, under their names, that have failed for a reason outside of them.

    `points`: only trials of these drawn knobs; None: all of them.
    """
    for trial in read_trials(experiment):
        if trial.external_cause and (points is None or trial.drawn in points):
            Journal(experiment / "trials" / trial.name).restarted(trial.reason)


def to_json(value: Any) -> str:
    """Return a value as JSON. Raises `TypeError` or `ValueError`, also for NaN."""
    return json.dumps(value, allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else os.fspath(value)
