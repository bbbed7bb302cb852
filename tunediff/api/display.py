"""Show the progress of a call: a live table in a notebook or a terminal, lines elsewhere."""

from __future__ import annotations

import functools
import importlib
import io
import logging
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console as Terminal

from tunediff.api.run import Display
from tunediff.core.progress import EventLines, log_exceptions
from tunediff.report.console import Console
from tunediff.report.live_table import LiveTable

COLUMNS, ROWS = 120, 40
"""Size of the table in a notebook, in characters and lines."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    return hasattr(getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)(), "kernel")


def show_figures() -> None:
    """Let a notebook show figures as pictures; IPython does so after `%matplotlib` only."""
    if not in_notebook():
        return
    figure = importlib.import_module("matplotlib.figure").Figure
    shell = importlib.import_module("IPython").get_ipython()
    try:
        shell.display_formatter.formatters["image/png"].lookup_by_type(figure)
    except KeyError:  # nobody has chosen a format yet
        importlib.import_module("IPython.core.pylabtools").select_figure_formats(shell, {"png"})


def lines_of(progress: bool) -> EventLines:
    """Return where events go: nowhere, to the program's log if it shows them, or to stderr."""
    log = logging.getLogger("tunediff.api")
    is_shown = log.hasHandlers() and log.isEnabledFor(logging.INFO)
    return EventLines(not progress, on_stderr=True, logged=is_shown and not _in_terminal())


def _in_terminal() -> bool:
    return sys.stderr.isatty() and not in_notebook()


def display_of(lines: EventLines) -> Display:
    """Return what shows the progress of a search, with these lines."""
    kind = Console
    if not lines.quiet and in_notebook():
        kind = NotebookTable
    elif not lines.quiet and _in_terminal():
        kind = LiveTable
    return functools.partial(kind, lines=lines)


class NotebookTable(LiveTable):
    """Show the table of a search in the output of a cell, and replace it at every event."""

    def __enter__(self) -> NotebookTable:
        self.terminal = Terminal(
            file=io.StringIO(), width=COLUMNS, height=ROWS, force_jupyter=False
        )
        ipython = importlib.import_module("IPython.display")
        self._html = ipython.HTML
        self._output = ipython.display(self._html(""), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        log_exceptions("the table", self._update)

    def listen(self, event: str, name: str, content: Mapping[str, Any]) -> None:
        super().listen(event, name, content)
        log_exceptions("the table", self._update)

    def print_line(self, line: str) -> None:
        self.lines.print(line)

    def _update(self) -> None:
        # In a notebook rich would display what it prints, in an output of its own for every event
        terminal = Terminal(
            record=True, file=io.StringIO(), width=COLUMNS, highlight=False, force_jupyter=False
        )
        terminal.print(self.shown())
        page = terminal.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        self._output.update(self._html(page))
