"""Say whether an error is a fault of the disk that results are on. Such a fault says nothing about
a trial, so the trial has no end and goes on later.

A line fails in `Journal.write` (`core/journal.py`). In the process of a run `fault_behind` decides
whether an error is one (`training/outcome.py`); the run then writes no end, and
`tuning/worker.py` hands the error on. Its driver (`tuning/trial.py`) decides by `is_full` whether
more attempts are of use: if not, it writes `fault` with `kind: disk` into the journal and raises
the error. Where even that line finds no room, `unwritable` says so by trying. In a search on Ray
`ray_backend/searcher.py` finds the fault of such a trial again and raises it. In the end
`writing_to` (`tuning/rounds.py`) makes it the error that the user reads, `resumable`
(`tuning/experiment.py`) adds how to resume, and `guarded` (`cli.py`) exits with code 1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from tunediff.core.errors import Failure
from tunediff.core.files import naming_file
from tunediff.core.trial_record import CHECKPOINT, events

EDITED_MEANWHILE = errno.ETXTBSY
"""Of the error that the program of a trial was edited while it ran: no fault of the trial, too."""
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""Those that may be over the next time, such as those of NFS."""


def fault_behind(error: Exception, folder: Path) -> OSError | None:
    """Return the fault of the disk of a trial's folder that an error is, or that it hides.

    No end could be written either; and one would remove the checkpoint, which may be intact.
    """
    failure = Failure.of(error)
    if isinstance(error, OSError) and failure.path is not None:
        path = Path(failure.path)
        passing = error.errno in _PASSING and path.is_relative_to(folder)
        is_disk = passing or is_full(folder, failure) or path == folder / CHECKPOINT
        return error if is_disk else None
    # Not everything that fails to write a file says so by its class, or names the file
    if (fault := unwritable(folder)) is not None:
        fault.__cause__ = error
    return fault


def is_full(folder: Path, failure: Failure) -> bool:
    """Return whether an error is that the disk of a folder is full or cannot be written to, or is
    `EDITED_MEANWHILE`."""
    if failure.errno == EDITED_MEANWHILE:
        return True
    if failure.errno not in _LASTING or failure.path is None:
        return False
    file = Path(failure.path).absolute()
    with contextlib.suppress(OSError):
        nearest = next(parent for parent in (file, *file.parents) if parent.exists())
        return nearest.stat().st_dev == folder.stat().st_dev
    return True


def unwritable(folder: Path) -> OSError | None:
    """Return why the folder cannot be written to, or None. Under 8 MiB of space is full."""
    try:
        # without a name, so that nothing of it stays
        with naming_file(folder / "probe"), tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(8 * 2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def recorded_fault(folder: Path) -> OSError | None:
    """Return why results could not be written, if that is the journal's last line; else None."""
    last = next(reversed(list(events(folder))), None)
    if last is None or (last["event"], last.get("kind")) != ("fault", "disk"):
        return None
    return Failure(last["message"], last["error"], last["errno"], last["path"]).system_error
