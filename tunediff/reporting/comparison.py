"""Which configurations of a search with several seeds differ from the baseline by more than the noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special  # scipy.stats takes seconds to import

from tunediff import config as cfg
from tunediff import record
from tunediff.cli import knobs, number
from tunediff.record import TrialRecord
from tunediff.reporting.results import Results

LEVEL = 0.05
"""Probability, at most, that any verdict of one comparison is wrong where nothing differs."""

BETTER, WORSE, SAME = "better", "worse", "no difference larger than the noise"
BASELINE, TOO_FEW = "baseline", "too few runs"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One configuration against the baseline."""

    estimate: float | None = None
    """Ratio of the geometric means, or difference of the means where a value is not positive; None: no common seed."""
    low: float | None = None
    """Lower end of its 95 % confidence interval, for this comparison alone; None: fewer than two common seeds."""
    high: float | None = None
    """Upper end."""
    p: float | None = None
    """Two-sided p-value of this comparison alone."""
    p_holm: float | None = None
    """The p-value after Holm's correction over all configurations compared with the baseline."""
    verdict: str = TOO_FEW
    """`better` or `worse` where `p_holm` is below 0.05, else `no difference larger than the noise`."""


def differences(
    values: NDArray[np.float64], lower_is_better: bool = True
) -> tuple[list[Difference], float | None, bool]:
    """What each row of `values` [configurations, seeds] tells against row 0, the baseline; NaN where a run is missing.

    Returns one `Difference` per row but the first; the smallest difference that Holm's first step would call one, as a
    ratio − 1 or in the metric's units (None: not known); and whether estimates are ratios. They are where all values
    are positive: the model is then one of logarithms, since noise and effects of a Fréchet distance are proportional.

    Configurations that have every seed of the baseline are fitted together by value = configuration + seed + noise, a
    randomised block design. The variance of the noise is that of the residuals, with (G−1)(S−1) degrees of freedom for
    G configurations and S seeds, and a difference has twice its S-th part. A configuration that lacks a seed is
    compared by a paired t-test on its own. Holm's correction: S. Holm, Scand. J. Statist. 6 (1979), 65–70.
    """
    ratios = bool((values[np.isfinite(values)] > 0).all())
    y = np.log(values) if ratios else values
    y = y[:, np.isfinite(y[0])]
    seeds = y.shape[1]
    complete = np.isfinite(y).sum(axis=1) == seeds
    pooled_s, freedom = math.nan, (int(complete.sum()) - 1) * (seeds - 1)
    if freedom > 0:
        z = y[complete]
        noise = z - z.mean(axis=1, keepdims=True) - z.mean(axis=0, keepdims=True) + z.mean()
        pooled_s = math.sqrt(2 * float((noise**2).sum()) / freedom / seeds)

    tested: list[tuple[float, float, int] | None] = []  # difference, its standard error, degrees of freedom
    for row, whole in zip(y[1:], complete[1:], strict=True):
        pairs = (row - y[0])[np.isfinite(row)]
        if len(pairs) == 0:
            tested.append(None)
        elif whole and freedom > 0:
            tested.append((float(pairs.mean()), pooled_s, freedom))
        elif len(pairs) > 1:
            tested.append((float(pairs.mean()), float(pairs.std(ddof=1)) / math.sqrt(len(pairs)), len(pairs) - 1))
        else:
            tested.append((float(pairs[0]), math.nan, 0))

    raw = [_p_value(*test) if test is not None and test[2] else None for test in tested]
    adjusted, found = holm(raw), []
    for test, p, p_holm in zip(tested, raw, adjusted, strict=True):
        if test is None or p is None or p_holm is None:
            found.append(Difference() if test is None else Difference(_shown(test[0], ratios)))
            continue
        half = quantile(1 - LEVEL / 2, test[2]) * test[1]
        low, middle, high = (_shown(value, ratios) for value in (test[0] - half, test[0], test[0] + half))
        verdict = SAME if p_holm >= LEVEL else BETTER if (test[0] < 0) == lower_is_better else WORSE
        found.append(Difference(middle, low, high, p, p_holm, verdict))
    resolution = None
    if freedom > 0:
        comparisons = sum(p is not None for p in raw)
        least = quantile(1 - LEVEL / 2 / comparisons, freedom) * pooled_s
        resolution = math.expm1(least) if ratios else least
    return found, resolution, ratios


def _p_value(difference: float, error: float, freedom: int) -> float:
    if error == 0:  # values that repeat exactly
        return 1.0 if difference == 0 else 0.0
    return float(2 * special.stdtr(freedom, -abs(difference) / error))


def quantile(probability: float, freedom: int) -> float:
    """Of Student's t distribution."""
    return float(special.stdtrit(freedom, probability))


def _shown(value: float, ratios: bool) -> float:
    return math.exp(value) if ratios else value


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number by Holm's method: the smallest times m, the next times m−1, …, rising."""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, place) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - rank)))
        adjusted[place] = least
    return adjusted


