"""The functions that processes with torch are given by processes without: they import it there."""

from __future__ import annotations

from typing import Any


def prepare(workload: str) -> str:
    """See `prepared.prepare`."""
    from tunediff.training import prepared

    return prepared.prepare(workload)


def prepare_base(options: Any) -> None:
    """See `prepared.prepare_base`."""
    from tunediff.training import prepared

    prepared.prepare_base()


def before_run(folder: str) -> None:
    """See `prepared.before_run`."""
    from tunediff.training import prepared

    prepared.before_run(folder)
