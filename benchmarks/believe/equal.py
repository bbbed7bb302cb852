"""What comparisons say of configurations that are equal: in noise that differs, of coarse metrics, confirmed again.

`python -m benchmarks.believe.equal [FILE.csv]`, eight minutes on one core: 3,000 comparisons a row, and what is found
of a gain of two standard deviations of a run. Shares of 2.5 % are right to 0.3 %.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.believe.noise import REFERENCE, Numbers
from tunediff.analysis import confirming_runs
from tunediff.analysis.sequential import InterimAnalysis, Rules, analyse
from tunediff.analysis.statistics import LEVEL
from tunediff.core.outcomes import Verdict

MOST = 12
SD = 0.15
"""Of the logarithm of a run of the baseline."""
Draw = Callable[[np.random.Generator, tuple[int, ...]], Numbers]


def outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> Numbers:
    """Draw normal noise, of which one run in twenty has six times the deviation."""
    return rng.standard_normal(shape) * np.where(rng.random(shape) < 0.05, 6, 1)


def skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> Numbers:
    """Draw log-normal noise on the scale on which values are compared, with a skewness of 3.7."""
    return (np.exp(0.8 * rng.standard_normal(shape)) - math.exp(0.32)) / 0.8 / math.exp(0.32)


def diverging(share: float) -> Draw:
    """Return normal noise, of which such a share of the runs diverges to 10² to 10⁶ times their value."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Numbers:
        far = rng.uniform(2, 6, shape) * math.log(10) / SD
        return rng.standard_normal(shape) + np.where(rng.random(shape) < share, far, 0)

    return draw


NOISES: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "t3": lambda rng, shape: np.asarray(rng.standard_t(3, shape) / math.sqrt(3)),
    "outliers": outliers,
    "skewed": skewed,
    **{f"diverging {share:g}": diverging(share) for share in (0.02, 0.05, 0.1, 0.3)},
}
SDS = (
    (1,),
    (5,),
    (1, 1),
    (0.2, 5),
    (1, 1, 1),
    (1, 1, 3),
    (0.2, 1, 5),
    (1, 1, 1, 1),
    (0.2, 1, 1, 5),
    (5, 5, 5, 5),
)
"""Standard deviations of the rivals, over the baseline's."""
ITEMS = (2, 4, 6, 10, 20)


def until_over(values: Numbers, rules: Rules, **options: Any) -> InterimAnalysis:
    """Return the interim analysis at which a comparison ends."""
    for many in range(1, values.shape[1] + 1):
        if (test := analyse(values[:, :many], rules, **options)).ended:
            break
    return test


def shares(looks: Iterator[InterimAnalysis]) -> dict[str, float]:
    """Return how many comparisons call any rival better, the first one better, any one worse, and their rounds."""
    rows = []
    for test in looks:
        verdicts = [one.verdict for one in test.differences]
        rows.append(
            (
                Verdict.BETTER in verdicts,
                verdicts[0] == Verdict.BETTER,
                Verdict.WORSE in verdicts,
                test.rounds,
            )
        )
    return dict(
        zip(("better", "named", "worse", "rounds"), np.mean(rows, axis=0).tolist(), strict=True)
    )


def of_noise(
    noise: str,
    sds: tuple[float, ...],
    gain: float,
    times: int,
    rng: np.random.Generator,
    level: float = LEVEL,
) -> dict[str, Any]:
    """Return what comparisons say of rivals with such standard deviations; the first is better by `gain` sd."""

    def drawn() -> Iterator[InterimAnalysis]:
        for _ in range(times):
            off = NOISES[noise](rng, (1 + len(sds), MOST)) * np.array([1.0, *sds])[:, None]
            off[1] -= gain
            yield until_over(np.exp(SD * off), Rules(MOST, level))

    return {"part": "noise", "noise": noise, "sds": ", ".join(f"{sd:g}" for sd in sds), "gain": gain, "level": level,
            "times": times, **shares(drawn())}  # fmt: skip


def of_items(items: int, times: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return what comparisons say of accuracies of a hundred items, of which so many are right by chance."""
    values = ((90 + rng.binomial(items, 0.5, (2, MOST))) / 100 for _ in range(times))
    looks = (
        until_over(accuracies, Rules(MOST), lower_is_better=False, ratios=False)
        for accuracies in values
    )
    return {"part": "coarse", "items": items, "times": times, **shares(looks)}


def of_confirmations(confirmations: int, times: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return how many searches name a winner that confirm three equal finalists so many times, each on new seeds."""
    levels = [
        confirming_runs.level(Path(confirming_runs.folder_name(number + 1)))
        for number in range(confirmations)
    ]
    named = 0
    for _ in range(times):
        tests = (
            until_over(np.exp(SD * rng.standard_normal((4, MOST))), Rules(MOST, level))
            for level in levels
        )
        named += any(one.verdict == Verdict.BETTER for test in tests for one in test.differences)
    return {
        "part": "again",
        "confirmations": confirmations,
        "times": times,
        "better": named / times,
    }


def rows(times: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return all rows, each of so many comparisons or searches."""
    for noise in NOISES:
        for sds in SDS if not noise.startswith("diverging") else ((1,), (5,), (1, 1, 1)):
            yield of_noise(noise, sds, 0.0, times, np.random.default_rng(seed))
    first = confirming_runs.level(Path("confirm"))
    for sds, level in (
        ((1,), LEVEL),
        ((1,), first),
        ((1, 1), first),
        ((1, 1, 1), LEVEL),
        ((1, 1, 1), first),
    ):
        yield of_noise("normal", sds, 2.0, times, np.random.default_rng(seed), level)
    for items in ITEMS:
        yield of_items(items, times, np.random.default_rng(seed))
    for confirmations in (1, 2, 4, 8):
        yield of_confirmations(confirmations, times, np.random.default_rng(seed))


if __name__ == "__main__":
    frame = pd.DataFrame(list(rows(3000, seed=0)))
    frame.to_csv(
        sys.argv[1] if len(sys.argv) > 1 else REFERENCE / "believe" / "equal.csv", index=False
    )
    for part, table in frame.groupby("part", sort=False):
        print(f"{part}\n{table.dropna(axis=1, how='all').to_string(index=False)}\n")
