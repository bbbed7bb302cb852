"""Estimate what each knob does, averaged over all others, and with which values trials fail.

Objectives are compared by their logarithms where their ratios are meaningful: effects and noise of
a distance or a throughput are proportional to it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunediff.analysis import RATE, Results, shown
from tunediff.analysis.importance import is_range, searched
from tunediff.analysis.outcome import Outcome
from tunediff.analysis.speed import rate
from tunediff.analysis.statistics import LEVEL, Estimate, anova, estimate, holm
from tunediff.core.text import knob_value, number
from tunediff.search_space import Dimension
from tunediff.search_space.dimension import as_param

if TYPE_CHECKING:
    import pandas as pd

BINS = 5
"""Parts of a range, with about the same number of trials in each."""
ABOVE, WITHIN, TOO_FEW = "larger than the noise", "within the noise", "too few trials"


@dataclasses.dataclass(frozen=True)
class Level:
    """One value or range of a knob. Means are geometric where values are compared by ratios."""

    label: str
    objective: Estimate | None
    """Mean ± one standard error of the configurations that fail on no seed, or None."""
    rate: Estimate | None
    """Samples per second of all trials that measured it."""
    failed: int
    """Trials that failed by their configurations: see `configuration_failed`."""
    members: frozenset[str]
    """Names of all trials with it."""


@dataclasses.dataclass(frozen=True)
class Effect:
    """The effect of one knob, averaged over the values of all others."""

    knob: str
    levels: list[Level]
    p: float | None
    """p-value of a one-way analysis of variance of the objective; None: too few trials."""
    p_holm: float | None = None
    """`p` after Holm's correction over all knobs."""
    verdict: str = TOO_FEW
    ratios: bool = True
    """Whether values are compared by ratios."""

    @property
    def spread(self) -> float | None:
        """Return the ratio of the largest to the smallest mean, or their difference."""
        means = [level.objective.mean for level in self.levels if level.objective is not None]
        if len(means) < 2:
            return None
        return max(means) / min(means) if self.ratios else max(means) - min(means)


def effects(results: Results) -> list[Effect]:
    """Return the effect of every searched knob with several values, in the order of the file."""
    logs = results.ratios and all(
        value > 0 for outcome in results.outcomes for value in outcome.values
    )
    drafts: list[Effect] = []
    for dimension in searched(results):
        samples, levels = list[list[float]](), list[Level]()
        drawn = [outcome for outcome in results.outcomes if dimension.name in outcome.trial.drawn]
        for label, outcomes in _groups(dimension, drawn):
            runs = [run for outcome in outcomes if not outcome.failures for run in outcome.samples]
            ends = [value for run in runs if (value := run.value(results.metric)) is not None]
            samples.append([math.log(value) for value in ends] if logs else ends)
            trials = [run for outcome in outcomes for run in outcome.samples]
            speed = estimate(
                [value for trial in trials if (value := rate(trial))], ratios=True, errors=True
            )
            names = frozenset(run.name for outcome in outcomes for run in outcome.runs)
            failed = sum(len(outcome.failures) for outcome in outcomes)
            levels.append(Level(label, estimate(ends, logs, errors=True), speed, failed, names))
        if len(levels) > 1:
            drafts.append(Effect(dimension.name, levels, anova(samples), ratios=logs))
    corrected = holm([effect.p for effect in drafts])
    return [
        dataclasses.replace(
            effect, p_holm=p, verdict=TOO_FEW if p is None else ABOVE if p < LEVEL else WITHIN
        )
        for effect, p in zip(drafts, corrected, strict=True)
    ]


def _groups(dimension: Dimension, outcomes: list[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """Return the configurations by the value of a knob, or by the part of its range."""
    # Few different values, or no range: one group per value
    values = [outcome.trial.drawn[dimension.name] for outcome in outcomes]
    by_value = dict[Any, list[Outcome]]()
    for outcome, value in zip(outcomes, values, strict=True):
        by_value.setdefault(as_param(value), []).append(outcome)
    on_scale = is_range(dimension, values)
    if not on_scale or len(by_value) <= BINS + 1:
        order = [*(dimension.choices or (sorted(values) if on_scale else ())), *values]
        return [
            (shown(value), by_value[value])
            for value in dict.fromkeys(map(as_param, order))
            if value in by_value
        ]
    # A range: parts with about the same number of configurations
    parts = max(2, min(BINS, len(values) // 4))
    edges = np.unique(np.quantile(values, np.linspace(0, 1, parts + 1)))
    places = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    groups = []
    for place in sorted(set(places)):
        inside = [outcome for outcome, part in zip(outcomes, places, strict=True) if part == place]
        drawn = [outcome.trial.drawn[dimension.name] for outcome in inside]
        groups.append((min(drawn), max(drawn), inside))
    # If one end needs an exponent, write all of them with one.
    tiny = any("e" in number(end) for *ends, _ in groups for end in ends)
    return [
        (" … ".join(f"{end:.2e}" if tiny else knob_value(end) for end in ends), inside)
        for *ends, inside in groups
    ]


def effects_table(results: Results, effects: Sequence[Effect]) -> pd.DataFrame:
    """Return one row per value of each knob."""
    import pandas as pd

    rows = []
    for effect in effects:
        for level in effect.levels:
            row = {
                "knob": effect.knob,
                "value": level.label,
                "trials": len(level.members),
                "failed": level.failed,
            }
            row |= _columns(results.metric, level.objective) | (
                {} if results.by_rate else _columns(RATE, level.rate)
            )
            rows.append(row | {"p": effect.p, "p_holm": effect.p_holm, "verdict": effect.verdict})
    return pd.DataFrame(rows)


def _columns(name: str, mean: Estimate | None) -> dict[str, float | None]:
    values = (
        (mean.mean, mean.low, mean.high, mean.runs) if mean is not None else (None, None, None, 0)
    )
    return dict(
        zip((f"{name}_mean", f"{name}_low", f"{name}_high", f"{name}_trials"), values, strict=True)
    )


# ---- failures
def failures_table(results: Results) -> pd.DataFrame:
    """Return one row per status and reason other than ok: count, first reason, names of trials."""
    import pandas as pd

    kinds: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for trial in results.trials:
        if trial.status in (None, "ok"):
            continue
        reason = trial.reason if trial.status != "pruned" else "stopped early"
        # Numbers differ between trials; without them, equal causes have equal reasons.
        key = (trial.status, re.sub(r"\d+(\.\d+)?", "#", reason)[:80])
        kinds.setdefault(key, (reason, []))[1].append(trial.name)
    rows = [
        (status, len(names), reason, " ".join(names))
        for (status, _), (reason, names) in kinds.items()
    ]
    rows.sort(key=lambda row: row[1], reverse=True)
    return pd.DataFrame(rows, columns=["status", "trials", "reason", "names"])
