"""Run a search's finalists again in a folder, which a resume finds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

from tunediff import analysis
from tunediff import search_space as spaces
from tunediff.analysis import Results, confirming_runs, noise
from tunediff.analysis.comparison import Comparison
from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.listeners import Listeners
from tunediff.core.options import allow
from tunediff.core.progress import log_exceptions
from tunediff.search_space import SearchSpace
from tunediff.search_space.model import SEED_OFFSET
from tunediff.tuning import at_once, experiment, rounds, sessions
from tunediff.tuning.at_once import RunDevice
from tunediff.tuning.backend import Backend
from tunediff.tuning.trial_spec import TrialSpec


def runs_at_once(
    space: SearchSpace, workers: int, is_here: bool,
    find_devices: Callable[[], list[RunDevice]] = at_once.run_devices,
) -> int:  # fmt: skip
    """Return how many confirming runs are at the same time.

    `workers`: the most of a run; `is_here`: on this machine, with the devices of `find_devices`.
    """
    parallel = space.confirm.parallel if space.confirm is not None else False
    if parallel is False or workers > 1 or not is_here:
        return 1
    try:
        devices = find_devices()
    except ConfigError:
        return 1
    return 1 if parallel is None and devices[0].gpu is None else len(devices)


def of_finalists(results: Results, is_here: bool) -> int:
    """Return what `runs_at_once` does for the finalists and the baseline of a search."""
    space = results.space
    finalists = noise.finalists(results, space.confirm.of) if space.confirm is not None else []
    counts = [int(trial.config.get("parallel.workers", 1)) for trial in finalists]
    return runs_at_once(space, max([space.baseline.parallel.workers, *counts]), is_here)


def run_devices(space: SearchSpace, address: str | None) -> list[RunDevice]:
    """Return the devices on which the runs of confirming `space` are at the same time; []: one at a
    time. Raises `ConfigError` where they began with others."""
    if space.at_once > 1:
        allowed = f"none: {space.at_once} confirming runs are at the same time on one machine"
        allow(address is None, "--address", address, allowed)
    return at_once.as_it_began(space.at_once)


def prepare(results: Results, is_here: bool = True) -> tuple[Path, SearchSpace] | None:
    """Return folder and space of the runs that confirm `results`, made if new; None if the search
    has no finalist. `is_here`: whether they run on this machine.

    The folder is `confirm` inside that of the search; when a raised limit has brought other
    finalists, `confirm-2`, and so on, with seeds of its own, so that the results of the first ones
    stay and have no part in those.
    """
    settings = results.space.confirm
    assert settings is not None
    content = confirming_runs.content(results, settings.of, settings.seeds, settings.final)
    if not content["trials"]:
        return None
    if (same := confirming_runs.of_finalists(results.folder, content["trials"])) is not None:
        return same, spaces.load(spaces.of_search(same))
    number = 1 + len(confirming_runs.folders(results.folder))
    folder = results.folder / confirming_runs.folder_name(number)
    seed = results.space.baseline.seed + number * SEED_OFFSET
    content |= {"workload": "baseline.yaml", "fixed": {"seed": seed}}
    if (count := of_finalists(results, is_here)) > 1:
        content["at_once"] = count
    space = spaces.parse(content, f"{results.folder.name}: {folder.name}", results.folder)
    level = confirming_runs.level(folder)
    return folder, experiment.create(folder, space, content, level=level)


def pending(
    folder: Path, space: SearchSpace, is_here: bool = True
) -> tuple[Path, SearchSpace] | None:
    """Return folder and space of the confirming runs that are left to run; None: there are none.

    See `prepare`: a search whose trials are not over has other finalists, which would spend their
    error. Runs are left where a round fits into `budget: total`, also those that failed for
    an outside reason, unless it is decided without them.
    """
    results = analysis.read(folder)
    prepared = prepare(results, is_here) if space.confirm is not None else None
    if prepared is None:
        return None
    if (runs := analysis.read(prepared[0])).trials:
        confirmed = confirming_runs.confirm(results, runs)
        is_decided = confirmed.analysis.ended and not confirmed.challengers_failed
        if is_decided or (
            confirmed.ended and confirming_runs.confirm(results, _without_lost(runs)).ended
        ):
            return None
    return prepared if has_time(results, *prepared) else None


def _without_lost(runs: Results) -> Results:
    """Return confirming runs after `journal.repeat_lost` made lost ones unfinished."""
    trials = [
        dataclasses.replace(trial, end=None) if trial.external_cause else trial
        for trial in runs.trials
    ]
    return dataclasses.replace(runs, trials=trials)


def has_time(results: Results, folder: Path, space: SearchSpace) -> bool:
    """Return whether another round of `folder`'s runs should fit into `budget: total`."""
    if (total_s := results.space.budget.total_s) is None:
        return True
    ended = [trial for trial in analysis.read(folder).trials if trial.finished] or results.trials
    run_s = max([space.longest_s, *(sum(analysis.seconds_of(trial).values()) for trial in ended)])
    round_s = run_s * math.ceil(len(space.candidates) / space.seeds / space.at_once)
    return sessions.all_spent_s(results.folder) + round_s <= total_s


def over(results: Results, folder: Path) -> bool:
    """Return whether the comparison that the runs in `folder` make has ended."""
    runs = analysis.read(folder)
    return bool(runs.trials) and confirming_runs.confirm(results, runs).ended


def run(
    results: Results,
    folder: Path,
    space: SearchSpace,
    backend: Backend,
    listeners: Listeners,
    tell: Callable[[Comparison], None],
) -> None:
    """Run seed after seed until the comparison is decided or time is up; call `tell` with its state
    after each interim analysis.

    Raises `StoppedError` when the folder cannot be written.
    """
    points = [point for point in space.candidates if point["seed"] == space.baseline.seed]
    candidates = [(space.config(point), point) for point in points]
    make = functools.partial(TrialSpec.of_space, space, folder, role="confirm")
    rounds_reported = 0

    def decided() -> bool:
        nonlocal rounds_reported
        runs = analysis.read(folder)
        if not runs.trials:
            return not has_time(results, folder, space)
        result = confirming_runs.confirm(results, runs)
        if result.analysis.rounds > rounds_reported:
            rounds_reported = result.analysis.rounds
            log_exceptions("progress of the confirming runs", tell, result)
        return result.ended or not has_time(results, folder, space)

    resume = text.command("search", "--resume", results.folder.name, storage=results.folder.parent)
    with (
        sessions.recorded_session(folder, resume),
        listeners.with_listeners(*backend.listeners(folder, space), sessions.SessionNotes(folder)),
    ):
        proposer = rounds.Rounds(candidates, space.seeds, make, decided, space.at_once)
        rounds.run(folder, proposer, backend, listeners)


def complete(folder: Path, space: SearchSpace) -> bool:
    """Return whether every trial that was planned in `folder` has ended."""
    trials = record.read_trials(folder)
    return len(trials) >= space.budget.trials and all(trial.finished for trial in trials)
