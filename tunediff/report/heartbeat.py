"""Print what a search is doing when nothing else has been printed for a while."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tunediff.analysis.journals import Following
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.progress import DOING, log_exceptions

SILENCE_S = 60.0
"""Silent seconds until a line is printed."""
PARTS = {
    "setup": "preparing", "compile": "compiling", "train": "training",
    "evaluation": "evaluating", "checkpoint": "saving",
}  # fmt: skip


class Heartbeat:
    """Print progress lines from a background thread inside a `with` block.

    Call `beat` for every line that is printed otherwise; it restarts the wait.
    """

    def __init__(
        self, folder: Path, say: Callable[[str], None], display_name: Callable[[str], str] = str,
        limit_s: float | None = None,
    ) -> None:  # fmt: skip
        """Prepare the thread for a search in this folder. `say`: prints a line; `display_name`: of
        a trial; `limit_s`: after which it is ended."""
        self._folder, self._say, self._display_name = folder, say, display_name
        self._at_most = "" if limit_s is None else f" (at most {text.seconds(limit_s)})"
        self._over, self._last = threading.Event(), time.monotonic()
        self._following = Following(folder)
        # An interrupted search left trials without an end; they go on when their journals grow.
        self._interrupted = {name: stat.st_size for name, stat in self._unfinished().items()}

    def __enter__(self) -> Heartbeat:
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def beat(self) -> None:
        """Restart the wait, because a line was printed."""
        self._last = time.monotonic()

    def _run(self) -> None:
        while not self._over.wait(min(1.0, SILENCE_S / 4)):
            if time.monotonic() - self._last >= SILENCE_S:
                log_exceptions("what goes on", lambda: self._say(self.doing()))
                self.beat()

    def _unfinished(self) -> dict[str, os.stat_result]:
        self._following.read()
        running = [trial.name for trial in self._following.trials if trial.status is None]
        return {name: (self._folder / "trials" / name / record.JOURNAL).stat() for name in running}

    def doing(self) -> str:
        """Return what the newest running trial does.

        Example: `t0001 evaluating for 40s: sampling 64 images: 120 of 640 steps, about 35s left`.
        """
        journals = self._unfinished()
        running = [n for n, stat in journals.items() if stat.st_size != self._interrupted.get(n)]
        if not running:
            return f"starting the workers for {text.seconds(time.monotonic() - self._last)}"
        shown = self._display_name(name := running[-1])
        with contextlib.suppress(FileNotFoundError):
            progress = json.loads((self._folder / "trials" / name / DOING).read_text())
            spent, part = text.seconds(time.time() - progress["since"]), progress["part"]
            limit = self._at_most if part == "train" else ""
            work = f": {progress['work']}" if progress["work"] else ""
            return f"{shown} {PARTS[part]} for {spent}{limit}{work}"
        waited = text.seconds(time.time() - journals[name].st_mtime)
        return f"{shown} waits for its workers for {waited}: they start"
