"""Write the tables and figures that a search leaves in its folder; they are made from its journals
alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from tunediff.analysis import Results
from tunediff.analysis.confirmation import Confirmation
from tunediff.analysis.evidence import read as read_evidence
from tunediff.analysis.pareto import pareto_table
from tunediff.core.environment import hardware
from tunediff.core.files import write_csv
from tunediff.core.progress import log_exceptions
from tunediff.core.text import seconds
from tunediff.report import study_figure, study_table
from tunediff.report.context import protocol
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

CONFIRMATION = "confirm.md"
"""The file that says what the confirming runs of a search show."""


def write_all(results: Results) -> dict[str, Path]:
    """Write the tables and figures of a search into its folder and return their paths by file name.

    Always trials.csv, curves.csv and curves.png. With two objectives also pareto.csv; with several
    seeds also comparison.csv, comparison.md and comparison.png; for a study also study.csv,
    study.md and, if it has a figure, study.png.
    """
    # Titles name the evaluation protocol and the hardware.
    about = [measured] if (measured := protocol(results)) else []
    used = dict.fromkeys(filter(None, (hardware(trial.environment) for trial in results.trials)))
    on = f"\nmeasured on {' and '.join(used)}" if used else ""
    title = "; ".join(about) + on
    evidence = read_evidence(results)
    written = _csv(results, "trials.csv", evidence.table()) | _csv(
        results, "curves.csv", results.curves()
    )
    written |= _png(
        results, "curves.png", lambda: curves.of_trials(results, Highlights.of(evidence)), title
    )
    if results.space.cost is not None:
        written |= _csv(results, "pareto.csv", pareto_table(results))
    # Several seeds: a comparison of the configurations.
    if (compared := evidence.compared) is not None:
        best = compared.of(evidence.best) if evidence.best is not None else None
        lines = [
            markdown_table(comparison_table(compared)),
            "",
            *(f"- {sentence}" for sentence in conclusions(compared)),
        ]
        written |= _csv(results, "comparison.csv", compared.table())
        written |= _markdown(results, "comparison.md", results.folder.name, lines)
        means = "; ".join([*about, f"{compared.seeds} seeds: mean ± sd"]) + on
        written |= _png(results, "comparison.png", lambda: curves.of_means(compared, best), means)
    return written | (
        study(results, study_table.table(results)) if results.space.study is not None else {}
    )


def study(results: Results, table: study_table.Table) -> dict[str, Path]:
    """Write the table and the figure of a study and return their paths by file name."""
    about = measured_on(results)
    lines = [*([about + ".", ""] if about else []), table.markdown()]
    written = _csv(results, "study.csv", table.frame())
    written |= _markdown(results, "study.md", table.study.title or results.folder.name, lines)
    if table.study.has_figure:
        written |= _png(results, "study.png", lambda: study_figure.figure(table, about))
    return written


def confirmation(confirmation: Confirmation) -> dict[str, Path]:
    """Write `confirm.csv` and `confirm.md` into the folder of the search and return their paths by
    file name."""
    search, table = confirmation.search, plain_table(confirmation_table(confirmation))
    lines = [
        *(f"{sentence}\n" for sentence in sentences(confirmation)),
        "```text",
        table,
        "```",
        "",
    ]
    lines.append(f"- {INTERVALS}")
    state = (
        f"{'' if confirmation.winner else 'not '}confirmed{'' if confirmation.over else ' so far'}"
    )
    written = _csv(search, "confirm.csv", confirmation.table())
    return written | _markdown(search, CONFIRMATION, f"{search.folder.name}: {state}", lines)


def measured_on(results: Results) -> str:
    """Return device, cores, torch version and budget of the trials in one line; '' if no trial has
    begun."""
    environment = next(
        (trial.environment for trial in results.trials if "device" in trial.environment), None
    )
    if environment is None:
        return ""
    torch = environment.get("versions", {}).get("torch", "?")
    budget = f"{seconds(results.space.budget.per_trial_s)} {results.clock.what}"
    return (
        f"{hardware(environment)}, {environment.get('cpu_cores', '?')} CPU cores, torch {torch},"
        f" {budget} each"
    )


def _csv(results: Results, name: str, frame: pd.DataFrame) -> dict[str, Path]:
    write_csv(
        path := results.folder / name, frame.columns, frame.itertuples(index=False, name=None)
    )
    return {name: path}


def _markdown(results: Results, name: str, title: str, lines: Sequence[str]) -> dict[str, Path]:
    (path := results.folder / name).write_text(
        "\n".join([f"# {title}", "", *lines]) + "\n", encoding="utf-8"
    )
    return {name: path}


def _png(
    results: Results, name: str, build: Callable[[], Figure], about: str = ""
) -> dict[str, Path]:
    """Write a figure of the report with a title, because it will be shown alone; an error leaves it
    out."""

    def titled() -> Figure:
        figure = build()
        if about:
            headline(figure, f"{results.folder.name}: {about}".replace(": \n", "\n"))
        return figure

    path, drawn = results.folder / name, list[bytes | None]()
    if log_exceptions(name, lambda: drawn.append(png(titled))) and drawn[0] is not None:
        path.write_bytes(drawn[0])
    return {name: path}
