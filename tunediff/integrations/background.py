"""Sends what is in a search's folder elsewhere, in a thread that nothing waits for: to its address,
`--storage s3://bucket/prefix`, or by `tracking` to a service."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tunediff.core import files, remote
from tunediff.core.listeners import Activity, Listener, Say
from tunediff.core.trial_record import JOURNAL

log = logging.getLogger(__name__)

RETRY_S = 15.0
"""Seconds until a service that failed is tried again."""
SILENT_S = 5.0
"""Seconds at the end of the search after which the user is told what it waits for."""


class Background(Listener):
    """Calls `send` again and again until the search ends, and once more then."""

    def __init__(self, option: str, resume: str, every_s: float, patience_s: float) -> None:
        """`option`: what the user gave, such as `--track wandb`: it begins every message;
        `resume`: the command that sends the rest; `patience_s`: seconds for it at the end."""
        self._option, self._resume = option, resume
        self._every_s, self._patience_s = every_s, patience_s
        self._result: Mapping[str, Any] | None = None
        self._ended = threading.Event()
        self._failed = self._spoken = False

    def send(self, last: bool) -> None:
        """Send what is new; `last`: the search is over. Raises what the service raises."""
        raise NotImplementedError

    def search_begin(self, say: Say) -> None:
        self._say = say
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def search_end(self, result: Callable[[], Mapping[str, Any]] | None) -> None:
        """Send the rest, for a while; say where something is left."""
        self._result = None if result is None else result()
        self._ended.set()
        self._thread.join(SILENT_S)
        if self._thread.is_alive():
            self._say(f"{self._option}: sending the rest; Ctrl-C leaves it for later")
            self._thread.join(self._patience_s)
        if self._thread.is_alive() or self._failed:
            self._say(f"{self._option}: not everything was sent; this sends it: {self._resume}")

    def _work(self) -> None:
        while not self._ended.wait(RETRY_S if self._failed else self._every_s):
            self._attempt(last=False)
        self._attempt(last=True)

    def _attempt(self, last: bool) -> None:
        try:
            self.send(last)
            self._failed = False
        except Exception as error:
            self._failed = True
            log.debug("the service's error", exc_info=True)
            if not self._spoken:
                self._spoken = True
                # An address may hold a password.
                why = re.sub(r"://[^/@\s]+@", "://", " ".join(str(error).split()))[:200]
                why = f"{type(error).__name__}: {why}"
                self._say(f"{self._option}: {why}; the search goes on, and is sent later")


# ---- to an address
EVERY_S, PATIENCE_S = 30.0, 600.0
"""Seconds between two copies; seconds for the last one at the end of the search."""


def listeners(activity: Activity) -> Iterator[Listener]:
    """Yield what copies an activity whose storage has an address."""
    if files.address_of(activity.folder.parent) is not None:
        yield Copier(activity)


class Copier(Background):
    """Copies what is new from the first trial on: a start that fails leaves nothing."""

    def __init__(self, activity: Activity) -> None:
        self._folder = activity.folder
        option = f"--storage {files.address_of(self._folder.parent)}"
        super().__init__(option, activity.resume, EVERY_S, PATIENCE_S)

    def send(self, last: bool) -> None:
        if any(self._folder.glob(f"trials/*/{JOURNAL}")) or (self._folder / JOURNAL).exists():
            remote.push_run(self._folder)
