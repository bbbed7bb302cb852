"""Compute how many times sooner one noisy curve reaches the final value of another."""

from __future__ import annotations

from tunediff.core.target import Curve, seconds_to


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
    `tests/analysis/test_reach.py`). Strong noise within a run draws this ratio towards 1.
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
