"""What a search found, read from its folder: needs neither torch nor ray, and works while the search runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd

from tunediff import cli, record, space
from tunediff import config as cfg
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
        """The trial of the baseline; of several seeds, the first."""
        return self._with_seed(self.space.baseline.seed)

    def baseline_of(self, trial: TrialRecord) -> TrialRecord | None:
        """What a trial is compared with: the baseline's run with the same seed."""
        return self._with_seed(trial.config["seed"])

    def _with_seed(self, seed: int) -> TrialRecord | None:
        fingerprint = cfg.fingerprint(dataclasses.replace(self.space.baseline, seed=seed))
        return next((trial for trial in self.trials if trial.fingerprint == fingerprint), None)

    @property
    def groups(self) -> list[list[TrialRecord]]:
        """Trials that differ in their seed only, together; in order of their first ones."""
        found: dict[str, list[TrialRecord]] = {}
        for trial in self.trials:
            found.setdefault(_configuration(trial), []).append(trial)
        return list(found.values())

    @property
    def ranked(self) -> list[TrialRecord]:
        """Successful trials, the best first."""
        done = [trial for trial in self.trials if trial.value(self.metric) is not None]
        return sorted(done, key=lambda trial: trial.value(self.metric) or 0.0, reverse=self.space.mode == "max")

    @property
    def best(self) -> TrialRecord | None:
        """The best successful trial; with several seeds that of the best mean, so that luck does not choose.

        Only configurations with as many successful runs as any are looked at.
        """
        runs: dict[str, list[TrialRecord]] = {}
        for trial in self.ranked:
            runs.setdefault(_configuration(trial), []).append(trial)
        if not runs:
            return None
        most = max(map(len, runs.values()))
        choose = max if self.space.mode == "max" else min
        full = [trials for trials in runs.values() if len(trials) == most]
        return choose(full, key=lambda trials: sum(trial.value(self.metric) or 0.0 for trial in trials))[0]

    @property
    def pareto(self) -> list[TrialRecord]:
        """The trade-offs of a search with two objectives: no other trial is as good in both and better in one.

        From the best of the first objective to the smallest of the second.
        """
        cost = self.space.cost
        assert cost is not None
        front: list[TrialRecord] = []
        for trial in sorted(self.ranked, key=lambda t: (self._loss(t), t.value(cost) or 0.0)):
            value = trial.value(cost)
            if value is not None and (not front or value < (front[-1].value(cost) or 0.0)):
                front.append(trial)
        return front

    def pareto_table(self) -> pd.DataFrame:
        """`pareto` as rows: trial, both objectives by their names, versus_baseline, configuration (what it changes)."""
        assert self.space.cost is not None
        rows = []
        for trial in self.pareto:
            objectives = {name: trial.value(name) for name in (self.metric, self.space.cost)}
            changed = cfg.differences(cfg.from_dict(cfg.nest(trial.config), trial.name), self.space.baseline)
            said = {"versus_baseline": self.versus_baseline(trial), "configuration": cli.knobs(changed)}
            rows.append({"trial": trial.name, **objectives, **said})
        return pd.DataFrame(rows)

    def _loss(self, trial: TrialRecord) -> float:
        """The objective, turned so that smaller is better."""
        value = trial.value(self.metric) or 0.0
        return -value if self.space.mode == "max" else value

    def versus_baseline(self, trial: TrialRecord) -> float | None:
        """Objective over the baseline's objective, of the same seed."""
        baseline = self.baseline_of(trial)
        base, value = baseline.value(self.metric) if baseline is not None else None, trial.value(self.metric)
        return value / base if value is not None and base else None

    def speedup(self, trial: TrialRecord) -> float | None:
        """Training seconds of the baseline over those until this trial is as good, or the ratio of throughputs."""
        if (baseline := self.baseline_of(trial)) is None:
            return None
        if self.metric == "images_per_s":
            return self.versus_baseline(trial)
        return record.speedup(trial.points, baseline.points)

    def seconds(self) -> dict[str, float]:
        """Where the workers' seconds went, over all trials."""
        parts = dict.fromkeys(("train", "data_wait", "compile", "evaluation", "checkpoint", "setup"), 0.0)
        for trial in self.trials:
            spent = trial.end.get("seconds") or (trial.points[-1]["seconds"] if trial.points else {})
            for part, value in spent.items():
                parts[part] = parts.get(part, 0.0) + value
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
                    **{
                        k: last.get(k)
                        for k in (
                            "train_s",
                            "worker_s",
                            "images",
                            "images_per_s",
                            "step_s",
                            "data_wait_share",
                            "kid",
                            "peak_memory_mib",
                        )
                    },
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


def _configuration(trial: TrialRecord) -> str:
    """What a trial was drawn with but for its seed, as a key."""
    return json.dumps({name: value for name, value in trial.drawn.items() if name != "seed"}, sort_keys=True)


def read(folder: Path) -> Results:
    """The results of a search folder. Raises `ConfigError` if it is none."""
    return Results(folder, space.load(space.of_search(folder)), record.read_trials(folder))
