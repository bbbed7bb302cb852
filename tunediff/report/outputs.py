"""Write the tables and figures that a search leaves in its folder, from its journals alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from tunediff.analysis import Results
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.evidence import read as read_evidence
from tunediff.analysis.pareto import pareto_table
from tunediff.core.environment import hardware
from tunediff.core.files import write_csv
from tunediff.core.progress import log_exceptions
from tunediff.core.text import seconds
from tunediff.report import study as studies
from tunediff.report.context import Highlights, protocol
from tunediff.report.sections import curves, seeds
from tunediff.report.style import add_title, draw
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

Written = dict[str, Path]
"""Paths by file name."""


def write_all(results: Results) -> Written:
    """Write the tables and figures of a search into its folder and return their paths by file name.

    Always trials.csv, curves.csv and curves.png. With two objectives also pareto.csv; with several
    seeds also comparison.csv, comparison.md and comparison.png; for a study also study.csv,
    study.md and, if it has a figure, study.png.
    """
    # Titles name the evaluation protocol and the hardware.
    about = protocol(results)
    used = dict.fromkeys(filter(None, (hardware(trial.environment) for trial in results.trials)))
    measured = f"\nmeasured on {' and '.join(used)}" if used else ""
    evidence = read_evidence(results)
    highlights = Highlights.of(evidence)
    written = _csv(results.folder, "trials.csv", evidence.table())
    written |= _csv(results.folder, "curves.csv", results.curves())
    written |= _png(
        results, "curves.png", lambda: curves.of_trials(results, highlights), about + measured
    )
    if results.space.cost is not None:
        written |= _csv(results.folder, "pareto.csv", pareto_table(results))
    if (compared := evidence.compared) is not None:
        best = compared.candidate_of(evidence.best) if evidence.best is not None else None
        lines = [markdown_table(comparison_table(compared)), ""]
        lines += [f"- {sentence}" for sentence in conclusions(compared)]
        means = (
            f"{about}; " * bool(about) + f"{compared.rules.max_rounds} seeds: mean ± sd{measured}"
        )
        written |= _csv(results.folder, "comparison.csv", compared.table())
        written |= _markdown(results.folder, "comparison.md", results.folder.name, lines)
        written |= _png(results, "comparison.png", lambda: seeds.of_means(compared, best), means)
    if results.space.study is not None:
        written |= study(results, studies.table(results))
    return written


def study(results: Results, table: studies.StudyTable) -> Written:
    """Write the table and the figure of a study and return their paths by file name."""
    about, title = measured_on(results), table.study.title or results.folder.name
    lines = [*([about + ".", ""] if about else []), markdown_table(table.cells(80)), ""]
    lines += [f"- {note}" for note in table.notes()]
    written = _csv(results.folder, "study.csv", table.frame())
    written |= _markdown(results.folder, "study.md", title, lines)
    if table.study.has_figure:
        written |= _png(results, "study.png", lambda: studies.figure(table, about))
    return written


def confirmation(confirmation: Comparison) -> Written:
    """Write `confirm.csv` and `confirm.md` for the search; return their paths by file name."""
    search, table = (
        confirmation.results.folder.parent,
        plain_table(confirmation_table(confirmation)),
    )
    lines = [f"{sentence}\n" for sentence in sentences(confirmation)]
    lines += ["```text", table, "```", "", f"- {INTERVALS}"]
    confirmed = "confirmed" if confirmation.winner else "not confirmed"
    title = f"{search.name}: {confirmed}{'' if confirmation.ended else ' so far'}"
    written = _csv(search, "confirm.csv", confirmation.table())
    return written | _markdown(search, CONFIRMATION, title, lines)


def measured_on(results: Results) -> str:
    """Return device, cores, torch version and budget in one line; '': no trial has begun."""
    environments = (trial.environment for trial in results.trials)
    environment = next((known for known in environments if "device" in known), None)
    if environment is None:
        return ""
    cores = f"{environment.get('cpu_cores', '?')} CPU cores"
    torch = f"torch {environment.get('versions', {}).get('torch', '?')}"
    budget = f"{seconds(results.space.budget.per_trial_s)} {results.clock.what} each"
    return f"{hardware(environment)}, {cores}, {torch}, {budget}"


def _csv(folder: Path, name: str, frame: pd.DataFrame) -> Written:
    path = folder / name
    write_csv(path, frame.columns, frame.itertuples(index=False, name=None))
    return {name: path}


def _markdown(folder: Path, name: str, title: str, lines: Sequence[str]) -> Written:
    path = folder / name
    path.write_text("\n".join([f"# {title}", "", *lines]) + "\n", encoding="utf-8")
    return {name: path}


def _png(results: Results, name: str, build: Callable[[], Figure], about: str = "") -> Written:
    """Write a figure of the report with a title of its own; an error leaves it out."""

    def write() -> None:
        def titled() -> Figure:
            figure = build()
            if about:
                add_title(figure, f"{results.folder.name}: {about}".replace(": \n", "\n"))
            return figure

        if (content := draw(titled, "png")) is not None:
            path.write_bytes(content)

    path = results.folder / name
    log_exceptions(name, write)
    return {name: path}
