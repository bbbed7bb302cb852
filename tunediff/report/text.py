"""Print a result as lines of text: `key: value`, the table of its candidates, and sentences."""

from __future__ import annotations

import io
import math
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunediff.analysis import sides
from tunediff.analysis.comparison import Comparison
from tunediff.core import text
from tunediff.core.text import markdown_table, number, rounded
from tunediff.report import reading, sentences
from tunediff.report.result import Result


def width() -> int | None:
    """Return the width of the terminal; None for a file or a pipe, where nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def plain_table(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return a table for a terminal of `width` columns, in which long cells take several lines;
    None: nothing is cut. The first row holds the headings."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in rows[0]:
        grid.add_column(Text(name), overflow="fold")
    for row in rows[1:]:
        grid.add_row(*map(Text, row))
    terminal = Console(file=(written := io.StringIO()), width=width or 10_000, color_system=None)
    terminal.print(grid)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return text.knobs(value)
    return number(value) if text.has_value(value) else ""


def lines(result: Result) -> list[str]:
    """Return a result as lines of text."""
    by, search, columns = result.counts, result.search, width()
    facts: dict[str, Any] = {
        result.kind: result.name,
        "verdict": by.verdict,
        "state": by.state,
        "metric": by.metric,
        "best": result.best,
        "rounds": f"{by.rule.rounds} of at most {by.rule.max_rounds}" if by.rule else None,
        "first_seed": result.sides.first_seed if result.sides is not None else None,
        "trials": search.trials if search is not None else None,
        **{str(k): v for k, v in (search.statuses if search is not None else {}).items()},
        "runs": result.runs,
        "seconds": ", ".join(
            f"{part} {number(spent_s)}" for part, spent_s in result.seconds.items()
        )
        or None,
        "device_s": result.device_s,
        "price": result.price,
        **result.files,
    }
    known = {name: value for name, value in facts.items() if value is not None}
    parts = [
        text.block(known),
        plain_table(candidates_table(by), columns),
        "\n".join(result.summary),
    ]
    for rows in (search.pareto, search.study) if search is not None else ():
        cells = [[_cell(value) for value in row.values()] for row in rows]
        parts += [plain_table([list(rows[0]), *cells], columns)] if rows else []
    return "\n\n".join(filter(None, parts)).splitlines()


def candidates_table(result: Result) -> list[list[str]]:
    """Return headings and a row for each candidate, without empty columns."""
    kinds = [one.effect.kind for one in result.candidates if one.effect is not None]
    rule = result.rule
    confidence = 95.0 if rule is None else 100 * (1 - rule.level * (1 + rule.one_sided))
    # 95.8 is at least 95, and 99.9 is more than 99
    shown = (
        math.floor(round(confidence, 6))
        if confidence < 99
        else 100 - float(f"{100 - confidence:.2g}")
    )
    effect = f"{kinds[0] if kinds else 'effect'} ({shown:g} % interval)"
    rows = [
        {
            "configuration": one.name,
            "verdict": sentences.verdict(one.verdict),
            "runs": f"{len(one.values)} of {one.runs}",
            f"{result.metric}, mean ± sd": sentences.value_of(one),
            effect: sentences.interval(one.effect),
            "speed-up": sentences.speedup(one.speedup) if one.configuration and one.values else "",
            "p (Holm)": text.rounded(one.effect.p_holm) if one.effect is not None else "",
            **{name: text.with_sd(values) for name, values in one.others.items()},
        }
        for one in result.candidates
    ]
    names = [name for name in (rows[0] if rows else {}) if any(row[name] for row in rows)]
    return [names, *([row[name] for name in names] for row in rows)]


def pair_rows(comparison: Comparison) -> list[list[str]]:
    """Return headings and one row per pair: the values that are compared, and who is ahead."""
    label, lines = sides.outcome_label(comparison), []
    for row, pair in enumerate(comparison.rounds):
        a, b = comparison.values[:, row].tolist()
        ahead = (
            ""
            if a != a or b != b
            else "–"
            if a == b
            else "AB"[(b < a) == comparison.lower_is_better]
        )
        # A run without a value shows how it ended
        ends = [str(run.status or "") if run is not None else "" for run in pair]
        shown_values = [rounded(value) or end for value, end in zip((a, b), ends, strict=True)]
        lines.append([str(row + 1), *shown_values, ahead])
    return [["pair", f"A: {label}", f"B: {label}", "ahead"], *lines]


def comment(comparison: Comparison) -> str:
    """Return verdict, sentences and table of pairs in Markdown, for a pull request."""
    result = reading.of_sides(comparison)
    first, *more = result.summary
    rows = markdown_table(pair_rows(comparison))
    details = f"<details><summary>Every pair</summary>\n\n{rows}\n\n</details>"
    return "\n\n".join([f"**tunediff: {result.verdict}.** {first}", *more, details])
