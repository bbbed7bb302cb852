"""Draw the figures of a report, each as one SVG that is embedded in the page."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from tunediff.report import style
from tunediff.report.html import Html, el, picture

Build = Callable[[], Figure | None]


class Figures:
    """The figures of one report."""

    def __init__(self, drawn: bool = True) -> None:
        """`drawn`: whether to draw them; else only `builders` is filled."""
        self._drawn = drawn
        self.builders: dict[str, Build] = {}
        """What builds each figure, by name."""

    def chart(self, name: str, build: Build, alt: str, *caption: object) -> Html | None:
        """Draw a figure and return it with its caption as HTML; None if `build` returns None.

        alt: description for screen readers.
        """
        self.builders[name] = build
        if not self._drawn or (svg := style.draw(build, "svg")) is None:
            return None
        return el("figure", picture("svg+xml", svg, alt), el("figcaption", *caption))
