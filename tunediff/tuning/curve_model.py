"""Draw new configurations by a model of curves: a Gaussian process over knobs and training time.

The model reads the curves of all trials, also those of paused ones, where TPE reads the ends of finished ones. The
covariance of the transformed losses of configurations x, x' at points p, p', with l = log2(p):

    common(l, l') + grow(l, l') · [knobs(x, x') · exp(-|l - l'| / t1) + same(x, x') · exp(-|l - l'| / t2)] + noise

`common` is the shape that all curves share, `knobs` a squared exponential over the knobs with one length for each,
`same` is 1 for one run and 0 else, and `grow` lets configurations differ more, or less, with every doubling of the
time. Every parameter has a log-normal prior; the fit maximizes the posterior. Curves as a part that the knobs share
and a part of each run's own: Swersky et al. 2014, «Freeze-thaw Bayesian optimization» (arXiv 1406.3896). Posterior and
gradients: Rasmussen and Williams 2006, «Gaussian processes for machine learning», sections 2.2 and 5.4.1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunediff.config import Values
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import Draw, SearchSpace
from tunediff.search_space.model import Dimension
from tunediff.tuning.allocation import losses

Numbers = NDArray[np.float64]
START = 4
"""Trials before the model draws."""
CANDIDATES = 200
"""Random configurations among which the model chooses."""
FITTED, KNOWN = 100, 300
"""Most points that the parameters are fitted to, and that forecasts know: a decision takes less than 0.1 s."""
ITERATIONS = 15
COMMON_SD, COMMON_DECAY = 2.0, 3.0
"""Of what `comparable` leaves of the curve that all share: standard deviation, and the doublings of time over which
half of it is forgotten."""
JITTER = 1e-8
LEAST_SPREAD = 0.05
"""Least spread that losses are divided by, as a share of a typical one: equal losses have none."""


class CurveModel:
    """Forecasts how configurations end. Losses have been made comparable, see `comparable`."""

    def __init__(self, dimensions: Sequence[Dimension], points: int) -> None:
        """`points`: evaluations of a whole training."""
        self._dimensions, self._end = dimensions, math.log2(points)
        lengths = np.full(len(dimensions), math.log(0.5 * math.sqrt(len(dimensions))))
        # Logarithms: sd of the knobs' effect, t1, sd of a run's own curve, t2, sd of the noise; growth; lengths
        self._mean = np.concatenate([np.log([0.8, 4.0, 0.4, 2.0, 0.1]), [0.0], lengths])
        self._sd = np.concatenate([[0.5, 0.7, 0.5, 0.7, 0.7, 0.4], np.full(len(dimensions), 0.75)])
        self.parameters = self._mean

    def fit(self, knobs: Sequence[Values], runs: Sequence[int], points: Sequence[float], values: Numbers) -> CurveModel:
        """Fit the parameters to observed values: of each its configuration, run, point (1, 2, …) and loss."""
        from scipy import optimize  # half a second

        self._knobs, self._runs = knobs, np.asarray(runs)
        self._levels, self._values = np.log2(np.asarray(points, float)), values
        # A fixed random part: every k-th one could leave out a point, because each trial has its points in a row
        some = np.sort(np.random.default_rng(0).permutation(len(values))[:FITTED])
        bounds = list(zip(self._mean - 4 * self._sd, self._mean + 4 * self._sd, strict=True))
        found = optimize.minimize(
            self.negative_log_posterior, self._mean, self._observed(some), jac=True, method="L-BFGS-B", bounds=bounds,
            options={"maxiter": ITERATIONS},
        )  # fmt: skip
        self.parameters = found.x
        distances, same, levels, _ = self._observed(np.arange(len(values)))
        covariance = self._covariance(distances, same, levels, levels)
        self._inverse = np.linalg.inv(covariance + self._noise * np.eye(len(values)))
        return self

    def forecast(self, knobs: Sequence[Values]) -> tuple[Numbers, Numbers]:
        """Return mean and standard deviation of the loss at the end of one new run of each configuration."""
        levels = np.full(len(knobs), self._end)
        distances = _distances(self._dimensions, self._knobs, knobs)
        to_observed = self._covariance(distances, np.zeros(distances.shape[1:]), self._levels, levels)
        own = COMMON_SD**2 + math.exp(2 * self.parameters[0]) + math.exp(2 * self.parameters[2]) + self._noise
        variance = own - np.einsum("ij,ij->j", to_observed, self._inverse @ to_observed)
        return to_observed.T @ self._inverse @ self._values, np.sqrt(np.maximum(variance, JITTER))

    def negative_log_posterior(
        self, parameters: Numbers, distances: Numbers, same: Numbers, levels: Numbers, values: Numbers
    ) -> tuple[float, Numbers]:
        """Return the negative logarithm of likelihood times prior, without its constants, and its gradient."""
        self.parameters = parameters
        gap, until_end = abs(levels[:, None] - levels), levels[:, None] + levels - 2 * self._end
        by_knobs, by_run = self._parts(distances, same, gap, until_end)
        covariance = _common(gap) + by_knobs + by_run + self._noise * np.eye(len(values))
        try:
            root = np.linalg.cholesky(covariance)
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(parameters)
        inverse, deviations = np.linalg.inv(covariance), (parameters - self._mean) / self._sd
        weights = inverse @ values
        value = 0.5 * values @ weights + np.log(np.diag(root)).sum() + 0.5 * deviations @ deviations
        # The gradient of the likelihood: half of the trace of (inverse - weights weights') times each derivative
        outer = 0.5 * (inverse - np.outer(weights, weights))
        knobs, run = outer * by_knobs, outer * by_run
        lengths = np.tensordot(distances, knobs, 2) * np.exp(-2 * parameters[6:])
        first = [2 * knobs.sum(), (knobs * gap).sum() / math.exp(parameters[1])]
        first += [2 * run.sum(), (run * gap).sum() / math.exp(parameters[3])]
        first += [2 * (self._noise - JITTER) * np.trace(outer), ((knobs + run) * until_end).sum()]
        return float(value), np.concatenate([first, lengths]) + deviations / self._sd

    def _observed(self, places: NDArray[np.int_]) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return distances, whether it is the same run, log2 of the points and values of some observations."""
        knobs, runs = [self._knobs[place] for place in places], self._runs[places]
        same = (runs[:, None] == runs).astype(float)
        return _distances(self._dimensions, knobs, knobs), same, self._levels[places], self._values[places]

    def _covariance(self, distances: Numbers, same: Numbers, levels: Numbers, others: Numbers) -> Numbers:
        gap, until_end = abs(levels[:, None] - others), levels[:, None] + others - 2 * self._end
        return np.asarray(_common(gap) + sum(self._parts(distances, same, gap, until_end)))

    def _parts(self, distances: Numbers, same: Numbers, gap: Numbers, until_end: Numbers) -> tuple[Numbers, Numbers]:
        """Return the covariance by the knobs and that within a run."""
        sd, decay, run_sd, run_decay = np.exp(self.parameters[:4])
        grow = np.exp(self.parameters[5] * until_end)
        knobs = np.exp(-0.5 * np.tensordot(np.exp(-2 * self.parameters[6:]), distances, 1))
        return sd**2 * grow * knobs * np.exp(-gap / decay), run_sd**2 * grow * same * np.exp(-gap / run_decay)

    @property
    def _noise(self) -> float:
        return math.exp(2 * self.parameters[4]) + JITTER


