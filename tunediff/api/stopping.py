"""Say how to go on with what was interrupted or had to stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tunediff import cli
from tunediff.tuning import experiment
from tunediff.tuning.sessions import StoppedError


@contextlib.contextmanager
def resumable(module: str, folder: Path, options: cli.MachineOptions) -> Iterator[None]:
    """Give a `KeyboardInterrupt` or `StoppedError` from inside the message that says how to resume what ran.

    `module`: the command that resumes; `options`: the machine or cluster that was chosen.
    """
    try:
        yield
    except (KeyboardInterrupt, StoppedError) as error:
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StoppedError
        raise kind(experiment.why_stopped(error, module, folder, cli.machine_words(options))) from error
