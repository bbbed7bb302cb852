"""Whether the winner of a search still wins: finalists and baseline run again on new seeds, and what that says.

The best of many trials is partly the luckiest. Its value in the search is therefore no estimate of what it is worth:
the runs here are made after it was chosen, on seeds that had no part in choosing it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tunediff import config as cfg
from tunediff import record
from tunediff.cli import knobs, number
from tunediff.record import TrialRecord
from tunediff.reporting import comparison, results
from tunediff.reporting.comparison import BETTER, Comparison, Group, quantile
from tunediff.reporting.results import Results

SEED_OFFSET = 1000
"""Added to the baseline's seed: no trial of the search itself may have used these."""


def folder_name(number: int) -> str:
    """Folder, within that of the search, in which the finalists run again: confirm, confirm-2, …"""
    return "confirm" if number == 1 else f"confirm-{number}"


def finalists(found: Results, of: int) -> list[TrialRecord]:
    """The best successful trials that differ from the baseline and from each other, `of` at most, the best first."""
    base = cfg.fingerprint(found.space.baseline)
    return [trial for trial in found.ranked if trial.fingerprint != base][:of]


def content(found: Results, of: int, seeds: int, final: dict[str, Any]) -> dict[str, Any]:
    """The search file of the confirmation: baseline and finalists, seed after seed; `base:` lies beside it.

    `final`: knobs of `evaluation.` for one more evaluation of every finished run, at full protocol.
    """
    names = [dimension.name for dimension in found.space.dimensions if dimension.name != "seed"]
    trials = []
    for trial in finalists(found, of):
        changed = cfg.differences(cfg.from_dict(cfg.nest(trial.config), trial.name), found.space.baseline)
        trials.append({name: value for name, value in changed.items() if name in names})
    budget = found.space.budget
    return {
        "objective": found.metric,
        "budget": {
            "per_trial": f"{budget.per_trial_s:.10g}s",
            "compile": "charged" if budget.compile_charged else "free",
            "deadline": f"{budget.trial_deadline_s:.10g}s",
        },
        "seeds": seeds,
        "alone": True,
        "final": final,
        "trials": trials,
    }


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % confidence interval; `low` and `high` are None for a single seed."""

    mean: float
    low: float | None
    high: float | None
    runs: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return number(self.mean)
        return f"{number(self.mean)} ({number(self.low)} … {number(self.high)})"


def estimate(values: Sequence[float], ratios: bool = False) -> Estimate | None:
    """Student's interval of the mean; of `ratios` the geometric mean. None without values."""
    if not values:
        return None
    logs = np.log(values) if ratios else np.asarray(values, dtype=float)
    mean, back = float(logs.mean()), math.exp if ratios else float
    if len(values) < 2:
        return Estimate(back(mean), None, None, 1)
    half = quantile(0.975, len(values) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(values))
    return Estimate(back(mean), back(mean - half), back(mean + half), len(values))


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """What the confirming runs say."""

    search: Results
    compared: Comparison
    metric: str
    """What decides: `final_frechet` where a final evaluation was made, else the objective."""

    @property
    def winner(self) -> Group | None:
        """The finalist of the best mean among those better than the baseline by more than the noise; None: none is."""
        better = [group for group in self.compared.others if group.difference.verdict == BETTER]
        return self._best(better)

    @property
    def leader(self) -> Group | None:
        """The finalist of the best mean, whether or not that means anything."""
        return self._best([group for group in self.compared.others if group.done])

    def _best(self, groups: list[Group]) -> Group | None:
        if not groups:
            return None
        choose = max if self.search.space.mode == "max" else min
        return choose(groups, key=lambda group: float(np.mean(self.values(group))))

    def values(self, group: Group) -> list[float]:
        """What decides, of every run that has it, in the order of the seeds."""
        return [value for trial in group.done if (value := trial.value(self.metric)) is not None]

    def speedup(self, group: Group) -> tuple[Estimate | None, int]:
        """Training seconds of the baseline over those this configuration needs to be as good, seed by seed.

        The geometric mean over the seeds at which it gets there at all, and how many they are. By the curves of the
        search's own protocol: a final evaluation has no curve.
        """
        baseline, found = self.compared.baseline, []
        for trial in group.done:
            twins = (
                [other for other in baseline.done if other.config["seed"] == trial.config["seed"]] if baseline else []
            )
            if not twins:
                continue
            twin = twins[0]
            if self.search.metric == "images_per_s":
                value, base = trial.value("images_per_s"), twin.value("images_per_s")
                ratio = value / base if value and base else None
            else:
                ratio = record.speedup(trial.points, twin.points, self.search.metric)
            if ratio is not None:
                found.append(ratio)
        return estimate(found, ratios=True), len(found)

    def paired(self, group: Group) -> Estimate | None:
        """The difference to the baseline on the same seed: its mean with its interval."""
        baseline = self.compared.baseline
        if baseline is None:
            return None
        base = {trial.config["seed"]: trial.value(self.metric) for trial in baseline.done}
        pairs = [(trial.value(self.metric), base.get(trial.config["seed"])) for trial in group.done]
        return estimate([value - other for value, other in pairs if value is not None and other is not None])

    def bias(self, group: Group) -> tuple[float, float] | None:
        """(value in the search, confirmed mean) of a finalist, in the search's own protocol."""
        found = [t for t in self.search.ranked if _same(t.config, group.runs[0].config)]
        ends = [value for trial in group.done if (value := trial.value(self.search.metric)) is not None]
        if not found or not ends:
            return None
        value = found[0].value(self.search.metric)
        return (value, float(np.mean(ends))) if value is not None else None

    def block(self) -> dict[str, Any]:
        """`key: value` for the end of a search."""
        group = self.winner or self.leader
        said: dict[str, Any] = {"confirmed": "yes" if self.winner is not None else "no"}
        if group is None:
            return said
        label, baseline = self.label, self.compared.baseline
        said["winner" if self.winner is not None else "best_finalist"] = group.name
        said[f"confirmed_{label}"] = _spread(self.values(group))
        if baseline is not None:
            said[f"confirmed_baseline_{label}"] = _spread(self.values(baseline))
        if (paired := self.paired(group)) is not None:
            said["paired_difference"] = str(paired)
        speedup, reached = self.speedup(group)
        if speedup is not None:
            said["confirmed_speedup"] = f"{speedup}, reached in {reached} of {len(group.done)} runs"
        if (bias := self.bias(group)) is not None:
            said["selection_bias"] = f"{number(bias[0])} in the search, {number(bias[1])} on new seeds"
        return said

    @property
    def label(self) -> str:
        """What the deciding number may be called, and over how many images it is."""
        if self.metric == self.search.metric:
            return self.compared.label
        last = next((t.points[-1] for g in self.compared.groups for t in g.done if "final_label" in t.points[-1]), {})
        return str(last.get("final_label", self.metric))

    def sentences(self) -> list[str]:
        """The result in words, the plain answer first."""
        group = self.winner or self.leader
        if group is None:
            return ["No finalist ran to its end: nothing is confirmed."]
        runs = len(self.values(group))
        if self.winner is not None:
            first = f"{group.name} wins: better than the baseline by more than the noise on {runs} new seeds."
        else:
            first = (
                f"No finalist is better than the baseline by more than the noise on {runs} new seeds; the best of them "
                f"is {group.name}."
            )
        said = [first]
        if (bias := self.bias(group)) is not None:
            worth = "worse" if (bias[1] > bias[0]) == (self.search.space.mode == "min") else "better"
            said.append(
                f"Its {self.compared.label} was {number(bias[0])} when the search chose it as one of its best, and is "
                f"{number(bias[1])} on new seeds: {abs(bias[1] / bias[0] - 1):.0%} {worth}."
                if bias[0]
                else f"Its {self.compared.label} is {number(bias[1])} on new seeds."
            )
        return said


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "none"
    sd = f" ± {number(float(np.std(values, ddof=1)))}" if len(values) > 1 else ""
    return number(float(np.mean(values))) + sd


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal but for the seed."""
    return {**one, "seed": 0} == {**other, "seed": 0}


def confirm(search: Results, runs: Results) -> Confirmation:
    """What `runs`, the results of the confirming folder, say about `search`."""
    has_final = any("final_frechet" in point for trial in runs.trials for point in trial.points[-1:])
    metric = "final_frechet" if has_final else search.metric
    return Confirmation(search, comparison.compare(runs, metric), metric)


def latest(found: Results) -> Path | None:
    """The folder of the newest confirming runs, if there are any."""
    newest, number = None, 1
    while (folder := found.folder / folder_name(number)).exists():
        newest, number = folder, number + 1
    return newest


def read(found: Results) -> Confirmation | None:
    """What the newest confirming runs of a search say so far; None without any that ended."""
    if found.space.confirm is None or (folder := latest(found)) is None:
        return None
    runs = results.read(folder)
    return confirm(found, runs) if runs.ranked else None


def winning_trial(found: Results) -> TrialRecord | None:
    """The trial of the search whose configuration was confirmed; None: nothing was."""
    if (told := read(found)) is None or told.winner is None:
        return None
    config = told.winner.runs[0].config
    return next((trial for trial in found.ranked if _same(trial.config, config)), None)


def table(confirmation: Confirmation) -> list[dict[str, Any]]:
    """One row per configuration: mean, sd, paired difference, speed-up, all with intervals, and the verdict."""
    rows = []
    for group in confirmation.compared.groups:
        values = confirmation.values(group)
        paired = confirmation.paired(group) if group.changed else None
        speedup, reached = confirmation.speedup(group) if group.changed else (None, 0)
        rows.append(
            {
                "configuration": knobs(group.changed),
                "runs": len(values),
                "mean": float(np.mean(values)) if values else None,
                "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None,
                **_ends("difference", paired),
                **_ends("speedup", speedup),
                "reached_baseline": reached if group.changed else None,
                "verdict": group.difference.verdict,
            }
        )
    return rows


def text(confirmation: Confirmation) -> str:
    """The table for a terminal."""
    names = ["configuration", "runs", confirmation.label, "difference to baseline", "speed-up", "verdict"]
    lines = [names]
    for group in confirmation.compared.groups:
        speedup, reached = confirmation.speedup(group) if group.changed else (None, 0)
        paired = confirmation.paired(group) if group.changed else None
        verdict = "not told apart" if group.difference.verdict == comparison.SAME else group.difference.verdict
        often = "" if reached == len(group.done) else f", {reached} of {len(group.done)} runs"
        lines.append(
            [
                knobs(group.changed), f"{len(group.done)} of {confirmation.compared.seeds}",
                _spread(confirmation.values(group)), str(paired) if paired is not None else "",
                f"{speedup}{often}" if speedup is not None else "", verdict,
            ]
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def write(confirmation: Confirmation) -> dict[str, Path]:
    """`confirm.csv` and `confirm.md` in the folder of the search."""
    folder = confirmation.search.folder
    rows = table(confirmation)
    pd.DataFrame(rows).to_csv(folder / "confirm.csv", index=False)
    lines = [f"# {folder.name}: confirmed", "", *(f"{said}\n" for said in confirmation.sentences())]
    lines += ["```text", text(confirmation), "```", "", f"- intervals: 95 %, over {confirmation.compared.seeds} seeds"]
    (folder / "confirm.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"confirm.csv": folder / "confirm.csv", "confirm.md": folder / "confirm.md"}


def _ends(name: str, value: Estimate | None) -> dict[str, float | None]:
    if value is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}
