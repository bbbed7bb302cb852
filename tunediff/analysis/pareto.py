"""Find the trade-offs of a search: trials that no other trial beats in two quantities at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from tunediff.analysis import RATE, Results, last
from tunediff.analysis.speed import rate
from tunediff.core import text
from tunediff.core.trial_record import TrialRecord


def front(pairs: Sequence[tuple[float, float]]) -> list[bool]:
    """Return for each pair whether no other pair is at most as large in both and smaller in one."""
    on, least = [False] * len(pairs), math.inf
    before: tuple[float, float] | None = None
    for place in sorted(range(len(pairs)), key=lambda place: pairs[place]):
        on[place] = pairs[place][1] < least or pairs[place] == before
        if pairs[place][1] < least:
            least, before = pairs[place][1], pairs[place]
    return on


def pareto(results: Results) -> list[TrialRecord]:
    """Return the trials on the front of a search with two objectives, the best in the first objective first."""
    assert results.space.cost is not None
    costs = [(trial, cost) for trial in results.ranked if (cost := trial.value(results.space.cost)) is not None]
    rows = sorted(((results.loss_at_end(trial), cost, trial) for trial, cost in costs), key=lambda row: row[:2])
    return [trial for (*_, trial), on in zip(rows, front([row[:2] for row in rows]), strict=True) if on]


def pareto_table(results: Results) -> pd.DataFrame:
    """Return `pareto` as rows: trial, both objectives by name, versus_baseline, and the knobs that differ."""
    names = [results.metric, results.space.cost or ""]
    rows = [
        {"trial": trial.name, **{name: trial.value(name) for name in names}}
        | {"versus_baseline": results.versus_baseline(trial), "configuration": text.knobs(results.changed(trial))}
        for trial in pareto(results)
    ]
    return pd.DataFrame(rows)


def trade_offs(results: Results) -> pd.DataFrame:
    """Return one row per trial that ended ok: objective, samples/s, memory, and on which Pareto fronts it lies.

    A second objective of the search is included.
    """
    signs = {RATE: -1.0, "peak_memory_mib": 1.0} | ({results.space.cost: 1.0} if results.space.cost is not None else {})
    signs.pop(results.metric, None)
    rows = [
        [trial.name, trial.value(results.metric), *(rate(trial) if n == RATE else last(trial, n) for n in signs)]
        for trial in results.ranked
    ]
    frame = pd.DataFrame(rows, columns=["trial", results.metric, *signs])
    for name, sign in signs.items():
        measured = frame[name].notna()
        pairs = [
            (results.loss(a), sign * b)
            for a, b in zip(frame[results.metric][measured], frame[name][measured], strict=True)
        ]
        frame[f"on_front_{name}"] = False
        if pairs:  # journals of another version or origin may lack one of them completely
            frame.loc[measured, f"on_front_{name}"] = front(pairs)
    return frame
