"""Write the files of a report: the page, and its data as tables and pictures in a folder beside
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from tunediff.core.files import write_atomically, write_csv
from tunediff.report import style
from tunediff.report.html import Html, el, join, picture

FOLDER = "report"
"""Name of the folder beside the page that holds its data."""
NAMES = (
    *(
        "curves",
        "trials",
        "won",
        "comparison",
        "study",
        "why",
        "why_curves",
        "step",
        "importance",
        "effects",
    ),
    *(
        "trade_offs",
        "compile",
        "failures",
        "baseline_samples",
        "winner_samples",
        "seconds",
        "longer_*s",
    ),
)
"""Names of all tables and pictures that a report can contain, as patterns of file names."""


class Files:
    """Write the tables and pictures of one report and remember their names."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.written: list[str] = []

    def csv(self, name: str, frame: pd.DataFrame) -> None:
        """Write a table as NAME.csv."""
        write_csv(
            self.folder / f"{name}.csv", frame.columns, frame.itertuples(index=False, name=None)
        )
        self.written.append(f"{name}.csv")

    def chart(
        self, name: str, build: Callable[[], Figure | None], alt: str, *caption: object
    ) -> Html | None:
        """Draw a figure, write it as NAME.png and return it with its caption as HTML.

        None if `build` returns None. alt: description for screen readers.
        """
        if (chart := style.draw(build)) is None:
            return None
        self.keep(f"{name}.png", chart.png)
        return el(
            "figure",
            picture("svg+xml", chart.svg, alt, chart.narrow),
            el("figcaption", *caption, " ", self.links(name)),
        )

    def links(self, name: str) -> Html:
        """Return links to the table and the picture of this name that were written."""
        names = [f"{name}.{end}" for end in ("csv", "png") if f"{name}.{end}" in self.written]
        return listed([el("a", file, href=f"{FOLDER}/{file}") for file in names])

    def keep(self, name: str, content: bytes) -> None:
        """Write a file into the folder."""
        write_atomically(self.folder / name, lambda file: file.write(content))
        self.written.append(name)

    def tidy(self) -> None:
        """Remove files of an earlier report that this one has not written."""
        found = {
            file
            for name in NAMES
            for end in ("csv", "png")
            for file in self.folder.glob(f"{name}.{end}")
        }
        for file in found - {self.folder / name for name in self.written}:
            file.unlink(missing_ok=True)


class Figures(Files):
    """Collect the figures of a report by name, instead of writing anything."""

    def __init__(self) -> None:
        self.written, self.by_name = [], dict[str, Callable[[], Figure | None]]()

    def csv(self, name: str, frame: pd.DataFrame) -> None:
        """Do nothing: a table is no figure."""

    def chart(
        self, name: str, build: Callable[[], Figure | None], alt: str, *caption: object
    ) -> Html | None:
        """Keep what builds the figure of this name."""
        self.by_name[name] = build
        return None

    def keep(self, name: str, content: bytes) -> None:
        """Do nothing: pictures that a training drew are no figures."""


def listed(parts: Sequence[object]) -> Html:
    """Join parts with commas."""
    return join(
        *(
            piece
            for place, part in enumerate(parts)
            for piece in ((", ", part) if place else (part,))
        )
    )
