"""Print what a search is doing when nothing else has been printed for a while."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tunediff.core import text
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
        # Trials of an interrupted search may have left such files; clocks of files lag a little.
        self._begun = time.time() - 1.0

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

    def doing(self) -> str:
        """Return what the trial does whose work was noted last.

        Example: `t0001 evaluating for 40s: sampling 64 images: 120 of 640 steps, about 35s left`.
        """
        files = (self._folder / "trials").glob(f"*/{DOING}")
        with contextlib.suppress(FileNotFoundError):  # of a trial that ends meanwhile
            noted = [(file.stat().st_mtime, file) for file in files]
            if noted and max(noted)[0] >= self._begun:
                file = max(noted)[1]
                progress = json.loads(file.read_text())
                spent, part = text.seconds(time.time() - progress["since"]), progress["part"]
                limit = self._at_most if part == "train" else ""
                work = f": {progress['work']}" if progress["work"] else ""
                name = self._display_name(file.parent.name)
                return f"{name} {PARTS[part]} for {spent}{limit}{work}"
        return f"starting the workers for {text.seconds(time.monotonic() - self._last)}"
