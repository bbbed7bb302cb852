"""The folder of a search, as it is read again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff import space as spaces
from tunediff.config import ConfigError
from tunediff.space import SearchSpace


def space_of(folder: Path, limits: Mapping[str, Any] | None = None) -> SearchSpace:
    """What the search in `folder` searches, with `limits` on top of its `budget:`.

    Raises `ConfigError`, also for the folder of an earlier version, whose knobs meant something else.
    """
    path, base = spaces.of_search(folder), folder / "baseline.yaml"
    if base.is_file() and "workload" not in cfg.read_yaml(base):
        raise ConfigError(
            f"{folder.name}: was made by an earlier version of tunediff and cannot be read: its baseline.yaml does not "
            "say of which workload its knobs are; use that version, or search anew"
        )
    return spaces.load(path, budget=dict(limits or {}))
