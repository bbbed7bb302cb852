"""The files that are written about a search: the page, and its data as tables and pictures beside it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from tunediff.report import style
from tunediff.report.html import Html, el, join, picture

FOLDER = "report"
"""Beside the page: its data."""
NAMES = (
    *("curves", "trials", "won", "comparison", "study", "why", "why_curves", "step", "importance", "effects"),
    *("trade_offs", "compile", "failures", "baseline_samples", "winner_samples", "seconds", "hold"),
)
"""Of all tables and pictures that there may be."""


class Files:
    """The folder of tables and pictures beside the page."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.written: list[str] = []

    def csv(self, name: str, frame: pd.DataFrame) -> None:
        """Write a table. Text that a spreadsheet would take for a formula gets an apostrophe in front."""
        safe = pd.DataFrame({_no_formula(str(name)): list(map(_no_formula, frame[name])) for name in frame.columns})
        self.keep(f"{name}.csv", safe.to_csv(index=False).encode("utf-8", "replace"))

    def chart(self, name: str, build: Callable[[], Figure | None], alt: str, *caption: object) -> Html | None:
        """A figure with its caption; None where there is nothing to draw."""
        if (chart := style.draw(build)) is None:
            return None
        self.keep(f"{name}.png", chart.png)
        return el(
            "figure",
            picture("svg+xml", chart.svg, alt, chart.narrow),
            el("figcaption", *caption, " ", self.links(name)),
        )

    def links(self, name: str) -> Html:
        """Where the data of a section lie."""
        known = [f"{name}.{end}" for end in ("csv", "png") if f"{name}.{end}" in self.written]
        return listed([el("a", file, href=f"{FOLDER}/{file}") for file in known])

    def keep(self, name: str, content: bytes) -> None:
        """Write a file."""
        write(self.folder / name, content)
        self.written.append(name)

    def tidy(self) -> None:
        """Remove what an earlier report left and this one does not have."""
        for file in {f"{name}.{end}" for name in NAMES for end in ("csv", "png")} - set(self.written):
            (self.folder / file).unlink(missing_ok=True)


def listed(parts: Sequence[object]) -> Html:
    """Parts with commas between them."""
    return join(*(piece for place, part in enumerate(parts) for piece in ((", ", part) if place else (part,))))


def write(path: Path, content: bytes) -> None:
    """All or nothing: a browser that loads the page again never sees half of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(tuple("=+-@\t\r")) else value
