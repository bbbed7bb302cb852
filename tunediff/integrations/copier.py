"""Copy a search to its address while it runs: `--storage s3://bucket/prefix`, in a process of its own.

Journals are copied at every point, other files as they appear; `tunediff.core.remote` does it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tunediff.core import remote
from tunediff.core.trial_record import JOURNAL
from tunediff.integrations import companion
from tunediff.integrations.companion import Attempts, Companion, Facts, Say


@contextlib.contextmanager
def copied(folder: Path, say: Say, again: str) -> Iterator[Companion | None]:
    """Copy what runs in `folder`, where its storage has an address; `again`: the command that copies what is left."""
    if (address := remote.address_of(folder.parent)) is None:
        yield None
        return
    unfinished = f"not everything is copied; it is in {folder}, and this copies it: {again}"
    facts, output = Facts(folder, patience_s=600.0), Path(os.devnull)
    process = Companion(__name__, facts, output, say, f"--storage {address}", unfinished)
    try:
        yield process
    finally:
        process.close()


class Copier:
    """Copies what has changed, from the first trial on: until then a failed start leaves nothing."""

    def __init__(self, facts: Facts, say: Say) -> None:
        self._folder = facts.folder
        option = f"--storage {remote.address_of(facts.folder.parent)}"
        self._attempts = Attempts(option, "the search goes on, and is copied later", say, facts.late_s)

    def sync(self, last: bool = False) -> bool:
        """Copy; return whether everything is copied."""
        if not any(self._folder.glob(f"trials/*/{JOURNAL}")) and not (self._folder / JOURNAL).exists():
            return True
        return self._attempts.attempt(lambda: remote.push(self._folder, last), last)


def main() -> None:
    """Copy the folder of the argument until stdin ends; exit with 0 if all was copied."""
    say = companion.begin()
    facts = Facts.of(sys.argv[1])
    copier = Copier(facts, say)
    companion.follow(lambda _, last: copier.sync(last), facts.patience_s)


if __name__ == "__main__":
    main()