# ---------------------------------------------------------------------------------------------------- of whole searches
@dataclasses.dataclass(frozen=True)
class Group:
    """One configuration with all its seeds."""

    knobs: dict[str, Any]
    """What was drawn but for the seed."""
    changed: dict[str, Any]
    """Those of them that differ from the baseline."""
    runs: list[TrialRecord]
    done: list[TrialRecord]
    """The runs that ended ok."""
    difference: Difference

    @property
    def name(self) -> str:
        """`timesteps.name=speed weighting.name=p2`, or `baseline`."""
        return knobs(self.changed)

    def curve(self, metric: str) -> list[dict[str, float]]:
        """Mean over the runs that ended ok at every evaluation they all have: train_s, `metric`, `sd` (0 for one)."""
        points = []
        for index in sorted({point["index"] for trial in self.done for point in trial.points}):
            same = [point for trial in self.done for point in trial.points if point["index"] == index]
            values = [point[metric] for point in same if point.get(metric) is not None]
            if len(values) == len(self.done):
                seconds = float(np.mean([point["train_s"] for point in same]))
                points.append({"train_s": seconds, metric: float(np.mean(values)), "sd": _sd(values) or 0.0})
        return points


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All configurations of a search, the baseline first if it ran at all."""

    metric: str
    label: str
    seeds: int
    groups: list[Group]
    ratios: bool
    """Whether differences are ratios to the baseline."""
    resolution: float | None
    """The smallest difference from the baseline that could be told from noise: a ratio − 1, or in units of the metric;
    None: not known."""

    @property
    def baseline(self) -> Group | None:
        """The configuration that the others are compared with."""
        return self.groups[0] if self.groups and not self.groups[0].changed else None

    @property
    def others(self) -> list[Group]:
        """All configurations but the baseline."""
        return [group for group in self.groups if group.changed]

    def table(self) -> pd.DataFrame:
        """One row per configuration: its knobs, what it reached, and how that compares with the baseline.

        `p` and the interval are for one comparison alone, `p_holm` is corrected. `seconds_to_baseline`: training
        seconds at which the mean curve, straight between evaluations, first reaches the baseline's mean at the end.
        `speedup`: the baseline's training seconds over them, or the ratio of throughputs where those are the objective.
        `cost`: the baseline's images per second over its own.
        """
        metric, effect = self.metric, "ratio" if self.ratios else "difference"
        base, base_rate, base_mean = list[dict[str, float]](), None, None
        if self.baseline is not None:
            base, base_rate = self.baseline.curve(metric), _mean(_rates(self.baseline))
            base_mean = _mean(_last(self.baseline, metric))
        rows = []
        for group in self.groups:
            values, rate, seconds, speedup = _last(group, metric), _mean(_rates(group)), None, None
            if metric == "images_per_s":
                speedup = _mean(values)
                speedup = speedup / base_mean if speedup and base_mean else None
            elif base and (seconds := record.seconds_to(group.curve(metric), metric, base[-1][metric])):
                speedup = base[-1]["train_s"] / seconds
            rows.append(
                {
                    "configuration": group.name,
                    **group.knobs,
                    "runs": len(group.runs),
                    "finished": len(group.done),
                    f"{metric}_mean": _mean(values),
                    f"{metric}_sd": _sd(values),
                    effect: group.difference.estimate,
                    f"{effect}_low": group.difference.low,
                    f"{effect}_high": group.difference.high,
                    "p": group.difference.p,
                    "p_holm": group.difference.p_holm,
                    "verdict": group.difference.verdict,
                    "seconds_to_baseline": seconds,
                    "speedup": speedup,
                    "images_per_s": rate,
                    "cost": base_rate / rate if rate and base_rate else None,
                    "validation_loss_mean": _mean(_last(group, "validation_loss")),
                    "validation_loss_sd": _sd(_last(group, "validation_loss")),
                }
            )
        return pd.DataFrame(rows)

    def markdown(self) -> str:
        """The table for reading, in Markdown."""
        names, *rows = self._columns(compact=False)
        lines = [f"| {' | '.join(names)} |", "|" + "|".join("-" * (len(name) + 2) for name in names) + "|"]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])

    def text(self) -> str:
        """The table for a terminal: the columns that decide."""
        return "\n".join("  ".join(row).rstrip() for row in self._columns(compact=True))

    def _columns(self, compact: bool) -> list[list[str]]:
        """Names and rows of the columns in which anything stands, padded to equal widths."""
        effect = "ratio" if self.ratios else "difference"
        rows = []
        for row in self.table().astype(object).to_dict("records"):
            known = {str(key): value for key, value in row.items() if _is_known(value)}
            ends = [f"{known[key]:.3f}" for key in (effect, f"{effect}_low", f"{effect}_high") if key in known]
            interval = f"{ends[0]} ({ends[1]} … {ends[2]})" if len(ends) == 3 else "".join(ends)
            cells = {
                "configuration": known["configuration"],
                "runs": f"{known['finished']} of {self.seeds}",
                self.label: _with_sd(known, self.metric),
                f"{effect} (95 % interval)": interval,
                "verdict": known["verdict"],
                "p (Holm)": number(known["p_holm"]) if "p_holm" in known else "",
                "seconds to baseline": number(known["seconds_to_baseline"]) if "seconds_to_baseline" in known else "",
                "speedup": f"{known['speedup']:.2f}×" if "speedup" in known else "",
                "images/s": f"{known['images_per_s']:.0f}" if "images_per_s" in known else "",
                "cost": f"{known['cost']:.2f}×" if "cost" in known else "",
                "validation loss": _with_sd(known, "validation_loss"),
            }
            if compact:
                cells["verdict"] = "not told apart" if known["verdict"] == SAME else known["verdict"]
                cells = {k: v for k, v in cells.items() if k not in ("p (Holm)", "seconds to baseline", "images/s")}
            rows.append(cells)
        names = [name for name in (rows[0] if rows else {}) if any(cells[name] for cells in rows)]
        lines = [names, *([cells[name] for name in names] for cells in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]

    def conclusions(self) -> list[str]:
        """Which differences from the baseline are larger than the noise and which are not, in sentences."""
        tested, said = sum(group.difference.p is not None for group in self.others), []
        if tested:
            many = f"{tested} comparisons" if tested > 1 else "1 comparison"
            basis = f"{self.seeds} seeds, {many}, at most 5 % chance of any false alarm"
            if any(group.difference.verdict in (BETTER, WORSE) for group in self.others):
                said.append(f"Some differences from the baseline are larger than the noise ({basis}).")
            else:
                said.append(f"No difference from the baseline is larger than the noise ({basis}).")
        for verdict, words in (
            (BETTER, "Better than the baseline"),
            (WORSE, "Worse than the baseline"),
            (SAME, "Not told apart from the baseline"),
            (TOO_FEW, "Too few runs to tell"),
        ):
            if groups := [group for group in self.others if group.difference.verdict == verdict]:
                said.append(f"{words}: {'; '.join(group.name for group in groups)}.")
        if self.resolution is not None:
            least = f"{100 * self.resolution:.2g} %" if self.ratios else f"{number(self.resolution)} {self.label}"
            said.append(f"A single difference would have to be about {least} to be told from the noise.")
        return said


def compare(found: Results, metric: str | None = None) -> Comparison:
    """The configurations of a search against its baseline. Runs that are missing or failed count as missing.

    By its objective, or by another `metric` of the last points with the same direction.
    """
    metric = metric or found.metric
    baseline = cfg.flat(found.space.baseline)
    groups = []
    for runs in found.groups:
        drawn = {name: value for name, value in runs[0].drawn.items() if name != "seed"}
        changed = {name: value for name, value in drawn.items() if name not in baseline or baseline[name] != value}
        done = [trial for trial in runs if trial.value(metric) is not None]
        groups.append(Group(drawn, changed, runs, done, Difference()))
    groups.sort(key=lambda group: bool(group.changed))  # the baseline changes nothing; the others keep their order
    if not groups or groups[0].changed:
        return Comparison(metric, found.label, found.space.seeds, groups, True, None)

    seeds = sorted({trial.config["seed"] for group in groups for trial in group.runs})
    values = np.full((len(groups), len(seeds)), np.nan)
    for row, group in enumerate(groups):
        for trial in group.done:
            values[row, seeds.index(trial.config["seed"])] = trial.value(metric)
    against, resolution, ratios = differences(values, lower_is_better=found.space.mode == "min")
    judged = [
        dataclasses.replace(group, difference=difference)
        for group, difference in zip(groups, [Difference(verdict=BASELINE), *against], strict=True)
    ]
    return Comparison(metric, found.label, found.space.seeds, judged, ratios, resolution)


def _last(group: Group, key: str) -> list[float]:
    """The value at the budget of every run that ended ok and has one."""
    return [float(trial.points[-1][key]) for trial in group.done if trial.points[-1].get(key) is not None]


def _rates(group: Group) -> list[float]:
    """Images per training second of every run that ended ok."""
    ends = [trial.points[-1] for trial in group.done]
    return [end["images"] / end["train_s"] for end in ends if end["train_s"] > 0]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _sd(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def _is_known(value: Any) -> bool:
    """Whether a cell of the table is filled: pandas writes NaN for what is missing."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _with_sd(known: dict[str, Any], key: str) -> str:
    mean, sd = known.get(f"{key}_mean"), known.get(f"{key}_sd")
    if mean is None:
        return ""
    if sd is None or mean == 0:
        return number(mean)
    digits = max(0, 2 - math.floor(math.log10(abs(mean))))  # as many as 3 significant digits of the mean have
    return f"{mean:.{digits}f} ± {sd:.{digits}f}"
