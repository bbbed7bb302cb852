"""Show a search as one live table in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tunediff.analysis import curve, last
from tunediff.analysis.journals import Throttle
from tunediff.analysis.outcome import failed
from tunediff.config.code import described
from tunediff.core import text
from tunediff.core.outcomes import Status
from tunediff.core.progress import EventLines
from tunediff.core.trial_record import TrialRecord
from tunediff.report import sentences
from tunediff.report.console import Console
from tunediff.search_space import SearchSpace

CHANGES = "changes to the baseline"
"""Heading of the column that is cut where a terminal is narrow."""
WORDS = ("trial", CHANGES, "status")
"""Columns of text; all others hold numbers."""


class LiveTable(Console):
    """Show one live table of the whole search; failures and messages are printed above it."""

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        lines: EventLines | None = None,
        planned: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, space, lines, planned)
        file = sys.stderr if self.lines.on_stderr else sys.stdout
        self.terminal = Terminal(file=file, highlight=False)
        self._draw_throttle = Throttle()
        self._last: RenderableType = ""
        self._live = Live(console=self.terminal, get_renderable=self.shown, refresh_per_second=1)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def print_line(self, line: str) -> None:
        self.terminal.print(line, markup=False)

    def print_event(
        self, event: str, name: str, trial: TrialRecord | None, content: Mapping[str, Any]
    ) -> None:
        if event != "end" or trial is None:
            return
        why = sentences.of_trial(trial)
        if failed(trial) or why:
            why = f"{trial.status}  {why}  {self.changes(trial.drawn)}"
            self.say(f"{self.display_name(name)} {why}")

    def shown(self) -> RenderableType:
        """Return the table, or why it cannot be drawn, which must never stop the search."""
        if self._draw_throttle.due(len(self.following.records)):
            try:
                with self._draw_throttle.timed():
                    self._last = self._render()
            except Exception as error:
                return f"the table cannot be drawn: {described(error)}"
        return self._last

    def _render(self) -> RenderableType:
        """Return the table: running trials, then results by rank with repeats, then the newest."""
        results, head = self.results, Text("\n" + self._headline(), style="bold")
        if not results.trials:
            return head
        running = [trial for trial in results.trials if trial.status is None]
        measured = [run for outcome in results.ranked for run in outcome.done]
        placed = {trial.name for trial in [*running, *measured]}
        rest = [trial for trial in reversed(results.trials) if trial.name not in placed]
        # With several seeds ranks belong to configurations.
        ranked = enumerate(results.ranked, 1) if self.space.seeds == 1 else ()
        ranks = {outcome.trial.name: str(rank) for rank, outcome in ranked}
        # As many rows as the terminal has room for below the wrapped headline.
        room = max(3, self.terminal.height - 6 - len(head.wrap(self.terminal, self.terminal.width)))
        grid = Table(box=None, padding=(0, 1), header_style="bold")
        for i, trial in enumerate([*running, *measured, *rest][:room]):
            rank = ranks.get(trial.name, "")
            row = {"rank": rank, **self._row(trial)}
            for name in row if i == 0 else ():
                align: Literal["left", "right"] = "left" if name in WORDS else "right"
                grid.add_column(name, justify=align, no_wrap=name != CHANGES)
            style = "bold green" if rank == "1" else "" if trial.status == Status.OK else "dim"
            style = "cyan" if trial.status is None else style
            cells = [Text(cell, no_wrap=True, overflow="ellipsis") for cell in row.values()]
            grid.add_row(*cells, style=style)
        left_out = len(results.trials) - room
        more = f"… and {left_out} more in {self.folder}" if left_out > 0 else ""
        return Group(head, grid, Text(more, style="dim"))

    def _headline(self) -> str:
        """Return the line above the table: progress, time, and the best trial so far."""
        name, noun = self.folder.name, "trials"
        if self.confirming:
            search = self.folder.parents[self.confirming.count("/")].name
            name, noun = f"{search}: confirming runs ({self.confirming})", "runs"
        ended = f"{self.following.ended}/{self.space.budget.trials} {noun}"
        spent = text.seconds(time.monotonic() - self.lines.begun)
        return " · ".join(
            filter(None, [name, ended, spent, self.remaining_words(), self.best_words()])
        )

    def _row(self, trial: TrialRecord) -> dict[str, str]:
        """Return the cells of a trial by the names of the columns."""
        results = self.results
        values = [value for _, value in curve(trial, results.metric)]
        rate = last(trial, "samples_per_s")
        status, compared, value = str(trial.status or ""), "", ""
        if not status:
            points = trial.config.get("evaluation.points", "?")
            status = f"{len(trial.points)}/{points} points"
        if values:
            ratio = self.versus_at(trial, last(trial, "index"), values[-1])
            ratio = results.versus_baseline(trial) if results.by_time else ratio
            compared, value = text.versus(ratio, results.ratios), text.number(values[-1])
            status = ", ".join(filter(None, [status, results.outcome_of(trial).failure_note]))
        cells = {
            "trial": self.display_name(trial.name),
            CHANGES: self.changes(trial.drawn),
            f"{text.short(results.title, 26)} {'↓' if results.lower_is_better else '↑'}": value,
            results.versus_heading: compared,
        }
        if not results.by_rate:
            cells[f"{results.unit}/s"] = text.number(rate) if rate is not None else ""
        return {**cells, "status": status}
