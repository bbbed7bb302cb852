"""What a search leaves in its folder when it ends: tables and figures, made from its journals alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from tunediff.analysis import Results, evidence
from tunediff.analysis.confirmation import Confirmation
from tunediff.core.environment import hardware
from tunediff.core.progress import log_exceptions
from tunediff.core.text import seconds
from tunediff.report import study_figure, study_table
from tunediff.report.context import ruler
from tunediff.report.sections import curves
from tunediff.report.style import Highlights, headline, png
from tunediff.report.verdicts import (
    INTERVALS,
    comparison_table,
    conclusions,
    confirmation_table,
    sentences,
)
from tunediff.report.words import markdown_table, plain_table


def write_all(found: Results) -> dict[str, Path]:
    """Write the tables and figures of a search into its folder; returns their paths by file name.

    trials.csv, curves.csv and curves.png; of two objectives also pareto.csv; of several seeds also comparison.csv,
    comparison.md and comparison.png; of a study also study.csv, study.md and, where it has one, the figure study.png.
    """
    about = [measured] if (measured := ruler(found)) else []
    on = next((f"\nmeasured on {it}" for trial in found.trials if (it := hardware(trial.environment))), "")
    title = "; ".join(about) + on
    known = evidence.read(found)
    written = _csv(found, "trials.csv", known.table()) | _csv(found, "curves.csv", found.curves())
    written |= _png(found, "curves.png", lambda: curves.of_trials(found, Highlights.of(known)), title)
    if found.space.cost is not None:
        written |= _csv(found, "pareto.csv", found.pareto_table())
    if (compared := known.compared) is not None:
        best = compared.of(known.best) if known.best is not None else None
        said = [markdown_table(comparison_table(compared)), "", *(f"- {said}" for said in conclusions(compared))]
        written |= _csv(found, "comparison.csv", compared.table())
        written |= _markdown(found, "comparison.md", found.folder.name, said)
        means = "; ".join([*about, f"{compared.seeds} seeds: mean ± sd"]) + on
        written |= _png(found, "comparison.png", lambda: curves.of_means(compared, best), means)
    return written | (study(found, study_table.table(found)) if found.space.study is not None else {})


def study(found: Results, table: study_table.Table) -> dict[str, Path]:
    """Write the table and the figure of a study; returns their paths by file name."""
    about = measured_on(found)
    lines = [*([about + ".", ""] if about else []), table.markdown()]
    written = _csv(found, "study.csv", table.frame())
    written |= _markdown(found, "study.md", table.study.title or found.folder.name, lines)
    if table.study.has_figure:
        written |= _png(found, "study.png", lambda: study_figure.figure(table, about))
    return written


def confirmation(told: Confirmation) -> dict[str, Path]:
    """Write `confirm.csv` and `confirm.md` into the folder of the search; returns their paths by file name."""
    lines = [*(f"{said}\n" for said in sentences(told)), "```text", plain_table(confirmation_table(told)), "```", ""]
    lines.append(f"- {INTERVALS}")
    title = f"{told.search.folder.name}: {'' if told.winner else 'not '}confirmed{'' if told.over else ' so far'}"
    return _csv(told.search, "confirm.csv", told.table()) | _markdown(told.search, "confirm.md", title, lines)


def measured_on(found: Results) -> str:
    """Device, cores, torch and budget of the trials, in a line; '' before the first one began."""
    known = next((trial.environment for trial in found.trials if "device" in trial.environment), None)
    if known is None:
        return ""
    torch = known.get("versions", {}).get("torch", "?")
    budget = f"{seconds(found.space.budget.per_trial_s)} {found.clock.what}"
    return f"{hardware(known)}, {known.get('cpu_cores', '?')} CPU cores, torch {torch}, {budget} each"


def _csv(found: Results, name: str, frame: pd.DataFrame) -> dict[str, Path]:
    frame.to_csv(path := found.folder / name, index=False)
    return {name: path}


def _markdown(found: Results, name: str, title: str, lines: Sequence[str]) -> dict[str, Path]:
    (path := found.folder / name).write_text("\n".join([f"# {title}", "", *lines]) + "\n", encoding="utf-8")
    return {name: path}


def _png(found: Results, name: str, build: Callable[[], Figure], about: str = "") -> dict[str, Path]:
    """A figure of the report; it will stand alone, and gets a title where it has none."""

    def titled() -> Figure:
        figure = build()
        if about:
            headline(figure, f"{found.folder.name}: {about}".replace(": \n", "\n"))
        return figure

    path, drawn = found.folder / name, list[bytes | None]()
    if log_exceptions(name, lambda: drawn.append(png(titled))) and drawn[0] is not None:
        path.write_bytes(drawn[0])
    return {name: path}
