"""Copy a search to its address, `--storage s3://bucket/prefix`, while it runs."""

from __future__ import annotations

from collections.abc import Iterator

from tunediff.core import files, remote
from tunediff.core.listeners import Activity, Listener
from tunediff.core.trial_record import JOURNAL
from tunediff.integrations.background import Background

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
            remote.push_run(self._folder, last)
