"""What each knob does, whatever the others were; and with which values trials fail.

Objectives are compared by their logarithms where ratios of them mean something: effects and noise of a distance and of
a throughput are proportional.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from tunediff.analysis import RATE, Results, failed, shown
from tunediff.analysis.importance import is_range, searched
from tunediff.analysis.speed import rate
from tunediff.analysis.statistics import LEVEL, Estimate, anova, estimate, holm
from tunediff.core.text import number
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import Dimension

BINS = 5
"""Parts of a range, each with about as many trials."""
ABOVE, WITHIN, TOO_FEW = "larger than the noise", "within the noise", "too few trials"


@dataclasses.dataclass(frozen=True)
class Level:
    """One value of a knob, or one part of its range. Means are geometric where values are compared by ratios."""

    label: str
    objective: Estimate | None
    """± one standard error, over the trials that ended ok; None: none did."""
    rate: Estimate | None
    """Samples per second, over all trials that measured them."""
    failed: int
    """Trials that ended as oom, nan, timeout or error."""
    members: frozenset[str]
    """Names of all trials with it."""


@dataclasses.dataclass(frozen=True)
class Effect:
    """What the trials say about one knob, whatever the others were."""

    knob: str
    levels: list[Level]
    p: float | None
    """Of a one-way analysis of variance of the objective; None: too few trials."""
    p_holm: float | None = None
    """After Holm's correction over all knobs."""
    verdict: str = TOO_FEW
    ratios: bool = True
    """Whether values are compared by ratios."""

    @property
    def spread(self) -> float | None:
        """The largest mean over the smallest, or less it."""
        means = [level.objective.mean for level in self.levels if level.objective is not None]
        if len(means) < 2:
            return None
        return max(means) / min(means) if self.ratios else max(means) - min(means)


def effects(found: Results) -> list[Effect]:
    """For every searched knob with several values, in the order of the file, what its values reached."""
    logs = found.ratios and all((trial.value(found.metric) or 0.0) > 0 for trial in found.ranked)
    drafts: list[Effect] = []
    for dimension in searched(found):
        samples, levels = list[list[float]](), list[Level]()
        for label, trials in _groups(dimension, [trial for trial in found.singles if dimension.name in trial.drawn]):
            ends = [value for trial in trials if (value := trial.value(found.metric)) is not None]
            samples.append([math.log(value) for value in ends] if logs else ends)
            speed = estimate([value for trial in trials if (value := rate(trial))], ratios=True, errors=True)
            names = frozenset(trial.name for trial in trials)
            levels.append(Level(label, estimate(ends, logs, errors=True), speed, sum(map(failed, trials)), names))
        if len(levels) > 1:
            drafts.append(Effect(dimension.name, levels, anova(samples), ratios=logs))
    corrected = holm([effect.p for effect in drafts])
    return [
        dataclasses.replace(effect, p_holm=p, verdict=TOO_FEW if p is None else ABOVE if p < LEVEL else WITHIN)
        for effect, p in zip(drafts, corrected, strict=True)
    ]


def _groups(dimension: Dimension, trials: list[TrialRecord]) -> list[tuple[str, list[TrialRecord]]]:
    """Trials by the value of a knob, or by the part of its range."""
    values = [trial.drawn[dimension.name] for trial in trials]
    distinct, on_scale = set(map(shown, values)), is_range(dimension, values)
    if not on_scale or len(distinct) <= BINS + 1:
        order = [*(dimension.choices or (sorted(values) if on_scale else ())), *values]
        labels = [word for word in dict.fromkeys(map(shown, order)) if word in distinct]
        return [(word, [t for t, v in zip(trials, values, strict=True) if shown(v) == word]) for word in labels]
    parts = max(2, min(BINS, len(values) // 4))
    edges = np.unique(np.quantile(values, np.linspace(0, 1, parts + 1)))
    places = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    found = []
    for place in sorted(set(places)):
        inside = [trial for trial, at in zip(trials, places, strict=True) if at == place]
        drawn = [trial.drawn[dimension.name] for trial in inside]
        found.append((min(drawn), max(drawn), inside))
    tiny = any("e" in number(end) for *ends, _ in found for end in ends)  # then all are written so
    return [(" … ".join(f"{end:.2e}" if tiny else number(end) for end in ends), inside) for *ends, inside in found]


def effects_table(found: Results, effects: Sequence[Effect]) -> pd.DataFrame:
    """One row per value of each knob."""
    rows = []
    for effect in effects:
        for level in effect.levels:
            row = {"knob": effect.knob, "value": level.label, "trials": len(level.members), "failed": level.failed}
            row |= _columns(found.metric, level.objective) | ({} if found.by_rate else _columns(RATE, level.rate))
            rows.append(row | {"p": effect.p, "p_holm": effect.p_holm, "verdict": effect.verdict})
    return pd.DataFrame(rows)


def _columns(name: str, mean: Estimate | None) -> dict[str, float | None]:
    values = (mean.mean, mean.low, mean.high, mean.runs) if mean is not None else (None, None, None, 0)
    return dict(zip((f"{name}_mean", f"{name}_low", f"{name}_high", f"{name}_trials"), values, strict=True))


# ------------------------------------------------------------------------------------------------------------ failures
def failures_table(found: Results) -> pd.DataFrame:
    """One row per kind of end other than ok: status, how often, why (of the first such trial), which trials."""
    kinds: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for trial in found.trials:
        if trial.status in (None, "ok"):
            continue
        reason = trial.reason if trial.status != "pruned" else "stopped early by the scheduler"
        # Numbers differ from one trial to the next: without them the same cause reads the same.
        key = (trial.status, re.sub(r"\d+(\.\d+)?", "#", reason)[:80])
        kinds.setdefault(key, (reason, []))[1].append(trial.name)
    rows = [(status, len(names), reason, " ".join(names)) for (status, _), (reason, names) in kinds.items()]
    rows.sort(key=lambda row: row[1], reverse=True)
    return pd.DataFrame(rows, columns=["status", "trials", "reason", "names"])


def _ran(trial: TrialRecord) -> bool:
    return trial.finished and trial.status != "skipped"


def suspects(found: Results, effects: Sequence[Effect], most: int = 5) -> list[tuple[str, Level]]:
    """Values with at least two failures and twice the rate of the other trials, the worst first; a hint, no proof."""
    bad, ended = sum(map(failed, found.trials)), sum(map(_ran, found.trials))
    hints = list[tuple[float, str, Level]]()
    for knob, level in ((effect.knob, level) for effect in effects for level in effect.levels):
        inside = sum(_ran(trial) for trial in found.trials if trial.name in level.members)
        others = ended - inside
        if level.failed >= 2 and others >= 1:
            here, there = level.failed / inside, (bad - level.failed) / others
            if here >= 2 * there:
                hints.append((here - there, knob, level))
    return [(knob, level) for _, knob, level in sorted(hints, key=lambda hint: -hint[0])[:most]]
