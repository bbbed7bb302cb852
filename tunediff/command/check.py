"""Try a command before a comparison or a search spends hours on it."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tunediff.command.process import LOG
from tunediff.command.run import CommandRun, execute
from tunediff.config.knobs import ConfigError
from tunediff.core import text
from tunediff.core.clock import OUTCOME_FINAL, PROCESS
from tunediff.core.outcomes import Status
from tunediff.core.point import Point
from tunediff.core.trial_record import End

OTHER_SEEDS = (7919, 104_729, 611_953, 746_773)
"""Distances to seeds that no run of a comparison or a search has. A second one is tried where the
first printed the same value, and so on: a metric with few digits repeats itself by chance."""
PATIENCE_S = 600.0
"""Seconds after which a command without any value is given up, where its budget is longer."""
MOST_START_UP = 0.1
"""Share of the budget up to which start-up inside it is not worth a word."""
MOST_FILES = 10_000
"""Files of a folder at most that are looked at for what a run has written."""


def check(run: CommandRun, say: Callable[[str], None]) -> None:
    """Run a command to its first value, once more on another seed, and say what that showed.

    Raises `ConfigError` for a command that fails, prints no value within its budget, or whose seed
    has no effect.
    """
    definition = run.definition
    with tempfile.TemporaryDirectory(prefix="tunediff-check-") as scratch:
        is_timed = definition.outcome != "final" and definition.time is None
        most = f" at most {text.seconds(_limit_s(run))}" if is_timed else ""
        say(f"checking the command: waiting{most} for values of {definition.objective}")
        first, clock = _attempt(run, scratch, 1)
        if "seed" in definition.template.names:
            _check_seed(run, scratch, first)
    first_s, kind = float(clock["start_up_s"]), clock["kind"]
    say(f"its first value after {first_s:.1f} s; the clock is that of: {kind}")
    if kind == PROCESS and definition.outcome != "final" and run.budget_s is not None:
        if first_s > run.budget_s:
            raise ConfigError(
                f"command: budget: {run.budget_s:g} s is not allowed: the first value comes after"
                f" {first_s:.1f} s; allowed: more, or {OUTCOME_FINAL}"
            )
        if first_s > MOST_START_UP * run.budget_s:
            say(
                f"WARNING: the first value comes after {first_s:.1f} s of a budget of"
                f" {run.budget_s:g} s: start-up counts unless the command prints TUNEDIFF start"
            )


def _check_seed(run: CommandRun, scratch: str, first: float) -> None:
    """Raise `ConfigError` if every other seed prints the same values.

    The first value may come before any training: where all are equal, the second one decides.
    """
    seeds = [run.seed + distance for distance in OTHER_SEEDS]
    for values in (1, 2):
        if values > 1:
            first, _ = _attempt(run, scratch, values)
        others = (dataclasses.replace(run, seed=seed) for seed in seeds)
        if any(_attempt(other, scratch, values)[0] != first for other in others):
            return
    raise ConfigError(
        f"command: {{seed}}: {run.seed}, {', '.join(map(str, seeds))} print the same first two"
        f" values, the last of them {first}: the seed has no effect; allowed: a command that uses"
        " it, or one without it and --unseeded"
    )


def _limit_s(run: CommandRun) -> float:
    return max(PATIENCE_S, 2 * (run.budget_s or 0.0))


def _attempt(run: CommandRun, scratch: str, values: int) -> tuple[float, dict[str, Any]]:
    """Run a command to one of its first values, in a folder of its own; return the last of so many
    values, and which seconds counted. Raises `ConfigError` where it fails."""
    trial = dataclasses.replace(
        run,
        folder=(folder := Path(tempfile.mkdtemp(dir=scratch))),
        enough=values,
        budget_s=_limit_s(run),
        timeout_s=run.definition.timeout,
    )
    notes: list[dict[str, Any]] = []
    *points, end = execute(trial, note=lambda event, **lines: notes.append(lines))
    assert isinstance(end, End)
    if not points or end.status in (Status.ERROR, Status.OOM, Status.TIMEOUT):
        reason = end.reason.replace(f" ({folder / LOG})", "")  # the folder goes with the check
        words = " ".join(f"{name}={value}" for name, value in run.values.items())
        raise ConfigError(f"command: with {words or 'no parameters'}: {reason}")
    assert isinstance(points[-1], Point)
    return float(points[-1][run.definition.objective]), notes[-1]


class WrittenFiles:
    """Finds what runs write in their working folder, which others may overwrite."""

    def __init__(self, folder: Path, *without: Path) -> None:
        """Look at the folder before a run. `without`: folders that are not looked at."""
        self._folder, self._without = folder.absolute(), [path.absolute() for path in without]
        self._before, self._begun = {path for path, _ in self._files()}, time.time()

    def names(self) -> list[str]:
        """Return the files that are new or were written since, but for our own output."""
        own = {(status.st_dev, status.st_ino) for status in map(os.fstat, (1, 2))}
        return sorted(
            str(path.relative_to(self._folder))
            for path, status in self._files()
            if (path not in self._before or status.st_mtime > self._begun)
            and (status.st_dev, status.st_ino) not in own
        )

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        seen = 0
        for root, folders, names in os.walk(self._folder):
            folders[:] = [
                name
                for name in sorted(folders)
                if name not in ("__pycache__", "ray_results")
                and not name.startswith(".")
                and Path(root, name) not in self._without
            ]
            for name in names:
                seen += 1
                if seen > MOST_FILES:
                    return
                try:
                    yield Path(root, name), Path(root, name).stat()
                except OSError:
                    continue


def shared(names: list[str]) -> str:
    """Return that files were written outside of the folder of a run."""
    return f"written outside {{folder}}: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
