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

SILENCE_S = 30.0
"""Seconds without output after which a line is printed; the interval then grows up to five
minutes."""
PARTS = {"setup": "preparing", "compile": "compiling", "train": "training", "evaluation": "evaluating",
         "checkpoint": "saving", "waiting": "waits for its workers"}  # fmt: skip


class Heartbeat:
    """Print progress lines from a background thread inside a `with` block.

    Call `beat` for every line that is printed otherwise; it restarts the wait.
    """

    def __init__(
        self, folder: Path, say: Callable[[str], None], called: Callable[[str], str] = str
    ) -> None:
        """Prepare the thread for a search.

        folder: of the search. say: prints a line. called: turns the name of a trial into its
        display name.
        """
        self._folder, self._say, self._called, self._over = folder, say, called, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
        self._requested = self._last = time.monotonic()
        self._following = Following(folder)
        self._following.read()
        self._patience, self._before = SILENCE_S, self._following.ended
        # An interrupted search left trials without an end; they go on when their journals grow.
        self._left = {trial.name: self._journal(trial.name).st_size for trial in self._unfinished()}

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def beat(self) -> None:
        """Restart the wait, because a line was printed."""
        self._last, self._patience = time.monotonic(), SILENCE_S

    def workers_requested(self) -> None:
        """Count from here how long workers take to start."""
        self._requested = time.monotonic()

    def _unfinished(self) -> list[record.TrialRecord]:
        return [trial for trial in self._following.trials if trial.status is None]

    def _journal(self, name: str) -> os.stat_result:
        return (self._folder / "trials" / name / record.JOURNAL).stat()

    def _beat(self) -> None:
        while not self._over.wait(min(1.0, SILENCE_S / 4)):
            if time.monotonic() - self._last < self._patience:
                continue
            patience = min(1.5 * self._patience, 300.0)
            log_exceptions("what goes on", self._print_progress)
            self._last, self._patience = time.monotonic(), patience

    def _print_progress(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # a worker replaces or removes the files meanwhile; the next beat retries
            self._say(self.doing())

    def doing(self) -> str:
        """Return what the newest running trial does.

        Example: `t0001 evaluating for 40s: sampling 64 images: 120 of 640 steps, about 35s left`.
        """
        self._following.read()
        running = [
            trial
            for trial in self._unfinished()
            if self._journal(trial.name).st_size != self._left.get(trial.name)
        ]
        if not running and (ended := self._following.ended - self._before):
            return f"{text.pluralize(ended, 'run')} ended, none is under way"
        if not running:
            return f"starting the workers for {text.seconds(time.monotonic() - self._requested)}"
        name, called = running[-1].name, self._called(running[-1].name)
        with contextlib.suppress(FileNotFoundError):
            progress = json.loads((self._folder / "trials" / name / DOING).read_text())
            work = f": {progress['work']}" if progress["work"] else ""
            return (
                f"{called} {PARTS[progress['part']]} for"
                f" {text.seconds(time.time() - progress['since'])}{work}"
            )
        begun = self._journal(name).st_mtime
        return f"{called} waits for its workers for {text.seconds(time.time() - begun)}: they start"
