"""What the replayed searches needed, as a table in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.table import Table
from tunediff.report.words import markdown_table

RESAMPLED = 2000
"""Bootstrap samples of a ratio."""
Numbers = NDArray[np.float64]
Seconds = Mapping[str, Mapping[str, Numbers]]
"""Seconds to the target by table and strategy, one for each seed."""


def median(values: Numbers, axis: int | None = None) -> Numbers:
    """Return the median, which is one of the values: some are infinite."""
    return np.asarray(np.quantile(values, 0.5, axis=axis, method="inverted_cdf"), np.float64)


def ratios(ours: Numbers, theirs: Numbers, seed: int = 0) -> tuple[float, Numbers]:
    """Return the ratio of the medians, and bootstrap samples of it over the seeds of both."""
    rng = np.random.default_rng(seed)
    resampled = [
        median(rng.choice(values, (RESAMPLED, len(values))), 1) for values in (ours, theirs)
    ]
    with np.errstate(invalid="ignore"):
        return float(median(ours) / median(theirs)), np.nan_to_num(
            resampled[0] / resampled[1], nan=1.0, posinf=math.inf
        )


def interval(samples: Numbers) -> str:
    """Return a 95 % interval in words."""
    low, high = np.quantile(samples, (0.025, 0.975), method="inverted_cdf")
    return f"({low:.2f} … {high:.2f})"


def markdown(tables: Mapping[str, Table], seconds: Seconds, seeds: int) -> str:
    """Return the results: medians, ratios to random search, and their geometric means over the tables."""
    head = [
        "table",
        "configurations",
        "reach the target",
        "points",
        "noise of one run",
        "random, s",
    ]
    about = [head, *([name, str(len(table.configurations)), str(table.good), str(table.points),
                      f"{table.noise.sd:.3g}", f"{float(median(seconds[name]['random'])):.1f}"]
                     for name, table in tables.items())]  # fmt: skip
    strategies = list(next(iter(seconds.values())))
    cells = [["× random's seconds", *tables, "geometric mean"]]
    for strategy in strategies:
        row, logs, samples = [strategy], list[float](), list[Numbers]()
        for place, by_strategy in enumerate(seconds.values()):
            ratio, resampled = ratios(by_strategy[strategy], by_strategy["random"], place)
            row.append(f"{ratio:.2f} {interval(resampled)}")
            logs.append(math.log(ratio))
            samples.append(np.log(resampled))
        mean = math.exp(sum(logs) / len(logs))
        cells.append([*row, f"{mean:.2f} {interval(np.exp(np.mean(samples, axis=0)))}"])
    note = f"Medians over {seeds} seeds; in brackets 95 % intervals, by a bootstrap over the seeds."
    return f"{markdown_table(about)}\n\n{markdown_table(cells)}\n\n{note}\n"