def propose(space: SearchSpace, trials: Sequence[TrialRecord], number: int) -> Values | None:
    """Return the knobs of a new configuration, trial `number`; None: too little is observed for a model.

    Of random configurations that were not tried, it is the one with the highest expected improvement over the best
    finished loss. The answer depends on the arguments only.
    """
    observed = [trial for trial in trials if trial.points or _failed(trial)]
    if space.cost is not None or not space.dimensions or len(observed) < START:
        return None
    # ---- what was observed: the points at which trials pause, and the last one; a failure counts as a bad end
    last = space.baseline.evaluation.points
    rungs = sorted({*(2**i for i in range(last.bit_length())), last})
    rows, failed = list[tuple[TrialRecord, int, float]](), list[TrialRecord]()
    for trial in sorted(observed, key=lambda trial: (-len(trial.points), -trial.number)):  # the longest curves first
        own = losses(space, trial)
        if _failed(trial) or not all(map(math.isfinite, own)):
            failed.append(trial)
        rows += [(trial, rung, own[rung - 1]) for rung in rungs if rung <= len(own) and math.isfinite(own[rung - 1])]
    rows, failed = rows[:KNOWN], failed[: KNOWN // 4]
    ended = {trial.name for trial, point, _ in rows if point == last}
    if not ended:
        return None
    points = np.array([point for _, point, _ in rows])
    finished = np.array([trial.name in ended for trial, *_ in rows])
    values = comparable(np.array([value for *_, value in rows]), points, finished, space.mode)
    best = min(value for value, (_, point, _) in zip(values, rows, strict=True) if point == last)
    rows += [(trial, last, math.inf) for trial in failed]
    values = np.concatenate([values, np.full(len(failed), values.max() + 1)])

    # ---- the candidate that promises most
    random_draws, draw = _Random(f"{space.seed} {number}"), Draw(space.dimensions)
    tried = [trial.drawn for trial in trials]
    candidates = [draw(random_draws) for _ in range(CANDIDATES)]
    candidates = [knobs for knobs in candidates if knobs not in tried]
    if not candidates:
        return None
    columns = [trial.drawn for trial, *_ in rows], [trial.number for trial, *_ in rows], [point for _, point, _ in rows]
    try:
        mean, sd = CurveModel(space.dimensions, last).fit(*columns, values).forecast(candidates)
    except np.linalg.LinAlgError:  # rounding errors: the study draws
        return None
    return candidates[int(np.argmax(expected_improvement(mean, sd, best)))]


def comparable(losses: Numbers, points: NDArray[np.int_], finished: NDArray[np.bool_], mode: str) -> Numbers:
    """Return losses whose differences compare: logarithms where all are positive, without the curve that all trials
    share, poor ones drawn in, scaled by the spread at the latest point.

    `points`: of each loss, its point; `finished`: whether its trial has all points. At each point, what is behind the
    median counts by the logarithm of that distance, in spreads of the better half.
    """
    values = np.log(losses) if mode == "min" and (losses > 0).all() else losses.astype(float)
    at_points = [points == point for point in np.unique(points)]  # the latest point is the last one
    # ---- subtract the shared curve, which may fall by many times of what ends differ by. Only finished trials tell it:
    # the paused ones are a selection, another one at each point
    for at in at_points:
        values[at] -= np.median(values[at & finished] if (at & finished).any() else values[at])

    # ---- draw poor losses in; where the better half is equal, by a small spread instead of none
    middles = [np.median(values[at]) for at in at_points]
    better = [values[at][values[at] <= middle] - middle for at, middle in zip(at_points, middles, strict=True)]
    spreads = [1.2 * math.sqrt(np.mean(own**2)) for own in better]
    least = LEAST_SPREAD * (max(spreads) or float(np.std(values)) or 1.0)
    for at, middle, spread in zip(at_points, middles, np.maximum(spreads, least), strict=True):
        if at.sum() > 2:
            behind = np.log1p(np.maximum(values[at] - middle, 0) / spread) * spread
            values[at] = np.minimum(values[at], middle + behind)

    # ---- scale by the latest point with three losses that are not all equal
    groups = [values[at] for at in at_points if at.sum() > 2 and np.ptp(values[at]) > 0]
    scale = max(float(np.std(groups[-1] if groups else values)), LEAST_SPREAD * float(np.std(values)))
    return np.asarray(values / (scale or 1.0))


def expected_improvement(mean: Numbers, sd: Numbers, best: float) -> Numbers:
    """Return how much normally distributed losses are expected to fall below `best`, counting only what does."""
    from scipy import special

    z = (best - mean) / sd
    return np.asarray(sd * (z * special.ndtr(z) + np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)))


