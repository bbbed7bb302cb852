"""Try a command before a comparison or a search spends hours on it."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tunediff.command.metrics import MetricPattern
from tunediff.command.process import LOG
from tunediff.command.run import Clocked, CommandRun, Note, execute
from tunediff.config.knobs import ConfigError
from tunediff.core import text
from tunediff.core.clock import OUTCOME_FINAL, PROCESS
from tunediff.core.point import Point
from tunediff.core.progress import announced
from tunediff.core.trial_record import End

OTHER_SEEDS = (7919, 104_729, 611_953, 746_773)
"""Distances to seeds that no run of a comparison or a search has. A second one is tried where the
first printed the baseline's value, and so on: a metric with few digits repeats itself by chance."""
PATIENCE_S = 600.0
"""Seconds after which a command without any value is given up, where its budget is longer."""
MOST_START_UP = 0.1
"""Share of the budget up to which start-up inside it is not worth a word."""
MOST_FILES = 10_000
"""Files of a folder at most that are looked at for what a run has written."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """What the check has found."""

    first_value_s: float
    """Seconds from the start of the command to its first value."""
    seed_varies: bool
    """Whether one seed gave two first values."""
    without_effect: list[str]
    """Parameters whose ends have the first value of the baseline."""
    failing: list[str]
    """Values at which the command fails, with the reason."""
    written: list[str]
    """Files outside the folder of a run that it wrote."""
    clock: str
    budget_s: float | None = None

    def tell(self, say: Callable[[str], None], label: str = "") -> None:
        """Say what was measured, and what the user ought to know; `label` begins each line."""
        after = f"its first value after {self.first_value_s:.1f} s"
        say(f"{label}{after}; the clock is that of: {self.clock}")
        for warning in self._warnings():
            say(f"WARNING: {label}{warning}")

    def _warnings(self) -> Iterator[str]:
        budget_s = self.budget_s or math.inf
        if self.clock == PROCESS and self.first_value_s > MOST_START_UP * budget_s:
            yield (
                f"the first value comes after {self.first_value_s:.1f} s of a budget of"
                f" {budget_s:g} s: start-up counts unless the command prints TUNEDIFF start"
            )
        if self.seed_varies:
            yield "one seed gave two first values: what {seed} does not determine is noise"
        yield from self.failing
        for name in self.without_effect:
            yield f"{name}: its ends print the same first value as the baseline: has it an effect?"
        if self.written:
            listed = ", ".join(self.written[:5]) + (" …" if len(self.written) > 5 else "")
            yield f"written outside {{folder}}: {listed}; runs may overwrite each other's files"


def check(
    run: CommandRun, ends: Mapping[str, Sequence[Any]], say: Callable[[str], None]
) -> Checked:
    """Run the baseline to its first value, once more, and on another seed; then the ends.

    `ends`: for each parameter that is varied, values that it may take. Raises `ConfigError` for a
    command that fails, prints no value within its budget, or whose seed has no effect.
    """
    with tempfile.TemporaryDirectory(prefix="tunediff-check-") as scratch:
        attempt = _Attempts(run, Path(scratch))
        before, begun = _listing(Path(run.definition.folder)), time.time()
        with _waiting(run, attempt.limit_s, Path(scratch), say):
            first = attempt(run)
        written = _written(before, begun, Path(run.definition.folder))
        again = attempt(run)
        clock = PROCESS if first.clock is None else first.clock.kind
        budget_s = None if run.definition.outcome == "final" else run.budget_s
        _check_budget(clock, budget_s, min(first.first_s, again.first_s))
        deterministic = first.value == again.value
        has_seed = "seed" in run.definition.template.names
        if deterministic and has_seed:
            _check_seed(attempt, run, first)
        idle = [
            name
            for name, values in ends.items()
            if _has_no_effect(attempt, run, name, values, first)
        ]
    idle = idle if deterministic else []
    varies = has_seed and not deterministic
    return Checked(first.first_s, varies, idle, attempt.failures, written, clock, budget_s)


def _check_budget(clock: str, budget_s: float | None, first_s: float) -> None:
    """Raise `ConfigError` if a run is over before its first value."""
    if clock == PROCESS and budget_s is not None and first_s > budget_s:
        raise ConfigError(
            f"command: budget: {budget_s:g} s is not allowed: the first value comes after"
            f" {first_s:.1f} s; allowed: more, or {OUTCOME_FINAL}"
        )


def _check_seed(attempt: _Attempts, run: CommandRun, first: _Tried) -> None:
    """Raise `ConfigError` if every other seed prints the same first value."""
    for distance in OTHER_SEEDS:
        other = attempt(dataclasses.replace(run, seed=run.seed + distance))
        if other.value != first.value:
            return
    seeds = ", ".join(str(run.seed + distance) for distance in OTHER_SEEDS)
    raise ConfigError(
        f"command: {{seed}}: {run.seed}, {seeds} print the same first value, {first.value}: the"
        " seed has no effect; allowed: a command that uses it, or one without it and --same-seed"
    )


@dataclasses.dataclass(frozen=True)
class _Tried:
    value: float
    first_s: float
    clock: Clocked | None


def _waiting(
    run: CommandRun, limit_s: float, scratch: Path, say: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Say what the check waits for, until when if the judge's clock ends it, what is printed."""
    definition, log = run.definition, scratch / "0" / LOG
    is_timed = definition.outcome != "final" and definition.time is None
    most = f" at most {text.seconds(limit_s)}" if is_timed else ""
    what = f"checking the command: waiting{most} for values of {definition.objective}"
    return announced(what, say, lambda: MetricPattern.named_in(log, definition.objective))


