"""Compute how many times sooner one noisy curve reaches the final value of another."""

from __future__ import annotations

import math
from typing import NamedTuple

from tunediff.core.target import Curve, seconds_to
from tunediff.core.trial_record import TrialRecord


class SpeedUp(NamedTuple):
    """How many times sooner a run is as good as the baseline at its end."""

    ratio: float
    at_first: bool
    """Whether it is at its first evaluation already, so that the ratio is a lower bound."""


def smooth(curve: Curve) -> list[tuple[float, float]]:
    """Return the nearest falling curve by least squares: rising neighbours are pooled.

    `curve` must not be empty. M. Ayer et al., Ann. Math. Statist. 26 (1955), 641-647 (pool adjacent
    violators). So a value that a curve reaches once by luck does not count as reached, and no curve
    ends worse than it was before.
    """
    from scipy import optimize  # half a second

    seconds, losses = zip(*curve, strict=True)
    return list(
        zip(seconds, optimize.isotonic_regression(losses, increasing=False).x.tolist(), strict=True)
    )


def time_to_target_speedup(baseline: Curve, other: Curve) -> float | None:
    """Return how many times sooner `other` reaches the baseline's final value, or None.

    Below 1 if it ends worse: then the result is when the baseline reached the other's final value.
    Exchanging the two gives the inverse. So equal configurations have a geometric mean of 1 at any
    noise, and no run is left out for not having reached the value. The first crossings of two equal
    noisy curves, over the runs that have one, give 1.05 to 2.2 instead (simulated in
    `tests/analysis/test_results.py`). Strong noise within a run draws this ratio towards 1.
    """
    if not baseline or not other:
        return None
    base, mine = smooth(baseline), smooth(other)
    if mine[-1][1] == base[-1][1]:
        return base[-1][0] / mine[-1][0]
    if mine[-1][1] > base[-1][1]:
        reached = seconds_to(base, mine[-1][1])
        return reached / mine[-1][0] if reached else None
    reached = seconds_to(mine, base[-1][1])
    return base[-1][0] / reached if reached else None


def curve(trial: TrialRecord, metric: str, along: str = "") -> list[tuple[float, float]]:
    """Return (seconds in the budget's unit, or `along`; value) of every evaluation with a value."""
    along = along or trial.along
    points = [p for p in trial.points if p.get(metric) is not None and along in p]
    return [(float(point[along]), float(point[metric])) for point in points]


def speedup(baseline: TrialRecord, run: TrialRecord, metric: str, mode: str) -> SpeedUp | None:
    """Return the speed-up of a run by both curves; None: one has no value at its end."""
    if None in (baseline.value(metric), run.value(metric)):
        return None
    base, mine = (
        [(seconds, value if mode == "min" else -value) for seconds, value in curve(one, metric)]
        for one in (baseline, run)
    )
    if (ratio := time_to_target_speedup(base, mine)) is None:
        return None
    return SpeedUp(ratio, math.isclose(ratio, baseline.points[-1][baseline.along] / mine[0][0]))
