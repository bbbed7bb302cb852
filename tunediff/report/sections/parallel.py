"""All trials at once: every one a line through its knobs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from tunediff.report.files import Files
from tunediff.report.html import Html, join
from tunediff.report.style import INK, MANY, SOFT, Stars, say, sheet
from tunediff.report.subject import Subject, lead
from tunediff.report.words import cut, rounded, some
from tunediff.results import Results, shown
from tunediff.results.importance import searched
from tunediff.results.speed import rate

MOST = 8
"""Axes: the knobs that matter most."""
GAP = 0.12
"""How far below its axis a knob lies that does not apply."""


def parallel(subject: Subject, files: Files) -> Html | None:
    """Parallel coordinates."""
    ranked = subject.found.ranked
    values = {name: {shown(t.drawn[name]) for t in ranked if name in t.drawn} for name in subject.by_weight()}
    names = [name for name in values if len(values[name]) > 1]
    if len(ranked) < 2 or not names:
        return None
    figure = files.chart(
        "parallel",
        lambda: _drawn(subject.found, subject.stars, names[:MOST]),
        "parallel coordinates of all trials",
        "Axes in the order of the search file. At the foot of an axis: the knob does not apply. Data: trials.csv.",
    )
    left, best = len(names) - MOST, _darkest(len(ranked))
    said = f"Each line is one of {some(len(ranked), 'trial')} with a result"
    said += f", the best {best} dark" if len(ranked) > best else ""
    said += f"; {some(left, 'knob that matters', 'knobs that matter')} less left out" if left > 0 else ""
    return join(lead(f"{said}."), figure)


def _darkest(trials: int) -> int:
    """How many of the best are drawn dark."""
    return max(3, min(20, trials // 4))


def _drawn(found: Results, stars: Stars, knobs: Sequence[str]) -> Figure:
    """One line per trial through the values of some knobs, images/s and the objective; better ones are darker."""
    ranked = found.ranked
    dimensions = [dimension for dimension in searched(found) if dimension.name in knobs]
    scales = [_Scale(d.name, [t.drawn.get(d.name) for t in ranked], d.log, d.choices) for d in dimensions]
    if not found.by_rate:
        scales.append(_Scale("images/s", [rate(trial) for trial in ranked]))
    ends = [trial.value(found.metric) or 0.0 for trial in ranked]
    scales.append(_Scale("images/s" if found.by_rate else found.label, ends, all(end > 0 for end in ends)))
    lines = [[(x, scale.places[i]) for x, scale in enumerate(scales)] for i in range(len(ranked))]
    figure, (axes,) = sheet(1, 4.9)
    many, best = len(ranked) > MANY, _darkest(len(ranked))
    order = [i for i in range(len(ranked))[::-1] if stars.color(ranked[i].name) is None]  # the best on top
    grey = [(0.33, 0.32, 0.29, 0.7 if i < best else 0.07 if many else 0.3) for i in order]
    widths = [1.0 if i < best else 0.6 for i in order]
    axes.add_collection(LineCollection([lines[i] for i in order], colors=grey, linewidths=widths, rasterized=many))
    named = []
    for trial, color, what in stars.pairs():
        if (i := next((i for i, one in enumerate(ranked) if one.name == trial.name), None)) is not None:
            named += axes.plot(*zip(*lines[i], strict=True), color=color, linewidth=2.4, label=what, zorder=3)
    box = {"facecolor": "#fdfcf9", "edgecolor": "none", "alpha": 0.78, "pad": 0.8}
    for x, scale in enumerate(scales):
        axes.axvline(x, color=SOFT, linewidth=0.8, zorder=2)
        say(axes, _narrow(scale.name), (x, 1.04), (0, 6), va="baseline", ha="center", fontsize=8, color=INK,
            annotation_clip=False)  # fmt: skip
        for place, label in scale.ticks():
            say(axes, _narrow(label), (x, place), (3, 0), fontsize=7.5, color=INK, zorder=5, bbox=box)
    axes.set_xlim(-0.15, len(scales) - 0.55)
    axes.set_ylim(-0.16 if any(scale.missing for scale in scales) else -0.05, 1.06)
    axes.axis("off")
    if named:
        axes.legend(handles=named, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2)
    return figure


class _Scale:
    """One axis, and where on it the values of all trials lie, 0 to 1; words are spread evenly."""

    def __init__(
        self, name: str, values: Sequence[object], log: bool = False, choices: Sequence[object] | None = None
    ) -> None:
        self.name, known = name, [value for value in values if value is not None]
        self.missing = len(known) < len(values)
        numbers = [float(v) for v in known if isinstance(v, int | float) and not isinstance(v, bool)]
        self.words: list[str] = []
        self.low, self.high, self.log = 0.0, 1.0, False
        if choices is not None or len(numbers) < len(known) or not known:
            seen = set(map(shown, known))
            self.words = [word for word in dict.fromkeys(map(shown, [*(choices or ()), *known])) if word in seen]
        else:
            self.log = log and min(numbers) > 0
            self.low, self.high = self._scaled(min(numbers)), self._scaled(max(numbers))
        self.places = [self._place(value, i) for i, value in enumerate(values)]

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value

    def _at(self, word: int) -> float:
        return word / (len(self.words) - 1) if len(self.words) > 1 else 0.5

    def _place(self, value: object, i: int) -> float:
        """Of trial `i`: a little jitter keeps lines apart that go through the same word."""
        jitter = (i * 0.618034 % 1 - 0.5) * 0.05
        if value is None:
            return 0.4 * jitter - GAP
        if self.words:
            return self._at(self.words.index(shown(value))) + jitter * min(1.0, 2 / max(1, len(self.words) - 1))
        assert isinstance(value, int | float)
        return (self._scaled(value) - self.low) / (self.high - self.low) if self.high > self.low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """Labels beside the axis."""
        missing = [(-GAP - 0.01, "does not apply")] if self.missing else []
        if self.words:
            return [*missing, *((self._at(i), word) for i, word in enumerate(self.words))]
        places = [0.0, 0.25, 0.5, 0.75, 1.0] if self.high > self.low else [0.5]
        values = [self.low + place * (self.high - self.low) for place in places]
        labels = [rounded(math.exp(value) if self.log else value) for value in values]
        return [*missing, *zip(places, labels, strict=True)]


def _narrow(name: str, width: int = 13) -> str:
    """A dotted name on lines that fit between two axes; its breaks are dots, underscores and spaces."""
    lines = [""]
    for word in re.findall(r"[^._ ]+[._ ]?|[._ ]", cut(name, 3 * width)):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip(" ") for line in lines)
