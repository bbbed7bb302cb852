"""Find how many steps a command makes within its budget, by runs that do not count.

A schedule by steps (a learning rate that decays to zero, say) is cut where it is still high if the
budget ends a run early. A command that names `{steps}` is given as many as end at the budget: this
very configuration runs a few of them, then more, and the seconds of the last two runs give the
seconds of a step and what every run costs besides.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from tunediff.command.run import CommandRun, execute
from tunediff.config.knobs import ConfigError
from tunediff.core.files import write_text
from tunediff.core.trial_record import End

FIRST_STEPS = 16
GROWTH = 4.0
"""Factor between the steps of two of these runs, at most; at least its inverse."""
ENOUGH = 0.2
"""Share of the budget that the longest of these runs takes at least."""
AIM = 0.95
"""Share of the budget at which the real run is to end."""


def steps(run: CommandRun, file: Path) -> int:
    """Return the steps of a run that ends at its budget; measured once, and kept in `file`.

    Raises `ConfigError` for a command that fails with so many steps, or without a budget.
    """
    if run.budget_s is None:
        raise ConfigError("command: {steps}: needs a budget")
    if file.is_file():
        return int(json.loads(file.read_text())["steps"])
    measured: list[tuple[int, float]] = []
    count = FIRST_STEPS
    while len(measured) < 2 or max(seconds for _, seconds in measured) < ENOUGH * run.budget_s:
        seconds = seconds_of(run, count)
        measured.append((count, seconds))
        factor = min(GROWTH, max(1 / GROWTH, 0.5 * run.budget_s / max(seconds, 1e-9)))
        count = max(1, round(count * factor))
        count += count in dict(measured)
    result = extrapolated(measured, run.budget_s)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps({"steps": result, "measured": measured}))
    return result


def extrapolated(measured: list[tuple[int, float]], budget_s: float) -> int:
    """Return the steps after which the budget is nearly spent, of (steps, seconds) of runs."""
    (few, few_s), (many, many_s) = sorted(measured)[-2:]
    step_s = (many_s - few_s) / (many - few)
    if step_s <= 0:  # more steps took no longer: all of the time is something else
        return many
    return max(1, round(many + (AIM * budget_s - many_s) / step_s))


def seconds_of(run: CommandRun, count: int) -> float:
    """Return the seconds of a run of so many steps, by the clock of the real one."""
    folder = run.folder / f"calibration-{count}"
    limit = dataclasses.replace(run, folder=folder, steps=count, ends_itself=True)
    begun = time.monotonic()
    end: End | None = None
    for event in execute(limit):
        if isinstance(event, End):
            end = event
    assert end is not None
    if end.status not in ("ok", "nan"):
        raise ConfigError(f"command: {{steps}}: {count} steps: {end.reason}")
    return float(end.seconds.get("train", time.monotonic() - begun))
