"""Find the trade-offs of a search: configurations that none beats in two quantities at once.

As in `Results.ranked`, values are means over a configuration's runs: no lucky run is on a front.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tunediff import config as cfg
from tunediff.analysis import RATE, Results, last
from tunediff.analysis.outcome import Outcome
from tunediff.analysis.speed import rate
from tunediff.analysis.statistics import mean
from tunediff.core import text
from tunediff.core.trial_record import TrialRecord

if TYPE_CHECKING:
    import pandas as pd


def front(pairs: Sequence[tuple[float, float]]) -> list[bool]:
    """Return for each pair whether no other pair is at most as large in both and smaller in one."""
    on, least = [False] * len(pairs), math.inf
    before: tuple[float, float] | None = None
    for place in sorted(range(len(pairs)), key=lambda place: pairs[place]):
        on[place] = pairs[place][1] < least or pairs[place] == before
        if pairs[place][1] < least:
            least, before = pairs[place][1], pairs[place]
    return on


def pareto(results: Results) -> list[dict[str, Any]]:
    """Return the front of two objectives, the best in the first one first; [] with one objective.

    What fails on a seed, or lacks one, is on no front, unless everything does. Keys: `trial` (first
    run that ended ok), `configuration` (the knobs that differ), `value`, `failures`, `cost`,
    `versus_baseline` (how the value compares with the baseline's mean: see `Results.versus`).
    """
    if (cost := results.space.cost) is None:
        return []
    bases = (outcome for outcome in results.ranked if not results.changed(outcome.trial))
    of_base = next((outcome.value for outcome in bases), None)
    rows: list[dict[str, Any]] = [
        {
            "trial": outcome.trial.name,
            "configuration": results.changed(outcome.trial),
            "value": outcome.value,
            "failures": len(outcome.failures),
            "cost": price,
            "versus_baseline": results.versus(outcome.value, of_base),
        }
        for outcome in _comparable(results)
        if (price := _mean(outcome.done, lambda run: run.value(cost))) is not None
    ]
    on_front = front([(results.loss(row["value"]), row["cost"]) for row in rows])
    return list(itertools.compress(rows, on_front))


def _comparable(results: Results) -> list[Outcome]:
    """Return the configurations with the fewest failures and missing runs, the best first."""
    ranked = results.ranked
    return [outcome for outcome in ranked if outcome.rank[:2] == ranked[0].rank[:2]]


def _mean(
    runs: Sequence[TrialRecord], quantity: Callable[[TrialRecord], float | None]
) -> float | None:
    return mean([value for run in runs if (value := quantity(run)) is not None])


def pareto_table(results: Results) -> pd.DataFrame:
    """Return `pareto` as rows: trial, objectives, failures, versus_baseline, changed knobs."""
    import pandas as pd

    names = {"value": results.metric, "cost": results.space.cost}
    table = pd.DataFrame(
        pareto(results), columns=["trial", *names, "failures", "versus_baseline", "configuration"]
    )
    return table.assign(configuration=table["configuration"].map(text.knobs)).rename(columns=names)


def trade_offs(results: Results) -> pd.DataFrame:
    """Return one row per configuration that never fails: objective, samples/s, memory, fronts.

    A second objective of the search is included. `trial`: its first run.
    """
    import pandas as pd

    signs = {RATE: -1.0, "peak_memory_mib": 1.0}
    if cfg.is_command(results.space.workload.name):
        del signs[RATE]  # how often a program prints says nothing
    if results.space.cost is not None:
        signs[results.space.cost] = 1.0
    signs.pop(results.metric, None)
    measures = [rate if n == RATE else lambda trial, n=n: last(trial, n) for n in signs]
    rows = [
        [one.trial.name, one.value, *(_mean(one.done, of) for of in measures)]
        for one in _comparable(results)
    ]
    frame = pd.DataFrame(rows, columns=["trial", results.metric, *signs])
    for name, sign in signs.items():
        measured = frame[name].notna()
        values = frame.loc[measured, [results.metric, name]].to_numpy(dtype=float)
        on_front = front([(results.loss(value), sign * other) for value, other in values])
        frame[f"on_front_{name}"] = False
        frame.loc[measured, f"on_front_{name}"] = pd.Series(on_front, dtype=bool).to_numpy()
    return frame
