"""What a search leaves in its folder when it ends: tables and figures, made from its journals alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from tunediff.cli import seconds
from tunediff.report import study_figure, study_table
from tunediff.report.sections import curves, seeds
from tunediff.report.style import Stars, draw, drawing
from tunediff.report.subject import sampled
from tunediff.report.verdicts import comparison_table, conclusions, confirmation_table, sentences
from tunediff.report.words import markdown_table, plain_table
from tunediff.results import Results
from tunediff.results.comparison import compare
from tunediff.results.confirmation import Confirmation


def write_all(found: Results) -> dict[str, Path]:
    """Write the tables and figures of a search into its folder; returns their paths by file name.

    trials.csv, curves.csv and curves.png; of two objectives also pareto.csv; of several seeds also comparison.csv,
    comparison.md and comparison.png; of a study also study.csv, study.md and, where it has one, the figure study.png.
    """
    written = _paths(found, "trials.csv", "curves.csv", "curves.png")
    found.table().to_csv(written["trials.csv"], index=False)
    found.curves().to_csv(written["curves.csv"], index=False)
    about = f"{found.space.baseline.evaluation.images:,} images, {sampled(found, ' ')}"
    grey = "grey: other trials" if found.by_rate else f"{about}; grey: other trials"
    _draw(found, grey, lambda: curves.drawn(found, Stars.of(found, found.best)), written["curves.png"])
    if found.space.cost is not None:
        written |= _paths(found, "pareto.csv")
        found.pareto_table().to_csv(written["pareto.csv"], index=False)
    if found.space.seeds > 1:
        compared = compare(found)
        written |= _paths(found, "comparison.csv", "comparison.md", "comparison.png")
        compared.table().to_csv(written["comparison.csv"], index=False)
        lines = [markdown_table(comparison_table(compared)), "", *(f"- {said}" for said in conclusions(compared))]
        _write(written["comparison.md"], [f"# {found.folder.name}", "", *lines])
        means = f"{about}, {compared.seeds} seeds: mean ± sd"
        _draw(found, means, lambda: seeds.drawn(compared), written["comparison.png"])
    return written | (study(found, study_table.table(found)) if found.space.study is not None else {})


def study(found: Results, table: study_table.Table) -> dict[str, Path]:
    """Write the table and the figure of a study; returns their paths by file name."""
    drawn = ("study.png",) if table.study.has_figure else ()
    written = _paths(found, "study.csv", "study.md", *drawn)
    table.frame().to_csv(written["study.csv"], index=False)
    about = measured_on(found)
    title = f"# {table.study.title or found.folder.name}"
    _write(written["study.md"], [title, "", *([about + ".", ""] if about else []), table.markdown()])
    if table.study.has_figure:
        draw_study(found, table, written["study.png"])
    return written


def draw_study(found: Results, table: study_table.Table, path: Path) -> None:
    """Draw the figure of a study as all figures look. Writes a PNG."""
    with drawing():
        study_figure.draw(table, measured_on(found), path)


def confirmation(told: Confirmation) -> dict[str, Path]:
    """Write `confirm.csv` and `confirm.md` into the folder of the search; returns their paths by file name."""
    written = _paths(told.search, "confirm.csv", "confirm.md")
    told.table().to_csv(written["confirm.csv"], index=False)
    lines = [f"# {told.search.folder.name}: confirmed", "", *(f"{said}\n" for said in sentences(told)), "```text"]
    lines += [
        plain_table(confirmation_table(told)),
        "```",
        "",
        f"- intervals: 95 %, over {told.compared.seeds} seeds",
    ]
    _write(written["confirm.md"], lines)
    return written


def measured_on(found: Results) -> str:
    """Device, cores, torch and budget of the trials, in a line; '' before the first one began."""
    known = next((trial.environment for trial in found.trials if "device" in trial.environment), None)
    if known is None:
        return ""
    where = known.get("cpu", "CPU") if known["device"] == "cpu" else known["device"]
    torch = known.get("versions", {}).get("torch", "?")
    budget = seconds(found.space.budget.per_trial_s)
    return f"{where}, {known.get('cpu_cores', '?')} CPU cores, torch {torch}, {budget} training each"


def _draw(found: Results, about: str, build: Callable[[], Figure], path: Path) -> None:
    """A figure of the report, with a title, for it will stand alone."""

    def titled() -> Figure:
        (figure := build()).suptitle(f"{found.folder.name}: {about}", fontsize=10)
        return figure

    if (chart := draw(titled)) is not None:
        path.write_bytes(chart.png)


def _paths(found: Results, *names: str) -> dict[str, Path]:
    return {name: found.folder / name for name in names}


def _write(path: Path, lines: Sequence[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
