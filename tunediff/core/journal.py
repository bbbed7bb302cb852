"""Write the journal of a trial: an append-only file of JSON lines.

Every line is written, flushed and synced before anything else learns of it, so a kill at any moment loses nothing that
was measured. `tunediff.core.trial_record` lists the events and reads them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import Configuration, Values
from tunediff.core import environment
from tunediff.core.clock import UnitName
from tunediff.core.point import Point
from tunediff.core.trial_record import JOURNAL, RESTARTED, End, events


class Journal:
    """Appends to the journal of one trial; every line is on disk before a method returns. Raises `OSError` when the
    disk is full."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / JOURNAL

    def start(
        self, config: Configuration, drawn: Values, budget_s: float | None, number: int = 0, unit: UnitName = "wall"
    ) -> None:
        """An attempt begins; `budget_s`: training seconds of the trial itself."""
        self.write(
            "start", name=self.folder.name, number=number, config=cfg.flat(config), drawn=drawn, budget_s=budget_s,
            unit=unit, fingerprint=cfg.fingerprint(config), environment=environment.describe(), pid=os.getpid(),
        )  # fmt: skip

    def point(self, point: Point) -> bool:
        """An evaluation; False if this very measurement is there already, not merely another one of the same index."""
        told: set[tuple[int, int]] = set()
        for line in events(self.folder):
            if line["event"] in RESTARTED:
                told.clear()
            elif line["event"] == "point":
                told.add((line["index"], line["steps"]))
        if (point.index, point.steps) in told:
            return False
        self.write("point", **point.flat)
        return True

    def restarted(self, reason: str = "") -> bool:
        """The training begins at its first step: what an earlier attempt has measured is void.

        `reason`: why its checkpoint is of no use. Returns False for a first start, of which nothing is written.
        """
        again = bool(reason) or any(line["event"] == "point" for line in events(self.folder))
        if again:
            self.write("restarted", reason=reason or "no checkpoint")
        return again

    def end(self, end: End) -> None:
        """The trial is over."""
        self.write("end", **dataclasses.asdict(end))

    def write(self, event: str, **content: Any) -> None:
        """Append one line."""
        line = to_json({"event": event, "time": time.time(), **content}) + "\n"
        with open(self.path, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line  # a kill tore the last line: it ends here
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def to_json(value: Any) -> str:
    """Return a value as a journal has it. Raises `TypeError` or `ValueError` for what JSON cannot hold, NaN too."""
    return json.dumps(value, allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} cannot be written to a journal")
