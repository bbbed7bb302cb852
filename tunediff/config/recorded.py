"""Find the file that trained results: their own copy, wherever the folder has been moved."""

from __future__ import annotations

from pathlib import Path

from tunediff.config.code import FOLDER
from tunediff.config.workload import is_users

CONFIG = "config.yaml"
SIDES = ("A", "B")
"""Folders inside that of a comparison, each with a configuration."""


def trained_by(name: str, folder: Path) -> str:
    """Return the workload of a journal or checkpoint in `folder`, which may have moved with the
    copy that its search, comparison or training has."""
    parts = Path(name).parts
    if not is_users(name) or FOLDER not in parts:
        return name
    start = len(parts) - 1 - parts[::-1].index(FOLDER)
    inside = [Path(*parts[first:]) for first in (start, start - 1)]  # of a comparison: A/workload/
    places = (root / one for root in (folder, *folder.parents[:2]) for one in inside)
    return str(next((file.absolute() for file in places if file.is_file()), name))
