"""Set up a search: read what is asked for, refuse what cannot run, and make the folder of a new
search."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from tunediff import analysis, cli, search_space
from tunediff.analysis import evidence, journals
from tunediff.config import ConfigError, Lines, missing_equals_hint
from tunediff.core import listeners, lock, machine_options, remote, text
from tunediff.core import trial_record as record
from tunediff.core.listeners import Activity
from tunediff.core.progress import announced
from tunediff.report import plan
from tunediff.search_space import MOST_FINALISTS, SearchSpace
from tunediff.training import probe
from tunediff.training.probe import Measured
from tunediff.tuning import experiment, resources, sessions

log = logging.getLogger(__name__)

NODE_CORES = 9
"""CPU cores that a cluster's nodes are assumed to have: more than all loader processes that are
searched."""


@dataclasses.dataclass
class SearchOptions:
    """What is asked of a search: the arguments of the command and of `tunediff.run_search`."""

    words: Sequence[str] = ()
    """Search file or workload, and `knob=value`."""
    name: str | None = None
    storage: Path = text.STORAGE
    trials: int | None = None
    budget: str | None = None
    unit: str | None = None
    total: str | None = None
    confirm: int | None = None
    seed: int | None = None
    address: str | None = None
    cpus: int | None = None
    gpus: int | None = None
    resume: str | None = None
    warm_start: str | None = None
    early_stopping: str | None = None
    track: str | None = None
    no_check: bool = False
    force: bool = False
    dry_run: bool = False

    def command(self) -> str:
        """Return the command that asks for the same."""
        return cli.command_of("search", SearchOptions, self)


@dataclasses.dataclass(frozen=True)
class SearchRequest:
    """A search that has been checked and may start."""

    folder: Path
    space: SearchSpace
    content: Lines | None = None
    """Its search file; None: the search exists and is resumed."""
    inferred: bool = False
    """Whether the space was inferred from a workload's file."""


def prepare(options: SearchOptions) -> SearchRequest:
    """Check what is asked for, before anything is written or started. Raises `ConfigError`."""
    machine_options.check(options)
    listeners.check(options.track)
    remote.check(options.storage)
    request = requested(options)
    if is_asked(request.folder):
        again = f"tunediff.open_study(name={request.folder.name!r})"
        raise ConfigError(
            f"--resume: {request.folder.name}: whoever asks for its trials runs them: {again}"
            " goes on"
        )
    space = request.space
    # ---- data and weights that a trial would miss are missed now
    cli.check_here(space.baseline, space.evaluates)
    cli.warn_emulated(resources.values_of(space, "precision.amp"), options.address)
    listeners.check(space.track)
    if options.address is None:
        resources.share(space, resources.local())
        if space.cost == "energy_wh":
            _check_energy(space)
    if (
        not options.dry_run and options.address is None
    ):  # what a cluster elsewhere has is not known before it is asked
        plan.check(planned(request, options), options.force)
    return request


def requested(options: SearchOptions) -> SearchRequest:
    """Return the new search that the options ask for, or the earlier one that they name. Raises
    `ConfigError`."""
    return _resumed(options) if options.resume is not None else _new(options)


def is_asked(folder: Path) -> bool:
    """Return whether the trials of a search are run by whoever asks for them, with
    `tunediff.open_study`."""
    return any(session.command.startswith(sessions.ASKED) for session in journals.sessions(folder))


def own_knobs(request: SearchRequest) -> tuple[SearchSpace, Lines]:
    """Return space and search file of a new search, without knobs of the engine that were inferred,
    not asked for.

    Raises `ConfigError` where no knob is left.
    """
    space, content = request.space, request.content
    assert content is not None
    if not request.inferred:
        return space, content
    named = {field.name for field in dataclasses.fields(space.schema.own)}
    named |= {name.partition(".")[0] for name in getattr(space.workload.declared, "SEARCH", {})}
    names = {dimension.name for dimension in space.dimensions}
    if (engine := {name for name in names if name.partition(".")[0] not in named}) == names:
        raise ConfigError(
            f"{space.source}: no knob has a Range or a Choice: there is nothing to search"
        )
    return search_space.without(space, content, engine)


