"""Read journals of any content for a report: of a running search, damaged, or from somebody else.

They are checked before they are used; one that cannot be used is named in the report and left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tunediff import search_space
from tunediff.analysis import Results, is_number
from tunediff.config import ConfigError
from tunediff.core import text, trial_record
from tunediff.core.clock import UNITS
from tunediff.core.point import Point
from tunediff.core.trial_record import WORDS, End, Line, TrialRecord
from tunediff.search_space import SearchSpace

_NAME = re.compile(r"t\d{1,9}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_WRONG = (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)
"""Exceptions that reading files of any content can raise."""


def read(folder: Path) -> tuple[Results, dict[str, str]]:
    """Return the results of a search folder, and by trial why some of its journals are left out.

    Raises `ConfigError` for a folder that is no search.
    """
    space = _space(folder)
    trials, unreadable = list[TrialRecord](), dict[str, str]()
    for path in sorted(folder.glob("trials/t*"), key=lambda p: trial_record.by_number(p.name)):
        try:
            if (trial := trial_record.read_trial(path)) is not None:
                trials.append(_usable(trial, path.name))
            # A single incomplete line: the trial has just begun, and is left out without a message.
            elif any((path / trial_record.JOURNAL).read_bytes().splitlines()[1:]):
                unreadable[path.name] = "no line of it says how the trial began"
        except FileNotFoundError:
            continue  # the folder is created before its journal
        except _WRONG as error:
            unreadable[path.name] = f"{type(error).__name__}: {_plain(str(error))}"[:200]
    return Results(folder, space, trials), unreadable


def _space(folder: Path) -> SearchSpace:
    """Read the search file of a folder. Raises `ConfigError`."""
    if folder.is_dir() and not (folder / "search.yaml").is_file():
        content = "a training" if (folder / trial_record.JOURNAL).is_file() else "no search"
        raise ConfigError(
            f"{folder.name}: holds {content}; a report needs the folder of a search, with its"
            " search.yaml"
        )
    path = search_space.of_search(folder)
    try:
        return search_space.load_recorded(folder)
    except ConfigError:
        raise
    except _WRONG as error:
        raise ConfigError(f"{path}: is damaged: {type(error).__name__}: {error}") from None


def _usable(trial: TrialRecord, folder: str) -> TrialRecord:
    """Return the record with clean text and finite numbers. Raises `ValueError` with the fault."""
    # Clean all values
    for name, value in list(vars(trial).items()):
        setattr(trial, name, value if name in ("points", "end") else _clean(value))
    if trial.end is not None:
        trial.end = End(**_clean(dataclasses.asdict(trial.end)))
    trial.points = [Point.of(_numbers(_clean(point.flat))) for point in trial.points]
    # Check the trial; its name becomes a path
    named = trial.name == folder and bool(_NAME.fullmatch(folder))
    identified = isinstance(trial.number, int) and isinstance(trial.fingerprint, str)
    _must(named, f"it says that it is {trial.name!r}")
    _must(identified, "number or fingerprint")
    _must(all(map(is_number, (trial.started, trial.ended, trial.last_written))), "time")
    _must(trial.status in (None, *trial_record.STATUSES), f"status {trial.status!r}")
    _must(isinstance(trial.reason, str), "reason")
    _must(trial.budget_s is None or is_number(trial.budget_s), "budget_s")
    _must(trial.unit in UNITS, f"unit {trial.unit!r}")
    _must(trial.role in trial_record.ROLES, f"role {trial.role!r}")
    for name in ("config", "drawn", "environment", "not_effective"):
        _must(isinstance(getattr(trial, name), dict), name)
    _must(all(map(_is_value, (*trial.config.values(), *trial.drawn.values()))), "knobs")
    _must(isinstance(trial.config.get("seed"), int), "seed")
    _must(is_number(trial.config.get("parallel.workers", 1)), "parallel.workers")
    _must(trial.end is None or _are_seconds(trial.end.seconds), "end: seconds")
    # Check its points
    for point in trial.points:
        needed = (trial.along, "train_s", "samples")
        _must(all(is_number(point.get(name)) for name in needed), "point: seconds or samples")
        _must(isinstance(point.index, int), "point: index")
        _must(_are_seconds(point.seconds), "point: seconds")
        _must(all(isinstance(point[name], str) for name in WORDS if name in point), "point: label")
    return trial


def _numbers(flat: Line) -> Line:
    """Return a point without values of wrong types; reports use no lists."""
    others = (*WORDS, "seconds", "disturbed")
    return {name: value for name, value in flat.items() if name in others or is_number(value)}


def _must(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(f"not understood: {problem}")


def _clean(value: Any) -> Any:
    """Return text that UTF-8 can show, and finite numbers; None for other numbers."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if abs(value) < 1e300 else None  # false for NaN as well
    if isinstance(value, dict):
        return {_plain(str(key)): _clean(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inside) for inside in value]
    return _plain(str(value))


def _plain(text: str) -> str:
    return _CONTROL.sub(" ", text.encode("utf-8", "replace").decode())


def _is_value(value: Any) -> bool:
    def is_scalar(value: Any) -> bool:
        return value is None or isinstance(value, str | bool | int | float)

    return is_scalar(value) or (isinstance(value, list) and all(map(is_scalar, value)))


def _are_seconds(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


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
        if not is_number(line.get("time")) or line.get("event") == OUTSIDE:
            continue
        if line.get("event") == "begin" or not periods:
            command, environment = line.get("command"), line.get("environment")
            command = command if isinstance(command, str) else ""
            environment = environment if isinstance(environment, dict) else {}
            periods.append(SearchSession(line["time"], None, command, environment))
            first = line
            continue
        period = periods[-1]
        # By the monotonic clock, which nobody sets
        period.spent_s = max(0.0, line["monotonic_s"] - first["monotonic_s"])
        period.time_is_up |= line.get("event") == TIME_IS_UP
        if line.get("event") == "end":
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
    """Yield the readable lines of a file, with clean text and finite numbers."""
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(content := json.loads(line), dict):
                    yield _clean(content)
