"""Forecast the ends of curves from their beginnings, and price what training them further is worth.

A curve is the losses of one trial at its points, less is better. How much an early point tells about the end is learned
from the search's own curves: where curves cross late, the forecast of a first point is wide, and trials train longer
before they are compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

UNKNOWN = 0.5
"""Before any curve is known: the variance that first points leave open, as a share of the variance among them."""
PRIOR_PAIRS = 2.0
"""How many pairs of values the assumptions before any curve weigh as much as: parallel curves, and `UNKNOWN`."""
FAR = 2.5
"""Losses count as no further behind the median than so many times the lead of the best: curves may diverge."""
GRID, PRICES = 61, np.geomspace(2e-4, 1.0, 20)
"""Forecasts on the grid; prices of a point that are tried, in units of the forecasts' spread per curve."""
NOTHING_TO_GAIN = math.log(0.01 / PRICES[0]) / math.log(PRICES[1] / PRICES[0])
"""The index at which a whole curve is expected to bring an improvement of a hundredth of the forecasts' spread."""
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(5)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@dataclasses.dataclass(frozen=True)
class CurveModel:
    """A chain of regressions, from every point to the next."""

    offsets: Array
    slopes: Array
    """Of the forecast of the end from the value at each point."""
    moves: Array
    """Standard deviation by which the next point moves the forecast, for each point but the last."""
    first: Array
    """Forecasts of all curves from their first points."""

    @classmethod
    def fit(cls, curves: Sequence[Sequence[float]], points: int) -> CurveModel:
        """Fit curves of 1 to `points` losses each; a loss that is not finite counts as far behind."""
        values = _clipped(curves, points)
        variance = float(np.var(values[:, 0], ddof=1)) if len(values) > 2 else 0.0
        offsets, slopes, moves = np.zeros(points), np.ones(points), np.zeros(points - 1)
        # From the last point backwards, so that each regression continues into those that are done
        for i in range(points - 2, -1, -1):
            prior = UNKNOWN * variance * math.log((i + 2) / (i + 1)) / math.log(points)
            offset, slope, residual = _regress(values[:, i], values[:, i + 1], prior)
            moves[i] = abs(slopes[i + 1]) * math.sqrt(residual)
            offsets[i], slopes[i] = offsets[i + 1] + slopes[i + 1] * offset, slopes[i + 1] * slope
        return cls(offsets, slopes, moves, offsets[0] + slopes[0] * values[:, 0])

    def end(self, curve: Sequence[float]) -> float:
        """Return the forecast of a curve's end."""
        return float(self.offsets[len(curve) - 1] + self.slopes[len(curve) - 1] * curve[-1])

    def worth(self, open_curves: Sequence[Sequence[float]], best: float) -> tuple[Array, float]:
        """Return the index of every curve that can be continued, and that of a new one; the greatest goes first.

        The index is the highest price of a point, on a logarithmic scale, at which training goes on: it is paid until
        training stops, at any point, and what the end is better than `best` is the reward. Choosing the greatest index
        is optimal for independent curves whose forecasts move as `moves` says (Gittins 1979; Weitzman 1979, «Optimal
        search for the best alternative»). -1: not worth the lowest price.
        """
        points, spread = len(self.slopes), math.sqrt(float((self.moves**2).sum()))
        middle = float(np.median(self.first))
        tau = max(1.4826 * float(np.median(np.abs(self.first - middle))), 1e-9)
        ends = np.array([self.end(curve) for curve in open_curves])
        low = min([best, middle - 3 * tau, *ends]) - 2 * spread
        high = max(best, middle) + 2 * spread + 2 * tau
        grid, prices = np.linspace(low, high, GRID), PRICES[:, None] * (tau + spread) / points

        def place(forecasts: Array) -> tuple[NDArray[np.int64], Array]:
            position = np.clip((forecasts - low) / (high - low) * (GRID - 1), 0, GRID - 1.000001)
            return position.astype(np.int64), position - position.astype(np.int64)

        def expected(value: Array, forecasts: Array) -> Array:
            """Return the mean of [prices, GRID] over the last axis of forecasts."""
            k, part = place(forecasts)
            return np.asarray((value[:, k] * (1 - part) + value[:, k + 1] * part) @ WEIGHTS)

        # value[i]: of a curve that has i points, by price and forecast; 0 where it stops
        value = {points: np.broadcast_to(np.maximum(0.0, best - grid), (len(PRICES), GRID))}
        for i in range(points - 1, 0, -1):
            value[i] = np.maximum(0.0, expected(value[i + 1], grid[:, None] + self.moves[i - 1] * NODES) - prices)
        new = expected(value[1], (middle + tau * NODES)[None])[:, 0] - prices[:, 0]
        k, part = place(ends)
        each = [
            value[len(curve)][:, at] * (1 - beyond) + value[len(curve)][:, at + 1] * beyond
            for curve, at, beyond in zip(open_curves, k, part, strict=True)
        ]
        return np.array([_highest(one, prices) for one in each]), _highest(new, prices)


def _clipped(curves: Sequence[Sequence[float]], points: int) -> Array:
    """Return [curves, points] of losses, NaN where a curve has none."""
    values = np.full((len(curves), points), np.nan)
    for row, curve in zip(values, curves, strict=True):
        row[: len(curve)] = [loss if math.isfinite(loss) else math.inf for loss in curve]
    for column in values.T:
        finite = column[np.isfinite(column)]
        if len(finite):
            middle = float(np.median(finite))
            far = middle + FAR * (middle - float(finite.min())) if len(finite) > 2 else float(finite.max())
            np.minimum(column, far, out=column)
    values[np.isinf(values)] = 0.0  # nobody is finite there
    return values


def _regress(x: Array, y: Array, prior: float) -> tuple[float, float, float]:
    """Return offset, slope and residual variance of y over x, where both are known; NaN: not known.

    Shrunk towards slope 1 and the variance `prior`, by `PRIOR_PAIRS` pairs.
    """
    scale = max(float(np.nanvar(x)), 1e-12)
    both = np.isfinite(x) & np.isfinite(y)
    if not both.any():
        return 0.0, 1.0, prior
    x, y = x[both], y[both]
    off_x, off_y = x - x.mean(), y - y.mean()
    weight = PRIOR_PAIRS * scale
    slope = float((off_x @ off_y + weight) / (off_x @ off_x + weight))
    rest = off_y - slope * off_x
    residual = (PRIOR_PAIRS * prior + float(rest @ rest)) / (PRIOR_PAIRS + len(x) - 1)
    return float(y.mean() - slope * x.mean()), slope, residual


def _highest(value: Array, prices: Array) -> float:
    """Return the place of the highest price at which there is a value left, with a fraction by how much is left."""
    worth = np.nonzero(value > 0)[0]
    return float(worth[-1] + value[worth[-1]] / (value[worth[-1]] + prices[worth[-1], 0])) if len(worth) else -1.0