def planned(
    request: SearchRequest, options: SearchOptions, measured: Measured | None = None
) -> dict[str, Any]:
    """Return what would run and what it costs, as `plan.values` does. `measured`: what a dry run
    has measured."""
    here = options.address is None
    return plan.values(request.space, request.folder, measured or {}, here)


def measure(space: SearchSpace, say: Callable[[str], None], prepare: bool = True) -> Measured:
    """Look at the data and time one evaluation. Raises `ConfigError` for unusable data.

    `prepare`: prepare evaluations completely, however long it takes, as a search does and a dry run
    does not.
    """
    evaluates = (
        space.evaluates and space.workload.file is None
    )  # the check of a user's file times one
    protocols = {
        "final_s": space.final,
        "confirming_final_s": space.confirm.final if space.confirm is not None else {},
    }
    finals = {name: protocol for name, protocol in protocols.items() if protocol}
    with announced(f"looking at the data{' and timing one evaluation' if evaluates else ''}", say):
        return probe.before_search(space.baseline, evaluates, prepare, finals)


def create(
    request: SearchRequest, options: SearchOptions, say: Callable[[str], None], quiet: bool
) -> tuple[SearchSpace, dict[str, Any] | None]:
    """Make the folder of a new search; return its space, and its plan, as measured. A user's
    workload is tried first.

    Raises `ConfigError`.
    """
    folder, space, content = request.folder, request.space, request.content
    assert content is not None
    own = space.workload.file is not None
    cli.check_writable("--storage", folder)
    measured: Measured = {}
    if not (own or quiet or options.address):
        # What runs the trials is imported meanwhile: this process would only wait for the one that
        # measures.
        threading.Thread(
            target=importlib.import_module, args=("tunediff.tuning.tuner",), daemon=True
        ).start()
        measured = measure(space, say)
        plan.check(plan.values(space, folder, measured), options.force)
    if own and not options.no_check:
        space, measured = _create_checked(request, folder, say)
    else:
        space = experiment.create(folder, space, content)
    return space, plan.values(space, folder, measured) if options.address is None else None


