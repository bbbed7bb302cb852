"""Run any program as a training: parameters by its command line, metrics from what it prints.

To import it registers commands as workloads; what it imports itself comes with the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tunediff.config import Lines, Workload, workload
from tunediff.core.point import Point
from tunediff.core.trial_record import End


def _workload(path: Path, where: str) -> Workload:
    from tunediff.command.workload import of_file

    return of_file(path, where)


def _search_file(content: Lines, source: str, folder: Path) -> Lines:
    from tunediff.command.search import translated

    return translated(content, source, folder)


def _run(
    config: Any, folder: Path, budget_s: float | None, threads: int, stopped: Callable[[], bool]
) -> Iterator[Point | End]:
    from tunediff.command.trial import run, run_of

    return run(run_of(config, folder, budget_s, threads), stopped)


workload.commands = workload.Commands(_workload, _search_file, _run)