def _failed(trial: TrialRecord) -> bool:
    """Return whether a trial failed by its configuration."""
    return trial.end is not None and trial.end.status not in ("ok", "pruned") and not trial.end.external_cause


def _common(gap: Numbers) -> Numbers:
    return np.asarray(COMMON_SD**2 * 0.5 * (1 + np.exp(-gap / COMMON_DECAY)))


def _distances(dimensions: Sequence[Dimension], first: Sequence[Values], second: Sequence[Values]) -> Numbers:
    """Return the squared distances of configurations, by dimension: parts of a range; 1 between choices that differ.

    A knob that applies to one of two configurations only is a choice that differs; to neither, one that does not.
    """
    both = []
    for dimension in dimensions:
        a, b = (_positions(dimension, side) for side in (first, second))
        applies, other_applies = ~np.isnan(a)[:, None], ~np.isnan(b)
        gaps = (np.nan_to_num(a)[:, None] - np.nan_to_num(b)) ** 2
        gaps = gaps if _ordered(dimension) else (gaps > 0).astype(float)
        both.append(np.where(applies & other_applies, gaps, applies != other_applies))
    return np.array(both)


def _ordered(dimension: Dimension) -> bool:
    """Return whether values between others mean something: of a range, or of three numbers and more."""
    numbers = [choice for choice in dimension.choices or () if type(choice) in (int, float)]
    return dimension.choices is None or len(numbers) == len(dimension.choices) > 2


def _positions(dimension: Dimension, configurations: Sequence[Values]) -> Numbers:
    """Return where a knob's values lie, from 0 to 1 for ordered ones; NaN: it does not apply."""
    name, choices = dimension.name, dimension.choices
    if choices is not None:
        places = sorted(choices) if _ordered(dimension) else list(choices)  # a file may list numbers in any order
        most = max(1, len(places) - 1)
        return np.array([places.index(own[name]) / most if name in own else math.nan for own in configurations])
    values = np.array([own.get(name, math.nan) for own in configurations], float)
    scale = np.log if dimension.log else np.asarray
    return np.asarray((scale(values) - scale(dimension.low)) / ((scale(dimension.high) - scale(dimension.low)) or 1.0))


class _Random:
    """Draws values as `Draw` asks an Optuna trial for them, uniformly."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self._random.choice(choices)

    def suggest_float(self, name: str, low: float, high: float, step: float | None = None, log: bool = False) -> float:
        if step is not None:
            return min(high, low + step * self._random.randint(0, round((high - low) / step)))
        if log:
            return min(high, max(low, math.exp(self._random.uniform(math.log(low), math.log(high)))))
        return self._random.uniform(low, high)

    def suggest_int(self, name: str, low: int, high: int, step: int = 1, log: bool = False) -> int:
        if log:
            return min(high, max(low, round(math.exp(self._random.uniform(math.log(low), math.log(high))))))
        return low + step * self._random.randint(0, (high - low) // step)