def measured_plan(
    request: SearchRequest, options: SearchOptions, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the plan with measured times, and keep nothing on disk.

    A new search of a user's workload is tried as `create` does, so that its plan has no knobs that
    `train(trial)` never reads. Raises `ConfigError` with what is wrong with the workload.
    """
    own = request.space.workload.file is not None
    if request.content is None or not own or options.no_check:
        return planned(request, options, measure(request.space, say, prepare=False))
    with tempfile.TemporaryDirectory(prefix="tunediff-check-") as folder:
        space, measured = _create_checked(request, Path(folder) / request.folder.name, say)
        space = dataclasses.replace(space, source=request.space.source)
        return planned(dataclasses.replace(request, space=space), options, measured)


def _create_checked(
    request: SearchRequest, folder: Path, say: Callable[[str], None]
) -> tuple[SearchSpace, Measured]:  # fmt: skip
    from tunediff.tuning import preflight  # imports torch

    assert request.content is not None
    space, report = preflight.create(folder, request.space, request.content, say)
    keys = ("evaluation_s", "parameters", "other_load_share", "disturbed")
    return space, cast(Measured, {key: value for key, value in report.items() if key in keys})


def _check_energy(space: SearchSpace) -> None:
    """Raises `ConfigError` where nothing counts the energy of a training."""
    import torch

    from tunediff.training import hardware  # imports torch

    if hardware.EnergyMeter(torch.device(resources.local().device)).joules() is None:
        why = f"cannot be measured here: {hardware.NO_ENERGY}"
        raise ConfigError(f"{space.source}: objective: cost: 'energy_wh' {why}")


def _resumed(options: SearchOptions) -> SearchRequest:
    """Return folder and space of an earlier search. Raises `ConfigError`."""
    fixed = (options.seed, options.confirm)
    others = (
        options.words,
        options.name,
        options.budget,
        options.unit,
        options.warm_start,
        options.early_stopping,
    )
    if any(others) or any(value is not None for value in fixed):
        raise ConfigError(
            "--resume: takes file, knobs and budget from the folder; only --trials, --total and"
            " --track can change"
        )
    folder = search_space.folder_of(str(options.resume), options.storage).resolve()
    if not options.dry_run:
        lock.check_free(folder)  # before a user's file is imported, which may take minutes
    space = _reopened(folder, options)
    # The nodes of a cluster are not known yet
    if options.address is None and (warning := experiment.foreign(folder)):
        log.warning(warning)
    return SearchRequest(folder, space)


def reread(folder: Path, options: SearchOptions) -> SearchSpace:
    """Fetch what is new at the address of an earlier search, and return its space. Raises
    `ConfigError`."""
    remote.pull(folder)
    return _reopened(folder, options)


def _reopened(folder: Path, options: SearchOptions) -> SearchSpace:
    """Return the space of an earlier search, with checkpoints of unfinished trials fetched. Raises
    `ConfigError`."""
    for place in (folder, *sessions.confirming_folders(folder)):
        for trial in record.read_trials(place):
            if not trial.finished:
                remote.pull(place / "trials" / trial.name, heavy=True)
    done = sum(trial.finished for trial in record.read_trials(folder))
    fits = options.trials is None or options.trials >= done
    cli.allow(fits, "--trials", options.trials, f"at least {done}, which are done")
    spent_s = sessions.all_spent_s(folder)
    fits = options.total is None or search_space.duration_s(options.total, "--total") >= spent_s
    cli.allow(fits, "--total", options.total, f"at least {math.ceil(spent_s)}s, which are spent")
    track = {"track": options.track} if options.track is not None else {}
    return experiment.reopen(folder, _limits(options), keep=not options.dry_run, others=track)


def _new(options: SearchOptions) -> SearchRequest:
    """Return folder, space and search file of a new search. Raises `ConfigError`."""
    storage = (
        options.storage.resolve()
    )  # Ray needs an absolute path, and its processes may run elsewhere
    if options.name is not None:
        remote.pull(storage / options.name / "search.yaml")
        cli.check_name(options.name, storage)
    files = [word for word in options.words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(
            "command line: one search file at most, found"
            f" {', '.join(files)}{missing_equals_hint(options.words)}"
        )
    path = search_space.find(files[0] if files else None)
    words = [word for word in options.words if "=" in word]
    content, inferred = _content(path, words, options.address)
    content = _confirmed_by(options.confirm, content)
    _warm_start(options.warm_start, content, str(path), storage)
    asked = {"track": options.track, "early_stopping": options.early_stopping}
    content |= {key: value for key, value in asked.items() if value is not None}
    narrowed = search_space.narrow(content, str(path), path.parent, words)
    for notice in narrowed.notices:
        log.info(notice)
    space = search_space.parse(
        narrowed.content, str(path), path.parent, narrowed.words, _limits(options)
    )
    if options.seed is not None:
        cli.allow(
            0 <= options.seed < 2**32,
            "--seed",
            options.seed,
            "a whole number of at least 0 and below 2^32",
        )
        space = dataclasses.replace(space, seed=options.seed)
    return SearchRequest(storage / (options.name or _name(path)), space, narrowed.content, inferred)


def _content(path: Path, words: Sequence[str], address: str | None) -> tuple[Lines, bool]:
    """Return the content of a search file, completed for a workload without one, and whether it was
    completed."""
    machine = resources.local()
    # What a cluster elsewhere has is not known before it is asked.
    world_sizes = resources.world_sizes_of(machine) if address is None else ()
    read = search_space.read(path, world_sizes, machine.gpus > 0)
    # The machine of the search may train nothing: on a cluster every knob is searched that may
    # help.
    cores, gpu = (machine.cores, machine.gpus > 0) if address is None else (NODE_CORES, True)
    content = search_space.completed(read, path, words, cores, gpu)
    if content is read:
        return content, False
    if address is not None:
        log.info(
            "%s: knobs are searched as nodes with a GPU and %d or more CPU cores need them",
            path.name,
            NODE_CORES,
        )
    # A file of a user's without a search file: its knobs on the command line are not searched.
    whole = search_space.completed(read, path, [], cores, gpu)
    for word in words:
        name, _, value = word.partition("=")
        if name in whole["search"].keys() - content["search"].keys():
            consequence = f"what {path.name} says of it is not searched"
            log.info("%s is fixed at %s by the command line; %s", name, value, consequence)
    return content, True


def _warm_start(asked: str | None, content: Lines, source: str, storage: Path) -> None:
    """Name the earlier search, by the option or in the file, by its absolute path. Raises
    `ConfigError`."""
    name, where = (
        (asked, "--warm-start")
        if asked is not None
        else (content.get("warm_start"), f"{source}: warm_start")
    )
    if not isinstance(name, str):  # absent, or refused with the file's other lines
        return
    try:
        content["warm_start"] = str(
            search_space.of_search(search_space.folder_of(name, storage)).parent
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _name(path: Path) -> str:
    """Return the default name of a search: that of its file, and the time."""
    stem = "".join(filter(str.isprintable, path.stem)).lstrip(".-")[:40] or "search"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _confirmed_by(finalists: int | None, content: Lines) -> Lines:
    """Return the content with so many finalists in `confirm:`, without it for 0. Raises
    `ConfigError`."""
    if finalists is None:
        return content
    cli.allow(
        0 <= finalists <= MOST_FINALISTS,
        "--confirm",
        finalists,
        f"0 to {MOST_FINALISTS} finalists; 0: none",
    )
    left = {key: value for key, value in content.items() if key != "confirm"}
    section = content.get("confirm") or {}
    return {**left, "confirm": {**section, "of": finalists}} if finalists else left


def _limits(options: SearchOptions) -> Lines:
    """Return the limits of the options, as `budget:` has them. Raises `ConfigError` naming the
    option."""
    for option, value in (("--budget", options.budget), ("--total", options.total)):
        if value is not None:
            search_space.duration_s(value, option)
    fits = options.trials is None or options.trials >= 1
    cli.allow(fits, "--trials", options.trials, "a whole number of at least 1")
    limits = {
        "per_trial": options.budget,
        "unit": options.unit,
        "trials": options.trials,
        "total": options.total,
    }
    return {key: value for key, value in limits.items() if value is not None}


def activity(module: str, folder: Path, space: SearchSpace, resume: str) -> Activity:
    """Return what listeners need to know of a search; `resume`: the command that goes on with
    it."""
    settings = {
        "workload": space.workload.name,
        "objective": space.metric,
        "direction": space.mode,
        "seed": space.seed,
        **{f"budget.{name}": value for name, value in space.budget.lines.items()},
    }
    result = functools.partial(_result, folder)
    return Activity(module, folder, resume, space.metric, settings, space.track, result)


def _result(folder: Path) -> dict[str, Any]:
    """Return the result of a search as trackers show it."""
    from tunediff.report import search_result, summary  # imports matplotlib

    read = evidence.read(analysis.read(folder))
    hidden = ("schema", *search_result.FILES)
    values = {name: value for name, value in summary.as_json(read).items() if name not in hidden}
    if read.best is not None:
        values["best_configuration"] = text.knobs(read.results.changed(read.best))
    return values
