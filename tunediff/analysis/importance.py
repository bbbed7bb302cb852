"""Estimate which knobs matter: a random forest attributes shares of the differences to them."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunediff.analysis import Results, is_number
from tunediff.core.logs import errors_only
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import Dimension
from tunediff.search_space.dimension import as_param

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

ENOUGH = 8
"""Number of trials from which a forest is fitted."""
TREES, DEPTH = 32, 8
"""Number of trees and their depth. Deeper ones take minutes and change no share by over 0.01."""

Drawn = tuple[Mapping[str, Any], float]
"""The drawn knobs of a trial, and its target."""


def searched(results: Results) -> list[Dimension]:
    """Return the searched knobs in the order of the file, without the seed."""
    return [dimension for dimension in results.space.dimensions if dimension.name != "seed"]


def is_range(dimension: Dimension, values: Sequence[Any]) -> bool:
    """Return whether the values of a knob lie on a scale."""
    return dimension.choices is None and all(map(is_number, values))


@dataclasses.dataclass(frozen=True)
class Importance:
    """The share of a target's variance that a forest attributes to each knob alone."""

    shares: dict[str, float]
    """Share by knob, the largest first; the rest up to 1 belongs to combinations of knobs. The
    share of a knob with `when:` refers to the trials that have it."""
    trials: int
    unvaried: list[str]
    """Knobs with one value in all trials."""
    logs: bool = True
    """Whether the shares refer to the variance of the target's logarithm."""


def importance(
    results: Results, target: Callable[[TrialRecord], float | None], logs: bool = True
) -> Importance | None:
    """Estimate every knob's importance by fANOVA over trials with the target; None: too few.

    F. Hutter, H. Hoos, K. Leyton-Brown, ICML 2014. Uses the target's logarithm if `logs` are
    allowed and all values are positive. The study is made from the journals: the one in study.db
    contains penalties for failures, which are not measurements.
    """
    trials = [run for outcome in results.outcomes for run in outcome.samples]
    measured = [(trial, value) for trial in trials if (value := target(trial)) is not None]
    logs = logs and all(value > 0 for _, value in measured)
    rows: list[Drawn] = [
        (trial.drawn, math.log(value) if logs else value) for trial, value in measured
    ]
    # Knobs with several values
    varied, unvaried = list[Dimension](), list[str]()
    for d in searched(results):
        if len({as_param(drawn[d.name]) for drawn, _ in rows if d.name in drawn}) > 1:
            varied.append(d)
        else:
            unvaried.append(d.name)
    # A conditional knob is judged among the trials to which it applies, by a forest of their own
    where: dict[tuple[int, ...], list[str]] = {tuple(range(len(rows))): []}
    for d in varied:
        applies = tuple(i for i, (drawn, _) in enumerate(rows) if d.name in drawn)
        where.setdefault(applies, []).append(d.name)
    shares = dict[str, float]()
    if not varied or not _is_enough(rows):
        return None
    for places, names in where.items():
        part = [rows[i] for i in places]
        if names and _is_enough(part):
            shares |= _fanova(part, varied, names)
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return Importance(ordered, len(rows), unvaried, logs)


def _is_enough(rows: Sequence[Drawn]) -> bool:
    return len(rows) >= ENOUGH and len({value for _, value in rows}) > 1


def _fanova(
    rows: Sequence[Drawn], varied: Sequence[Dimension], names: Sequence[str]
) -> dict[str, float]:
    """Return the fANOVA share of each of `names`, from a forest on all knobs that `rows` have."""
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    kinds = {
        d.name: _distribution(d, [drawn[d.name] for drawn, _ in rows])
        for d in varied
        if all(d.name in drawn for drawn, _ in rows)
    }
    with errors_only("optuna"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study()
        for drawn, value in rows:
            params = {name: as_param(drawn[name]) for name in kinds}
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=kinds, value=value)
            )
        forest = FanovaImportanceEvaluator(n_trees=TREES, max_depth=DEPTH, seed=0)
        shares = get_param_importances(study, evaluator=forest, params=list(kinds), normalize=False)
    return {name: float(shares[name]) for name in names if math.isfinite(shares[name])}


def _distribution(dimension: Dimension, values: Sequence[Any]) -> BaseDistribution:
    """Return a dimension's distribution, extended to the values of trials of an older file."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if is_range(dimension, values):
        low, high = min(dimension.low, *values), max(dimension.high, *values)
        return FloatDistribution(low, high, log=dimension.log and low > 0)
    return CategoricalDistribution(sorted(set(map(as_param, values)), key=str))
