"""Which knobs matter: how much of the differences between trials each explains, of quality and of throughput."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from tunediff.report.files import Files
from tunediff.report.html import Html, el, join
from tunediff.report.style import INK, say, sheet
from tunediff.report.subject import Subject, lead, note
from tunediff.report.words import cut, percent, some
from tunediff.results.importance import ENOUGH, FAIR, Importance, searched

MOST = 15
"""Knobs in the figure."""


def importance(subject: Subject, files: Files) -> Html | None:
    """Shares of the knobs, with how far they can be trusted; a ladder's knobs change together and have none."""
    if not searched(subject.found) or not subject.found.ranked or subject.found.space.kind == "ladder":
        return None
    both = {"quality": (subject.label, subject.quality), "throughput": ("images/s", subject.throughput)}
    known = {what: (label, one) for what, (label, one) in both.items() if one is not None}
    if not known:
        trials = len(subject.found.ranked)
        return lead(
            f"Shares of the knobs are given from {ENOUGH} trials with a result on, if a knob varies; "
            f"there {'is' if trials == 1 else 'are'} {trials}."
        )
    verdicts = {effect.knob: effect.verdict for effect in subject.effects}
    names = list(dict.fromkeys(name for _, one in known.values() for name in one.shares))
    shares = {f"{what}_share": [one.shares.get(name) for name in names] for what, (_, one) in known.items()}
    said = [verdicts.get(name, "") for name in names]
    files.csv("importance", pd.DataFrame({"knob": names, **shares, "effect_on_objective": said}))
    figure = files.chart(
        "importance",
        lambda: _drawn({f"{what}: {label}": one for what, (label, one) in known.items()}),
        "share of every knob in the variance of quality and of throughput",
        "fANOVA: the part of the variance of the logarithm that a random forest over all trials puts down to a knob "
        "alone; what is missing to 100 % belongs to combinations of knobs. A knob that does not always apply has its "
        "share where it does. Hollow bars: not to be trusted.",
    )
    unvaried = next(iter(known.values()))[1].unvaried
    return join(
        lead(" ".join(_leading(label, one) for label, one in known.values())),
        figure,
        el("ul", *(el("li", _reliability(label, one)) for label, one in known.values())),
        note(f"One value in all trials: {', '.join(unvaried)}.") if unvaried else None,
    )


def _leading(label: str, one: Importance) -> str:
    if one.doubtful:
        return f"What decides {label} can hardly be told from {some(one.trials, 'trial')}."
    top = [f"{name} ({percent(share)})" for name, share in one.shares.items() if share >= 0.05][:3]
    if not top:
        return f"No knob by itself explains much of the differences in {label}."
    return f"Differences in {label} come most from {', '.join(top)}."


def _reliability(label: str, one: Importance) -> str:
    if one.fit is None:
        return f"{label}: from {some(one.trials, 'trial')}; how far to trust the shares is not known."
    trust = "noise" if one.fit <= 0 else "rather a guess" if one.fit < FAIR else "fair" if one.fit < 0.7 else "good"
    return (
        f"{label}: the shares are {trust}. From {some(one.trials, 'trial')} the forest predicts those that it has not "
        f"seen with R² = {one.fit:.2f} (1: exactly; 0 and less: not at all).".replace("= -", "= −")
    )


def _drawn(columns: Mapping[str, Importance]) -> Figure:
    """One column of bars per target; the knobs in the order of the first one."""
    highest: dict[str, float] = {}
    for one in columns.values():
        highest |= {name: max(share, highest.get(name, 0.0)) for name, share in one.shares.items()}
    names = [name for name in highest if name in sorted(highest, key=lambda name: -highest[name])[:MOST]]
    figure, panels = sheet(len(columns), 0.85 + 0.26 * len(names), sharey=True)
    for axes, (title, one) in zip(panels, columns.items(), strict=True):
        lengths = [100 * one.shares.get(name, 0.0) for name in names]
        axes.barh(range(len(names)), lengths, height=0.62, color="none" if one.doubtful else "#8b887e",
                  edgecolor="#8b887e", linewidth=1.0)  # fmt: skip
        for place, (name, length) in enumerate(zip(names, lengths, strict=True)):
            say(axes, f"{length:.0f} %" if name in one.shares else "–", (length, place), (4, 0), fontsize=8)
        axes.set_title(title)
        axes.set_xlim(0, max(10.0, 1.18 * max(lengths, default=0.0)))
        axes.set_xlabel("share of the variance (%)")
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0, labelcolor=INK)
    panels[0].set_yticks(range(len(names)), [cut(name, 44) for name in names])
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    return figure
