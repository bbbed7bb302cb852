"""How often `tunediff judge` is wrong of finished runs that are equal, or that just miss a margin.

`python -m benchmarks.believe.finished [FILE.csv]`, three minutes on one core: 30,000 pairs of sets a row, at a level of
5 %. Shares of 5 % are right to 0.13 % (standard error).
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.believe.noise import REFERENCE
from tunediff.finished import statistics

SERIES, LEVEL = 30_000, 0.05
COUNTS = ((5, 5), (8, 8), (15, 15), (5, 15), (15, 5))
"""Runs of the first set and of the other one."""
NOISES = (1.0, 3.0)
"""Standard deviation of a run of the other set, of which the first set's is one."""
MEAN, MARGIN = 100.0, 0.5


def share(test: str, counts: tuple[int, int], noise: float, draw: np.random.Generator) -> float:
    """Return in how many series a test shows what is not true."""
    wrong = 0
    for _ in range(SERIES):
        a, b = draw.normal(MEAN, 1.0, counts[0]), draw.normal(MEAN, noise, counts[1])
        if test == "margin":
            found = statistics.compare(a, b + MARGIN, LEVEL, one_sided=True, bound=MARGIN)
        elif test == "target":
            found = statistics.against(b, MEAN, LEVEL)
        else:
            is_paired, is_one_sided = test == "pairs", test == "one-sided"
            found = statistics.compare(
                a, b, LEVEL, one_sided=is_one_sided, ratios=test == "ratios", paired=is_paired
            )
        wrong += found.shown
    return wrong / SERIES


def rows() -> pd.DataFrame:
    """Return a row for each test, number of runs and noise."""
    found = []
    tests = ("values", "ratios", "one-sided", "pairs", "margin", "target")
    for test, counts, noise in itertools.product(tests, COUNTS, NOISES):
        if test == "pairs" and counts[0] != counts[1]:
            continue
        wrong = share(test, counts, noise, np.random.default_rng(0))
        found.append((test, *counts, noise, SERIES, LEVEL, wrong))
    names = ["test", "runs_a", "runs_b", "noise_b", "times", "level", "wrong"]
    return pd.DataFrame(found, columns=names)


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else REFERENCE / "believe" / "finished.csv"
    rows().to_csv(file, index=False, float_format="%.4g")
    print(pd.read_csv(file).to_string())
