"""The process of a profile, which `profile_run` starts."""

from __future__ import annotations

from typing import Any

from tunediff import config as cfg
from tunediff.api.profile_run import ProfileRequest
from tunediff.config import code
from tunediff.core.errors import TunediffError, UserCodeError
from tunediff.core.outcomes import Status
from tunediff.core.progress import EventLines
from tunediff.profiling import run
from tunediff.training.run_trial import end_of


def measure(request: ProfileRequest, lines: EventLines) -> dict[str, Any]:
    """Measure everything. Raises `TunediffError` for no memory and for errors of a user's file."""
    config = request.config
    try:
        return run.profile(
            config,
            request.folder,
            lines.aside.say,
            name=request.name,
            command=request.command,
            workers=request.workers,
            steps=request.steps,
        )
    except Exception as error:
        if end_of(error).status == Status.OOM:
            batch = config.loader.batch_size
            raise TunediffError(f"out of memory with a batch of {batch}: {error}") from error
        if cfg.of(config).file is not None and not isinstance(error, TunediffError):
            raise UserCodeError(code.trace(error).rstrip("\n")) from error  # the user's lines
        raise
