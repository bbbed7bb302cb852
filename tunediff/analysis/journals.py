"""Read the journals of a search for its report, of a running one too.

One that is damaged is named in the report and left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunediff import search_space
from tunediff.analysis import Results
from tunediff.config import ConfigError
from tunediff.core import text, trial_record
from tunediff.core.trial_record import Line, TrialRecord


def read(folder: Path) -> tuple[Results, dict[str, str]]:
    """Return the results of a search folder, and by trial why some of its journals are left out.

    Raises `ConfigError` for a folder that is no search.
    """
    trials, unreadable = list[TrialRecord](), dict[str, str]()
    for path in sorted(folder.glob("trials/t*"), key=lambda p: trial_record.by_number(p.name)):
        try:
            if (trial := trial_record.read_trial(path)) is not None:
                trials.append(
                    dataclasses.replace(trial, name=path.name)
                )  # names are parts of paths
        except ConfigError as error:
            unreadable[path.name] = str(error)
    return Results(folder, search_space.load_recorded(folder), trials), unreadable


# ---- sessions
TIME_IS_UP = "time is up"
"""The event of `sessions.jsonl` after which no trial begins, for lack of `budget: total`."""
OUTSIDE = "outside"
"""The event of `sessions.jsonl` with seconds of a command outside of its sessions."""


@dataclasses.dataclass
class SearchSession:
    """One period for which the search ran."""

    begin: float
    """Unix time."""
    end: float | None
    """None: it is running, or was killed."""
    command: str
    environment: dict[str, object]
    complete: bool = False
    """Whether a limit was reached or nothing was left to run: it was not interrupted."""
    time_is_up: bool = False
    """Whether trials were left out because they would not have ended within `budget: total`."""
    spent_s: float | None = None
    """Wall-clock until its last line, in seconds; None: it has no line but its first."""


def sessions(folder: Path) -> list[SearchSession]:
    """Return the periods for which the search ran, as far as they were recorded."""
    periods, first = list[SearchSession](), Line()
    for line in lines(folder / "sessions.jsonl"):
        if line["event"] == "begin":
            command, environment = line.get("command", ""), line.get("environment", {})
            periods.append(SearchSession(line["time"], None, command, environment))
            first = line
        elif periods and line["event"] != OUTSIDE:
            period = periods[-1]
            # By the monotonic clock, which nobody sets
            period.spent_s = max(0.0, line["monotonic_s"] - first["monotonic_s"])
            period.time_is_up |= line["event"] == TIME_IS_UP
            if line["event"] == "end":
                period.end, period.complete = line["time"], line.get("complete") is True
    return periods


def over(results: Results, periods: Sequence[SearchSession]) -> bool:
    """Return whether a search has ended.

    All its trials have ended, and either its last session has ended or all planned trials exist.
    """
    ended = periods[-1].end is not None if periods else False
    enough = len(results.trials) >= results.space.budget.trials
    return (ended or enough) and all(trial.finished for trial in results.trials)


def not_begun(results: Results, periods: Sequence[SearchSession]) -> str:
    """Return how many trials an ended search left out, and why; '': none, or interrupted."""
    space, many = results.space, results.space.budget.trials - len(results.trials)
    if many <= 0 or not periods or not periods[-1].complete:
        return ""
    why = "nothing new was left to draw"
    if periods[-1].time_is_up and space.budget.total_s is not None:
        limit = text.seconds(space.budget.total_s)
        per_trial_s = space.budget.total_s / max(1, len(results.trials))
        enough = text.seconds(60.0 * math.ceil(per_trial_s * space.budget.trials / 60))
        words = ("--resume", results.folder.name, "--total", enough)
        more = text.command("search", *words, storage=results.folder.parent)
        why = f"another would not end within {limit}; to run them: {more}"
    return f"{many:,} of {text.pluralize(space.budget.trials, 'trial')}: {why}"


def lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, without an incomplete one; of a missing file none."""
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
