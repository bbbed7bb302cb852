"""Copy a search to its address, `--storage s3://bucket/prefix`, while it runs.

Journals are copied at every point, other files as they appear; `tunediff.core.remote` does it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tunediff.core import files, remote
from tunediff.core.listeners import Activity, Listener, Say
from tunediff.core.remote_lock import LostLockError, StorageLock
from tunediff.core.trial_record import JOURNAL
from tunediff.integrations.companion import Attempts, Companion, Facts, follow


def listeners(activity: Activity) -> Iterator[Listener]:
    """Yield what copies an activity whose storage has an address."""
    if activity.token is None:
        return
    folder = activity.folder
    option = f"--storage {files.address_of(folder.parent)}"
    facts = Facts(folder, option, patience_s=600.0, token=activity.token)
    left = f"not everything is copied; it is in {folder}, and this copies it: {activity.resume}"
    yield Companion(__name__, facts, Path(os.devnull), left)


class Copier:
    """Copies changes from the first trial on: a start that fails leaves nothing."""

    def __init__(self, facts: Facts, say: Say) -> None:
        self._facts, self._say, self._lost = facts, say, False
        self._lock = StorageLock(facts.folder, facts.token)
        self._attempts = Attempts(facts, "the search goes on, and is copied later", say)

    def sync(self, _: str = "", last: bool = False) -> bool:
        """Copy; return whether everything is copied."""
        if self._lost:
            return False
        complete = self._attempts.attempt(lambda: self._copy(last), last)
        return complete and not self._lost

    def _copy(self, last: bool) -> None:
        folder = self._facts.folder
        try:
            self._lock.refresh()
            if any(folder.glob(f"trials/*/{JOURNAL}")) or (folder / JOURNAL).exists():
                # The machine may be suspended between two files.
                remote.push(folder, last, self._lock.refresh)
            if last:  # the search may have been killed
                self._lock.release()
        except LostLockError as error:
            # Said also where a failure of the service was said before.
            self._lost = True
            self._say(f"{self._facts.option}: {error}; nothing is copied from here any more")


if __name__ == "__main__":
    follow(lambda facts, say: Copier(facts, say).sync)