class _Attempts:
    """Runs configurations to their first value, each in a folder of its own."""

    def __init__(self, run: CommandRun, scratch: Path) -> None:
        self._scratch, self._count = scratch, 0
        self.failures: list[str] = []
        """What ends of parameters have failed with."""
        self.limit_s = PATIENCE_S if run.budget_s is None else max(PATIENCE_S, 2 * run.budget_s)

    def __call__(self, run: CommandRun) -> _Tried:
        folder, self._count = self._scratch / str(self._count), self._count + 1
        trial = dataclasses.replace(
            run,
            folder=folder,
            ends_at_first=True,
            budget_s=self.limit_s,
        )
        point: Point | None = None
        end: End | None = None
        begun = time.monotonic()
        notes: list[Note] = []
        for event in execute(trial, note=notes.append):
            if isinstance(event, End):
                end = event
            elif point is None:
                point = event
        clock = next((event for event in notes if isinstance(event, Clocked)), None)
        if point is None or end is None or end.status in ("error", "oom"):
            reason = end.reason if end is not None else "it printed nothing"
            reason = reason.replace(f" ({folder / LOG})", "")  # the folder goes with the check
            values = " ".join(f"{name}={value}" for name, value in run.values.items())
            raise ConfigError(f"command: with {values or 'no parameters'}: {reason}")
        first_s = clock.start_up_s if clock is not None else time.monotonic() - begun
        return _Tried(float(point[run.definition.objective]), first_s, clock)


def _has_no_effect(
    attempt: _Attempts, run: CommandRun, name: str, values: Sequence[Any], first: _Tried
) -> bool:
    """Return whether all of these values of a parameter print the baseline's first value.

    One at which the command fails has an effect; it may be the end of a range, and is noted.
    """
    for value in (others := [value for value in values if value != run.values[name]]):
        try:
            tried = attempt(dataclasses.replace(run, values={**run.values, name: value}))
        except ConfigError as error:
            attempt.failures.append(str(error).partition(": ")[2])
            return False
        if tried.value != first.value:
            return False
    return bool(others)


def _listing(folder: Path) -> set[str]:
    return {str(path) for path, _ in _files(folder)}


def _files(folder: Path) -> Iterator[tuple[Path, float]]:
    seen = 0
    for root, folders, names in os.walk(folder):
        hidden = (name for name in folders if name.startswith(".") or name == "__pycache__")
        folders[:] = sorted(set(folders) - set(hidden) - {"ray_results"})
        for name in names:
            seen += 1
            if seen > MOST_FILES:
                return
            path = Path(root) / name
            try:
                yield path, path.stat().st_mtime
            except OSError:
                continue


def _written(before: set[str], begun: float, folder: Path) -> list[str]:
    """Return the files in a folder that are new or were written since."""
    found = (path for path, when in _files(folder) if str(path) not in before or when > begun)
    return sorted(str(path.relative_to(folder)) for path in found)
