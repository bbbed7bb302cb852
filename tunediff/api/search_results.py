"""What `tunediff.Search` returns: its verdict and its best trial."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tunediff import analysis, export, models
from tunediff.api.calls import called
from tunediff.models import Saved


@dataclasses.dataclass(frozen=True)
class SearchVerdict:
    """What a search has shown; fields have the names and meanings of the keys in
    `Search.json()`."""

    headline: str
    best_trial: str | None
    best_configuration: dict[str, Any] | None
    best_value: float | None
    best_values: list[float]
    best_failures: int
    baseline_value: float | None
    baseline_values: list[float]
    baseline_failures: int
    better_than_noise: bool | None
    within_noise_of_best: list[str]
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    speedup_at_least: float | None
    speedup_unknown: str | None
    nothing_to_confirm: str | None
    confirmed: bool | None
    winner: dict[str, Any] | None
    finalist: dict[str, Any] | None
    confirmed_metric: str | None
    confirmed_value: float | None
    confirmed_sd: float | None
    confirmed_values: list[float]
    confirmed_failures: int
    confirmed_baseline_value: float | None
    confirmed_baseline_sd: float | None
    confirmed_baseline_values: list[float]
    confirmed_baseline_failures: int
    confirmed_ratio: float | None
    confirmed_ratio_low: float | None
    confirmed_ratio_high: float | None
    confirmed_difference: float | None
    confirmed_difference_low: float | None
    confirmed_difference_high: float | None
    conclusions: list[str]
    sentences: list[str]
    """The verdict of the confirming runs in words; empty without them."""


@dataclasses.dataclass(frozen=True)
class BestTrial:
    """The best trial of a search."""

    trial: str
    """Its name, such as `t0003`."""
    configuration: dict[str, Any]
    """The knobs in which it differs from the baseline, by dotted name."""
    knobs: dict[str, Any]
    """All knobs, by dotted name."""
    value: float | None
    """Mean of the objective over its runs in the search."""
    values: list[float]
    """These runs."""
    folder: Path
    """Folder of the search."""

    def export(self, path: str | Path) -> Path:
        """Write its configuration to a YAML file, and its weights beside it; return the file's
        path."""
        with called():
            export.write(analysis.read(self.folder), self.trial, Path(path))
        return Path(path)

    def load(self) -> Saved:
        """Return its model. Raises `ConfigError` where it kept no weights."""
        return models.find(str(self.folder / "trials" / self.trial))
