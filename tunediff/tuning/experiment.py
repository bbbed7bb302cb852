"""One search from its folder: start or resume it, run it through Ray Tune, keep all on disk.

ray_results/NAME/
  experiment.yaml  baseline.yaml   what was asked for, as checked
  workload/                    the user's file with what it imports from its folder
  sessions.jsonl               when it ran, with which command, on what
  trials/t0000/                journal.jsonl, weights.safetensors, and what its workload shows
  study.db                     the Optuna study; optuna-dashboard opens it
  tune/  train/                Ray's own files
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import analysis
from tunediff import config as cfg
from tunediff import search_space as spaces
from tunediff.config import ConfigError, Values
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.files import write_text
from tunediff.core.machine import MachineOptions
from tunediff.core.options import check_new
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import TrialRecord
from tunediff.experiment import model
from tunediff.experiment.model import Drawing, Experiment, Limit, SequentialTest
from tunediff.search_space import SearchSpace
from tunediff.training import number_formats
from tunediff.training.number_formats import FormatChoice
from tunediff.tuning.sessions import NotStartedError, StoppedError, all_spent_s

WARM_POINTS = 5
"""Most points of an earlier search that are tried first."""


def why_stopped(
    why: KeyboardInterrupt | StoppedError, module: str, folder: Path, where: Sequence[str] = ()
) -> str:
    """Return why what runs in `folder` ended early, and how to resume it.

    `where`: the command's options that choose the machine or cluster.
    """
    if isinstance(why, NotStartedError) and not folder.exists():  # a new search without any trial
        return str(why)
    message = "interrupted" if isinstance(why, KeyboardInterrupt) else str(why)
    resume = text.command(module, "--resume", folder.name, *where, storage=folder.parent)
    return f"{message}; everything measured is in {folder}\nresume: {resume}"


@contextlib.contextmanager
def resumable(module: str, folder: Path, options: MachineOptions) -> Iterator[None]:
    """Say how to resume what ran in a `KeyboardInterrupt` or `StoppedError` from inside.

    `module`: the command that resumes; `options`: the machine or cluster that was chosen.
    """
    try:
        yield
    except (KeyboardInterrupt, StoppedError) as error:
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StoppedError
        raise kind(
            why_stopped(error, module, folder, options.command_words(MachineOptions))
        ) from error


# ---- the folder
def create(
    folder: Path,
    space: SearchSpace,
    content: Mapping[str, Any],
    evaluation_format: FormatChoice | None = None,
    level: float | None = None,
) -> SearchSpace:
    """Make a search's folder, with a copy of a user's workload; return the space.

    `evaluation_format`: how the number format of its evaluations was chosen, for the folder.
    `level`: of the test of confirming runs; None: it is a search.
    Raises `ConfigError` if the name is taken or the folder cannot be written.
    """
    check_new(folder, model.FILE)
    new = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        (new / "trials").mkdir(parents=True)
        # edits of the original do not reach the trials
        baseline = cfg.take_along(space.baseline, new)
        about = [f"the baseline of {space.source}"]
        if evaluation_format is not None:
            about.append(number_formats.sentence(evaluation_format))
        write_text(new / "baseline.yaml", cfg.dump(baseline, about, new))
        described(space, content, level).write(new)
        new.rename(folder)  # atomic: a folder of that name is complete
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise ConfigError(f"--storage: {folder} cannot be written: {error.strerror}") from None
    return dataclasses.replace(space, baseline=cfg.load(folder / "baseline.yaml"))


def described(
    space: SearchSpace, content: Mapping[str, Any], level: float | None = None
) -> Experiment:
    """Return what the folder of a space says, whose search file has this content; see `create`."""
    elsewhere = {"workload", "fixed", "baseline", "objective", "budget", "early_stopping"}
    elsewhere |= {"track", "at_once"} | ({"seeds"} if level is not None else set())
    budget, objective = space.budget, space.workload.objective
    by_time = space.target is not None
    return Experiment(
        kind="search" if level is None else "confirmation",
        runner="command" if cfg.is_command(space.workload.name) else "workload",
        objective=objective.name if by_time else space.metric,
        mode=objective.mode if by_time else space.mode,
        cost=space.cost,
        space={key: value for key, value in content.items() if key not in elsewhere}
        | {"workload": "baseline.yaml", "seed": space.seed},
        limit=Limit(
            budget=budget.per_trial_s,
            unit=budget.unit,
            compile="charged" if budget.compile_charged else "free",
            setup="charged" if budget.setup_charged else "free",
            deadline=budget.deadline_s,
            price_per_device_hour=budget.price_per_device_hour,
            target=None if space.target is None else str(space.target),
        ),
        search=None
        if level is not None
        else Drawing(
            trials=budget.trials, total=budget.total_s, early_stopping=space.early_stopping
        ),
        test=SequentialTest(pairs=space.seeds, level=level) if level else SequentialTest(),
        devices=space.at_once,
        track=space.track,
    )


@contextlib.contextmanager
def removed_if_start_fails(folder: Path, new: bool) -> Iterator[None]:
    """Remove a new search's folder if it fails before the first trial: its name is free."""
    try:
        yield
    except (ConfigError, OSError, NotStartedError):
        if new and not record.read_trials(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def reopen(
    folder: Path,
    limits: Mapping[str, Any] | None = None,
    keep: bool = True,
    others: Mapping[str, Any] | None = None,
) -> SearchSpace:
    """Return the space of an existing search.

    `limits` (`trials`, `total`) and `others` (keys of a search file; None: without that key)
    replace its own; `keep` writes them to its file. Raises `ConfigError`.
    """
    path = spaces.of_search(folder)
    content = {**spaces.read(path), **(others or {})}
    content = {key: value for key, value in content.items() if value is not None}
    space = spaces.parse(content, str(path), path.parent, (), dict(limits or {}))
    if (limits or others) and keep:
        try:
            described(space, content).write(folder)
        except OSError as error:
            raise ConfigError(f"--storage: {folder} cannot be written: {error.strerror}") from None
    return space


# ---- an earlier search
def best_points(space: SearchSpace, earlier: Path) -> list[Values]:
    """Return the best configurations of an earlier search that this space can express."""
    points = list[Values]()
    for outcome in analysis.read(earlier).ranked:
        drawn = _values_in(space, outcome.trial.config)
        if drawn is not None and not outcome.failures and drawn not in space.candidates:
            points.append(drawn)
    return points[:WARM_POINTS]


def _values_in(space: SearchSpace, config: Mapping[str, Any]) -> Values | None:
    """Return a configuration's values that a space would draw; None: it lies outside."""
    drawn: Values = {}
    for dimension in space.dimensions:
        if dimension.active(drawn):
            if dimension.name not in config or not dimension.contains(config[dimension.name]):
                return None
            drawn[dimension.name] = config[dimension.name]
    try:
        space.config(drawn)
    except ConfigError:
        return None
    return drawn


# ---- the limit
def durations(records: Sequence[TrialRecord]) -> list[float]:
    """Return the seconds of every trial that has run to an end."""
    ended = [trial for trial in records if trial.finished and trial.status != Status.SKIPPED]
    return [sum(analysis.seconds_of(trial).values()) for trial in ended]


def time_is_up(space: SearchSpace, durations_s: Sequence[float], spent_s: float) -> bool:
    """Return whether no trial fits into `budget: total` less confirming runs.

    durations_s: of the trials so far. spent_s: wall-clock of the search so far.
    """
    if (total_s := space.budget.total_s) is None:
        return False
    expected_s = max([*durations_s, space.longest_s])
    # Runs of the baseline alone confirm nothing; trials get at least half of the limit.
    has_rival = len(durations_s) > space.noise
    runs = space.confirming_reserve if has_rival else 0
    return spent_s + expected_s > total_s - min(runs * expected_s, total_s / 2)


def out_of_time(folder: Path, space: SearchSpace) -> bool:
    """Return whether a begun search would begin no further trial within its limit."""
    records = record.read_trials(folder)
    if not records or not all(trial.finished for trial in records):
        return False
    return time_is_up(space, durations(records), all_spent_s(folder))
