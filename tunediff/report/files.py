"""Write the tables that a search or a comparison leaves in its folder, from its journals alone."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from tunediff.analysis import Results
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.evidence import read as read_evidence
from tunediff.analysis.pareto import pareto_table
from tunediff.analysis.statistics import mean
from tunediff.core.files import write_csv
from tunediff.core.progress import log_exceptions
from tunediff.core.text import markdown_table
from tunediff.report import reading, style, tables
from tunediff.report import study as studies


def write_search(results: Results) -> list[str]:
    """Write the tables of a search into its folder and return their names.

    Always trials.csv and curves.csv. With two objectives also pareto.csv; with several seeds also
    comparison.csv; for a study also study.csv, study.md and, if it has a figure, study.png.
    """
    evidence = read_evidence(results)
    frames = {"trials.csv": tables.trials_frame(evidence), "curves.csv": results.curves()}
    if results.space.cost is not None:
        frames["pareto.csv"] = pareto_table(results)
    if evidence.compared is not None:
        frames["comparison.csv"] = _candidates(evidence.compared)
    if results.space.study is None:
        return _write(results.folder, frames)
    table, about = studies.table(results), studies.measured_on(results)
    notes = [f"- {note}" for note in table.notes()]
    lines = [
        f"# {table.study.title or results.folder.name}",
        about,
        markdown_table(table.cells(80)),
        *notes,
    ]
    names = _write(results.folder, {**frames, "study.csv": table.frame()})
    (results.folder / "study.md").write_text(
        "\n\n".join(filter(None, lines)) + "\n", encoding="utf-8"
    )
    if table.study.has_figure:
        names.append("study.png")
        log_exceptions("study.png", _draw, table, about, results.folder / "study.png")
    return [*names, "study.md"]


def _candidates(compared: Comparison) -> pd.DataFrame:
    """Return one row per candidate by the keys of a result, such as `effect_low`."""
    rows = list[dict[str, object]]()
    for one in compared.candidates:
        found = reading.candidate_of(compared, one, configuration=one.runs[0].knobs)
        others = {name: mean(values) for name, values in found.others.items()}
        rows.append(found.model_dump(exclude={"values", "holdout"}) | {"others": others})
    return pd.json_normalize(rows, sep="_").dropna(axis="columns", how="all")


def write_sides(comparison: Comparison) -> list[str]:
    """Write pairs.csv into the folder of a comparison."""
    return _write(comparison.folder, {"pairs.csv": tables.pairs_frame(comparison)})


def _write(folder: Path, frames: dict[str, pd.DataFrame]) -> list[str]:
    for name, frame in frames.items():
        write_csv(folder / name, frame.columns, frame.itertuples(index=False, name=None))
    return [*frames]


def _draw(table: studies.StudyTable, about: str, path: Path) -> None:
    path.write_bytes(style.draw(lambda: studies.figure(table, about), "png") or b"")
