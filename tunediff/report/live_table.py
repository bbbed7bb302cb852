"""Show a search as one live table in a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tunediff.analysis import curve, disturbed, last
from tunediff.analysis.comparison import ITSELF
from tunediff.analysis.evidence import NOT_SIGNIFICANT
from tunediff.analysis.following import Throttle
from tunediff.analysis.outcome import failed
from tunediff.analysis.statistics import Estimate
from tunediff.config.code import described
from tunediff.core import text
from tunediff.core.progress import EventLines
from tunediff.core.trial_record import TrialRecord
from tunediff.report.console import Console
from tunediff.report.verdicts import DISTURBED, NEAR, OTHERS, noise_words
from tunediff.report.words import beside, fitted, short
from tunediff.search_space import SearchSpace

BARS = "▁▂▃▄▅▆▇█"
CHANGES, CHANGES_WIDTH = "changes to the baseline", 32
"""Heading of a column of the live table, and the characters reserved for it before other columns
get any."""


class LiveTable(Console):
    """Show one live table of the whole search; failures and messages are printed above it."""

    def __init__(
        self, folder: Path, space: SearchSpace, lines: EventLines | None = None,
        planned: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(folder, space, lines, planned)
        file = sys.stderr if self._lines.on_stderr else sys.stdout
        self._terminal = Terminal(file=file, highlight=False)
        self._draw_throttle = Throttle()
        self._last: RenderableType = ""
        self._live = Live(console=self._terminal, get_renderable=self._shown, refresh_per_second=1)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _print(self, line: str) -> None:
        self._terminal.print(line, markup=False)

    def _print_event(
        self, event: str, name: str, trial: TrialRecord | None, content: Mapping[str, Any]
    ) -> None:
        if event == "end" and trial is not None and (failed(trial) or trial.remarks):
            self.say(
                f"{self._called(name)} {trial.status}  {trial.remarks} "
                f" {self._changed(trial.drawn)}"
            )

    def _shown(self) -> RenderableType:
        if not self._draw_throttle.due(len(self._following.records)):
            return self._last
        try:
            with self._draw_throttle.timed():
                self._last = self._render()
            return self._last
        except Exception as error:  # drawing must never stop the search
            return f"the table cannot be drawn: {described(error)}"

    def _render(self) -> RenderableType:
        results = self.results
        # Order of the rows: running trials, results by rank with their reruns, then the rest,
        # newest first.
        ranked = results.ranked
        ranks = {outcome.trial.name: rank for rank, outcome in enumerate(ranked, 1)}
        running = [trial for trial in results.trials if trial.status is None]
        rest = [
            trial
            for trial in results.trials
            if trial.status is not None and trial.name not in ranks
        ]
        measured = [run for outcome in ranked for run in outcome.done]
        shown = {trial.name for trial in measured}
        left = [trial for trial in reversed(rest) if trial.name not in shown]
        rows = [*running, *measured, *left]
        ranks = (
            ranks if self.space.seeds == 1 else {}
        )  # with several seeds ranks belong to configurations
        noise, near = self.evidence.noise, {trial.name for trial in self.evidence.near}
        legend = ""
        if noise and near:
            legend = f" · {NEAR} within the noise of the best: {noise_words(noise, results.label)}"
        legend += f" · {DISTURBED} {OTHERS}" if any(map(disturbed, rows)) else ""
        head = Text("\n" + self._headline() + legend, style="bold")
        # As many rows as the terminal has room for below the wrapped headline.
        room = max(
            3, self._terminal.height - 7 - len(head.wrap(self._terminal, self._terminal.width)[1:])
        )
        lines = [
            {"rank": f"{NEAR * (trial.name in near)}{ranks.get(trial.name, '')}"} | self._row(trial)
            for trial in rows[:room]
        ]
        # Columns that fit, then the rows.
        grid = Table(box=None, padding=(0, 1), header_style="bold")
        heads = self._fit(lines) if lines else {}
        for name, head_ in heads.items():
            right = name not in ("trial", CHANGES, "curve", "status")
            grid.add_column(head_, justify="right" if right else "left", no_wrap=True)
        for trial, line in zip(rows, lines, strict=False):
            grid.add_row(*(line[name] for name in heads), style=_style(trial, ranks))
        more = f"… and {len(rows) - room} more in {self.folder}" if len(rows) > room else ""
        return Group(head, grid, Text(more, style="dim")) if rows else head

    def _fit(self, lines: list[dict[str, str]]) -> dict[str, str]:
        """Return the headings of the columns that fit the terminal, by name, and shorten the
        changes in `lines`."""
        heads = {name: name for name in lines[0]}

        def room() -> int:
            widths = [
                max(len(head), *(len(line[name]) for line in lines))
                for name, head in heads.items()
                if name != CHANGES
            ]
            return self._terminal.width - sum(widths) - 2 * len(heads)

        needed = min(CHANGES_WIDTH, max(len(line[CHANGES]) for line in lines))
        # Drop columns, the least important first, then shorten the objective's heading, until the
        # changes have room.
        for name in ("MiB", f"{self.results.unit}/s", self.results.versus_heading, "curve"):
            if room() < needed:
                heads.pop(name, None)
        if room() < needed:
            name, _, way = self._objective.rpartition(" ")
            heads[self._objective] = f"{short(name, 8)} {way}"
        if (left := room()) < len(CHANGES):
            heads[CHANGES] = "changes"
        for line in lines:
            line[CHANGES] = fitted(line[CHANGES], left)
        return {
            name: head
            for name, head in heads.items()
            if name != CHANGES or left >= len(heads[CHANGES])
        }

    def _headline(self) -> str:
        """Return the line above the table: progress, time, and the best trial so far."""
        best, base = self.evidence.best if self.space.seeds == 1 else None, self.results.baseline
        faster = self.evidence.speedup(best) if best is not None else ITSELF
        search = self.folder.parents[self.confirming.count("/")].name
        name = (
            f"{search}: confirming runs ({self.confirming})"
            if self.confirming
            else self.folder.name
        )
        words = [
            name,
            f"{self._done()}/{self.space.budget.trials} {'runs' if self.confirming else 'trials'}",
        ]
        words += [text.seconds(time.monotonic() - self._lines.begun), self._left(), self._best()]
        if isinstance(faster, Estimate):
            least = "at least " if faster.at_least else ""
            words.append(
                f"{least}{text.number(faster.bound or faster.mean)}× as fast as the baseline"
            )
        elif faster == NOT_SIGNIFICANT:
            words.append(NOT_SIGNIFICANT)
        elif (
            best is not None
            and base is not None
            and base.finished
            and (none := self.results.no_baseline(best))
        ):
            words.append(f"no speed-up: {none}")
        return " · ".join(filter(None, words))

    def _row(self, trial: TrialRecord) -> dict[str, str]:
        results = self.results
        values = [value for _, value in curve(trial, results.metric)]
        versus = self._versus(trial, last(trial, "index"), values[-1]) if values else None
        rate, memory = last(trial, "samples_per_s"), last(trial, "peak_memory_mib")
        reached = f"{len(trial.points)}/{trial.config.get('evaluation.points', '?')} points"
        status = reached if trial.status is None else trial.status
        status = ", ".join(
            filter(None, [status, results.outcome_of(trial).failure_note if values else ""])
        )
        rates = (
            {}
            if results.by_rate
            else {f"{results.unit}/s": f"{rate:.0f}" if rate is not None else ""}
        )
        return {
            "trial": self._called(trial.name),
            CHANGES: self._changed(trial.drawn),
            "curve": sparkline(values, results.ratios),
            self._objective: text.number(values[-1]) if values else "",
            results.versus_heading: beside(versus, results.ratios),
            **rates,
            "MiB": f"{memory:.0f}" if memory is not None else "",
            "status": status + f" {DISTURBED}" * disturbed(trial),
        }

    @property
    def _objective(self) -> str:
        """The heading of the objective's column."""
        return f"{short(self.results.title, 26)} {'↓' if self.results.falls else '↑'}"


def _style(trial: TrialRecord, ranks: dict[str, int]) -> str:
    if not trial.finished:
        return "cyan" if trial.status is None else ""
    return "bold green" if ranks.get(trial.name) == 1 else ("" if trial.status == "ok" else "dim")


def sparkline(values: list[float], logs: bool) -> str:
    """Return a curve as one bar per value: `█▅▃▁`.

    The lowest bar is the lowest value. logs: logarithmic scale. A value that cannot be drawn
    becomes `?`.
    """
    usable = [
        value if math.isfinite(value) and (value > 0 or not logs) else None for value in values
    ]
    heights = [math.log(value) if logs and value is not None else value for value in usable]
    finite = [height for height in heights if height is not None]
    if not finite:
        return ""
    low, spread = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        "?" if height is None else BARS[round((height - low) / spread * (len(BARS) - 1))]
        for height in heights
    )
