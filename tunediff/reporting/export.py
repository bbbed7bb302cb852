"""Takes a trial out of a search: a configuration file with its provenance, and the EMA weights."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from tunediff import config as cfg
from tunediff.cli import knobs, number
from tunediff.config import ConfigError
from tunediff.record import TrialRecord
from tunediff.reporting import confirmation
from tunediff.reporting.results import Results


def choose(found: Results, trial: str | None) -> TrialRecord:
    """The trial of that name, else the confirmed winner, else the best. Raises `ConfigError` when there is none."""
    if trial is None and (winner := confirmation.winning_trial(found)) is not None:
        return winner
    if trial is None:
        if found.best is None:
            raise ConfigError(f"{found.folder.name}: no trial has a result yet")
        return found.best
    chosen = next((known for known in found.trials if known.name == trial), None)
    if chosen is None:
        names = ", ".join(known.name for known in found.trials) or "none"
        raise ConfigError(f"--trial: {trial!r} is not in {found.folder.name}; there are: {names}")
    return chosen


def export(found: Results, trial: TrialRecord, to: Path) -> dict[str, str]:
    """Write `to` (YAML) and beside it the weights, if the trial left any. Returns what was written, by kind."""
    config = cfg.from_dict(cfg.nest(trial.config), f"{found.folder.name}/{trial.name}")
    weights = found.folder / "trials" / trial.name / "ema.safetensors"
    written = {"configuration": str(to)}
    to.parent.mkdir(parents=True, exist_ok=True)
    if weights.exists():
        beside = to.with_suffix(".safetensors")
        shutil.copyfile(weights, beside)
        written["weights"] = str(beside)
    to.write_text(cfg.dump(config, provenance(found, trial, to)), encoding="utf-8")
    return written


def provenance(found: Results, trial: TrialRecord, to: Path) -> list[str]:
    """Where the configuration comes from and how to use it; the comment lines above it."""
    value, base = trial.value(found.metric), found.baseline_of(trial)
    config = cfg.from_dict(cfg.nest(trial.config), trial.name)
    environment = trial.environment
    versions = " ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
    lines = [
        f"trial {trial.name} of search {found.folder.name}, exported {time.strftime('%Y-%m-%d')}",
        f"differs from the baseline in: {knobs(cfg.differences(config, found.space.baseline))}",
    ]
    if value is not None:
        result = f"{found.label} {number(value)} after {trial.points[-1]['train_s']:.1f} training seconds"
        if base is not None and (of_base := base.value(found.metric)) is not None:
            result += f"; baseline {number(of_base)}"
        lines.append(result)
    if (told := confirmation.read(found)) is not None:
        lines += told.sentences()
    lines += [
        f"measured on {environment.get('cpu', '?')}, {environment.get('cpu_cores', '?')} cores; {versions}",
        f"train with it: python -m tunediff.train --config {to} --budget {trial.budget_s or 60:.10g}s",
    ]
    return lines
