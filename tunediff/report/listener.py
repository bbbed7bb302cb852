"""Write tables, figures and the page when a search or a comparison has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff.analysis.comparison import Comparison
from tunediff.core.listeners import Activity, Listener, Say
from tunediff.experiment.model import is_comparison
from tunediff.integrations import background, tracking


def reports(activity: Activity) -> Iterator[Listener]:
    """Yield what writes the report of a search or a comparison."""
    if activity.module in ("search", "compare"):
        yield ReportWriter(activity.folder)


class ReportWriter(Listener):
    """Writes tables and page at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def search_begin(self, say: Say) -> None:
        self._say = say

    def search_end(self, result: Callable[[], Mapping[str, Any]] | None) -> None:
        if result is not None:
            try:
                self._say("writing the report")
                _write(self._folder)
            except ImportError as error:  # a comparison of commands needs nothing that draws
                self._say(f"no report: {error}")


def _write(folder: Path) -> None:
    # Inside: matplotlib takes seconds, and no search waits for it before its first trial.
    from tunediff.report import context, files, page

    if is_comparison(folder):
        files.write_sides(compared := Comparison.read(folder))
        page.write_sides(compared, folder)
    else:
        about = context.read(folder, folder.name, folder.parent)
        files.write_search(about.results)
        if (confirmed := about.evidence.confirmation) is not None:
            files.write_search(confirmed.results)
        page.write_search(about, folder)


LISTENERS = (reports, tracking.listeners, background.listeners)
"""What makes those of a search, a comparison or a training, in the order in which they hear its
end: trackers send the report, and what they note is copied."""
