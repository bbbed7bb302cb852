"""Print what a search is doing when nothing else has been printed for a while."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tunediff.analysis.following import Following
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
        self._at_most = "" if limit_s is None else f" (at most {text.seconds(limit_s)})"
        self._folder, self._say, self._display_name = folder, say, display_name
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._last = time.monotonic()
        self._following = Following(folder)
        self._following.read()
        # An interrupted search left trials without an end; they go on when their journals grow.
        self._interrupted = {name: self._journal(name).st_size for name in self._unfinished()}

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def beat(self) -> None:
        """Restart the wait, because a line was printed."""
        self._last = time.monotonic()

    def _unfinished(self) -> list[str]:
        return [trial.name for trial in self._following.trials if trial.status is None]

    def _journal(self, name: str) -> os.stat_result:
        return (self._folder / "trials" / name / record.JOURNAL).stat()

    def _run(self) -> None:
        while not self._over.wait(min(1.0, SILENCE_S / 4)):
            if time.monotonic() - self._last >= SILENCE_S:
                log_exceptions("what goes on", self._print_progress)
                self.beat()

    def _print_progress(self) -> None:
        # A worker may replace or remove the files meanwhile; the next beat tries again.
        with contextlib.suppress(OSError):
            self._say(self.doing())

    def doing(self) -> str:
        """Return what the newest running trial does.

        Example: `t0001 evaluating for 40s: sampling 64 images: 120 of 640 steps, about 35s left`.
        """
        self._following.read()
        running = [
            name
            for name in self._unfinished()
            if self._journal(name).st_size != self._interrupted.get(name)
        ]
        if not running:
            return f"starting the workers for {text.seconds(time.monotonic() - self._last)}"
        name = running[-1]
        shown = self._display_name(name)
        with contextlib.suppress(FileNotFoundError):
            progress = json.loads((self._folder / "trials" / name / DOING).read_text())
            spent = text.seconds(time.time() - progress["since"])
            work = f": {progress['work']}" if progress["work"] else ""
            limit = self._at_most if progress["part"] == "train" else ""
            return f"{shown} {PARTS[progress['part']]} for {spent}{limit}{work}"
        waited = text.seconds(time.time() - self._journal(name).st_mtime)
        return f"{shown} waits for its workers for {waited}: they start"
