"""The best trial of a `tunediff.Search`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tunediff import analysis, export, models
from tunediff.api.calls import called
from tunediff.models import Saved


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
        """Write its configuration to a YAML file, its weights next to it; return the path."""
        with called():
            export.write(analysis.read(self.folder), self.trial, Path(path))
        return Path(path)

    def load(self) -> Saved:
        """Return its model. Raises `ConfigError` where it kept no weights."""
        return models.find(str(self.folder / "trials" / self.trial))
