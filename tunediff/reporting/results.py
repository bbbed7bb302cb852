"""What a search found, read from its folder: needs neither torch nor ray, and works while the search runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd

from tunediff import record, space
from tunediff.record import TrialRecord
from tunediff.space import SearchSpace


@dataclasses.dataclass
class Results:
    """The trials of a search and what follows from them."""

    folder: Path
    space: SearchSpace
    trials: list[TrialRecord]

    @property
    def metric(self) -> str:
        """The objective: frechet or images_per_s."""
        return self.space.metric

    @property
    def label(self) -> str:
        """What the objective may be called: FID only for Inception with its reference weights."""
        if self.metric != "frechet":
            return self.metric
        return next((point["label"] for trial in self.trials for point in trial.points if "label" in point), "FD")

    @property
    def baseline(self) -> TrialRecord | None:
        """The trial of the baseline."""
        from tunediff import config as cfg

        fingerprint = cfg.fingerprint(self.space.baseline)
        return next((trial for trial in self.trials if trial.fingerprint == fingerprint), None)

    @property
    def ranked(self) -> list[TrialRecord]:
        """Successful trials, the best first."""
        done = [trial for trial in self.trials if trial.value(self.metric) is not None]
        return sorted(done, key=lambda trial: trial.value(self.metric) or 0.0, reverse=self.space.mode == "max")

    @property
    def best(self) -> TrialRecord | None:
        """The best successful trial."""
        return self.ranked[0] if self.ranked else None

    def versus_baseline(self, trial: TrialRecord) -> float | None:
        """Objective over the baseline's objective."""
        base = self.baseline.value(self.metric) if self.baseline is not None else None
        value = trial.value(self.metric)
        return value / base if value is not None and base else None

    def speedup(self, trial: TrialRecord) -> float | None:
        """Training seconds of the baseline over those until this trial is as good, or the ratio of throughputs."""
        if self.baseline is None:
            return None
        if self.metric == "images_per_s":
            return self.versus_baseline(trial)
        return record.speedup(trial.points, self.baseline.points)

    def seconds(self) -> dict[str, float]:
        """Where the workers' seconds went, over all trials."""
        parts = dict.fromkeys(("train", "data_wait", "compile", "evaluation", "checkpoint", "setup"), 0.0)
        for trial in self.trials:
            spent = trial.end.get("seconds") or (trial.points[-1]["seconds"] if trial.points else {})
            for part, value in spent.items():
                parts[part] += value
        return parts

    def table(self) -> pd.DataFrame:
        """One row per trial: status, objective, rates, and every knob by its dotted name."""
        rows = []
        for trial in self.trials:
            last = trial.points[-1] if trial.points else {}
            rows.append(
                {
                    "trial": trial.name,
                    "status": trial.status or "running",
                    self.metric: last.get(self.metric),
                    "versus_baseline": self.versus_baseline(trial),
                    "speedup": self.speedup(trial) if trial.status == "ok" else None,
                    **{k: last.get(k) for k in ("train_s", "images", "images_per_s", "kid", "peak_memory_mib")},
                    "reason": trial.reason,
                    **trial.config,
                }
            )
        return pd.DataFrame(rows)

    def curves(self) -> pd.DataFrame:
        """One row per evaluation of every trial."""
        rows: list[dict[str, Any]] = []
        for trial in self.trials:
            for point in trial.points:
                hidden = ("event", "time", "seconds")
                rows.append({"trial": trial.name} | {key: value for key, value in point.items() if key not in hidden})
        return pd.DataFrame(rows)


def read(folder: Path) -> Results:
    """The results of a search folder. Raises `ConfigError` if it is none."""
    return Results(folder, space.load(space.of_search(folder)), record.read_trials(folder))
