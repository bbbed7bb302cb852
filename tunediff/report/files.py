"""Write the data of a report as tables and pictures into a folder next to its page."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from tunediff.core.files import write_atomically, write_csv
from tunediff.report import style
from tunediff.report.html import Html, el, join, picture

FOLDER = "report"
"""Name of the folder next to the page."""
NAMES = [
    "curves",
    "confirmed",
    "trials",
    "won",
    "comparison",
    "study",
    "why",
    "why_curves",
    "step",
    "importance",
    "effects",
    "trade_offs",
    "compile",
    "failures",
    "baseline_samples",
    "winner_samples",
    "seconds",
    "longer_*s",
    "pairs",
]
"""All tables and pictures that a report can contain, as patterns of file names."""

Build = Callable[[], Figure | None]


class Files:
    """Write the tables and pictures of one report and remember their names."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: to write into; None: nothing is drawn or written, only `figures` is filled."""
        self.folder = folder
        self.written: list[str] = []
        self.figures: dict[str, Build] = {}
        """What builds each figure, by name."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def csv(self, name: str, frame: pd.DataFrame) -> None:
        """Write a table as NAME.csv."""
        if self.folder is not None:
            rows = frame.itertuples(index=False, name=None)
            write_csv(self.folder / f"{name}.csv", frame.columns, rows)
            self.written.append(f"{name}.csv")

    def chart(self, name: str, build: Build, alt: str, *caption: object) -> Html | None:
        """Draw a figure, write it as NAME.png and return it with its caption as HTML.

        None if `build` returns None. alt: description for screen readers.
        """
        self.figures[name] = build
        if self.folder is None or (chart := style.draw(build)) is None:
            return None
        self.keep(f"{name}.png", chart.png)
        image = picture("svg+xml", chart.svg, alt, chart.narrow)
        return el("figure", image, el("figcaption", *caption, " ", self.links(name)))

    def keep(self, name: str, content: bytes) -> None:
        """Write a file into the folder."""
        if self.folder is not None:
            write_atomically(self.folder / name, lambda file: file.write(content))
            self.written.append(name)

    def links(self, name: str = "*") -> Html:
        """Return links to the table and the picture of this name; by default to all files."""
        names = sorted(self.written)
        if name != "*":
            names = [file for file in (f"{name}.csv", f"{name}.png") if file in self.written]
        return listed([el("a", file, href=f"{FOLDER}/{file}") for file in names])

    def tidy(self) -> None:
        """Remove files of an earlier report that this one has not written."""
        if self.folder is None:
            return
        earlier = (self.folder.glob(f"{name}.{end}") for name in NAMES for end in ("csv", "png"))
        for file in itertools.chain.from_iterable(earlier):
            if file.name not in self.written:
                file.unlink(missing_ok=True)


def listed(parts: Sequence[object]) -> Html:
    """Join parts with commas."""
    return join(*(join(", " if i else "", part) for i, part in enumerate(parts)))
