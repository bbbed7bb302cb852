"""Copy a search to its address while it runs: `--storage s3://bucket/prefix`, in a process of its
own.

Journals are copied at every point, other files as they appear; `tunediff.core.remote` does it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tunediff.core import files, remote
from tunediff.core.remote_lock import LostLockError, StorageLock
from tunediff.core.trial_record import JOURNAL
from tunediff.integrations import companion
from tunediff.integrations.companion import Attempts, Companion, Facts, Say


@dataclasses.dataclass(frozen=True)
class CopyFacts(Facts):
    """What the process that copies is told of the search."""

    token: str
    """Of the lock that the search has taken."""


@contextlib.contextmanager
def copied(
    folder: Path,
    say: Say,
    again: str,
    force: bool | None = None,
    fetch: Callable[[], object] = lambda: None,
) -> Iterator[Companion | None]:
    """Copy what runs in `folder`, where its storage has an address, under the lock of that.

    `again`: the command that copies what is left; `force`: see `StorageLock.take`; `fetch`: called
    under the lock, before anything is copied, to fetch what another machine has written since this
    one read. Raises `ConfigError` if another machine runs it, and what `fetch` raises.
    """
    if (address := files.address_of(folder.parent)) is None:
        yield None
        return
    unfinished = f"not everything is copied; it is in {folder}, and this copies it: {again}"
    lock = StorageLock(folder)
    lock.take(force)
    try:
        fetch()
    except BaseException:
        lock.release()
        raise
    facts, output = CopyFacts(folder, lock.token, patience_s=600.0), Path(os.devnull)
    process = Companion(__name__, facts, output, say, f"--storage {address}", unfinished)
    try:
        yield process
    finally:
        process.close()


class Copier:
    """Copies what has changed, from the first trial on: until then a failed start leaves
    nothing."""

    def __init__(self, facts: CopyFacts, say: Say) -> None:
        self._folder, self._lock = facts.folder, StorageLock(facts.folder, facts.token)
        option = f"--storage {files.address_of(facts.folder.parent)}"
        self._attempts = Attempts(
            option, "the search goes on, and is copied later", say, facts.late_s
        )
        self._say, self._option, self._lost = say, option, False

    def keep_lock(self) -> None:
        """Keep the lock fresh while files are copied: one upload may take longer than a lock stays
        fresh."""
        self._lock.keep(self._note_lost)

    def sync(self, last: bool = False) -> bool:
        """Copy; return whether everything is copied."""
        return (
            not self._lost
            and self._attempts.attempt(lambda: self._copy(last), last)
            and not self._lost
        )

    def _note_lost(self, error: LostLockError) -> None:
        """Say once that another machine runs it, also where a failure of the service was said
        before."""
        if not self._lost:
            self._lost = True
            self._say(f"{self._option}: {error}")

    def _copy(self, last: bool) -> None:
        try:
            self._lock.refresh()
            if any(self._folder.glob(f"trials/*/{JOURNAL}")) or (self._folder / JOURNAL).exists():
                # The machine may be suspended between two files.
                remote.push(self._folder, last, self._lock.refresh)
        except LostLockError as error:
            self._note_lost(error)
            return
        if last:
            self._lock.release()


def main() -> None:
    """Copy the folder of the argument until stdin ends; exit with 0 if all was copied."""
    say = companion.begin()
    facts = CopyFacts.of(sys.argv[1])
    copier = Copier(facts, say)
    copier.keep_lock()
    companion.follow(lambda _, last: copier.sync(last), facts.patience_s)


if __name__ == "__main__":
    main()
