"""Set up a search: read the request, refuse what cannot run, make the folder of a new one."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

from tunediff import search_space
from tunediff.analysis import journals
from tunediff.api.options import SearchOptions, SearchSetup, check_files
from tunediff.command.search import check_baseline
from tunediff.command.workload import CommandWorkload
from tunediff.config import ConfigError, Lines, is_command
from tunediff.core import lock, machine, remote, text
from tunediff.core import trial_record as record
from tunediff.core.listeners import Activity
from tunediff.core.options import allow, check_name, check_new, check_writable, timed_name
from tunediff.experiment.model import FILE, Drawing, Experiment, RunLimit, is_search
from tunediff.inspector import probe
from tunediff.inspector.probe import Measured
from tunediff.integrations import tracking
from tunediff.proof import frozen_code
from tunediff.report import plan, reading
from tunediff.search_space import SearchSpace
from tunediff.search_space.sections import objective_section
from tunediff.training import number_formats
from tunediff.tuning import at_once, experiment, resources, sessions
from tunediff.tuning.templates import Templates

log = logging.getLogger(__name__)

NODE_CORES = 9
"""CPU cores assumed for a cluster's nodes: more than all searched loader processes."""


@dataclasses.dataclass(frozen=True)
class SearchRequest:
    """A search that has been checked and may start."""

    folder: Path
    space: SearchSpace
    content: Lines | None = None
    """Its search file; None: the search exists and is resumed."""


def prepare(options: SearchOptions) -> SearchRequest:
    """Check what is asked for, before anything is written or started. Raises `ConfigError`."""
    machine.check(options)
    tracking.check(options.track)
    remote.check(Path(options.storage))
    request = requested(options)
    if is_asked(request.folder):
        again = f"tunediff.open_study(name={request.folder.name!r})"
        raise ConfigError(
            f"--resume: {request.folder.name}: whoever asks for its trials runs them: {again}"
            " goes on"
        )
    space = request.space
    # ---- data and weights that a trial would miss are missed now
    check_files(space.baseline, space.evaluates)
    machine.warn_emulated(resources.values_of(space, "precision.amp"), options.address)
    tracking.check(space.track)
    if options.address is None:  # what a cluster has is not known before it is asked
        if is_command(space.workload.name):
            definition = cast("CommandWorkload", space.workload).definition
            definition.check_places(space.budget.per_trial_s, space.source)
        resources.share(space, resources.local())
        if not options.dry_run:
            plan.check(plan.values(space, request.folder, {}), options.force)
    return request


def requested(options: SearchOptions, engine: bool = True) -> SearchRequest:
    """Return the new search of the options, or the earlier one. `engine`: whether its trials are
    trained by it, which has knobs as well. Raises `ConfigError`."""
    return _resumed(options) if options.resume is not None else _new(options, engine)


def is_asked(folder: Path) -> bool:
    """Return whether the search belongs to `tunediff.open_study`, whose caller runs trials."""
    return any(session.command.startswith(sessions.ASKED) for session in journals.sessions(folder))


def measure(
    space: SearchSpace, say: Callable[[str], None], templates: Templates | None = None
) -> Measured:
    """Look at the data and time one evaluation. Raises `ConfigError` for unusable data.

    `templates`: of the trials that follow, for which evaluations are prepared completely, however
    long it takes; None: a dry run, which does not.
    """
    if is_command(space.workload.name):
        return {"evaluation_s": 0.0}
    # the check of a user's file times one
    evaluates = space.evaluates and space.workload.file is None
    protocols = {
        "final_s": space.final,
        "confirming_final_s": space.confirm.final if space.confirm is not None else {},
    }
    finals = {name: protocol for name, protocol in protocols.items() if protocol}
    say(f"reading the data{' and timing one evaluation' if evaluates else ''}")
    of_trials = None
    if templates is not None and space.baseline.parallel.processes == 1:
        of_trials = functools.partial(templates.prepare, space.workload.name)
    is_search = templates is not None
    return probe.before_search(space.baseline, evaluates, is_search, finals, of_trials)


def measuring(
    request: SearchRequest, options: SearchOptions, say: Callable[[str], None], quiet: bool,
    templates: Templates,
) -> Future[Measured] | None:  # fmt: skip
    """Begin to measure what a trial of a new search costs, in a thread: Ray starts meanwhile. None:
    a user's workload is tried instead, or nothing is to be said. `templates`: of the trials."""
    space, measured = request.space, Future[Measured]()
    check_writable("--storage", request.folder)
    if space.workload.file is not None or quiet or options.address:
        return None
    templates.prepare(space.workload.name)

    def target() -> None:
        try:
            measured.set_result(measure(space, say, templates))
        except BaseException as error:
            measured.set_exception(error)

    threading.Thread(target=target, daemon=True, name="what a trial costs").start()
    return measured


def create(
    request: SearchRequest, options: SearchOptions, say: Callable[[str], None],
    known: Future[Measured] | None,
) -> tuple[SearchSpace, dict[str, Any] | None]:  # fmt: skip
    """Make the folder of a new search; return its space, and its plan, as measured. A user's
    workload is tried first. `known`: see `measuring`.

    Raises `ConfigError`.
    """
    folder, space, content = request.folder, request.space, request.content
    assert content is not None
    users_file = space.workload.file is not None
    measured: Measured = {}
    if known is not None:
        measured = known.result()
        plan.check(plan.values(space, folder, measured), options.force)
    if users_file and options.check:
        space, measured = _create_checked(request, folder, say)
    else:
        choice = measured.get("evaluation_format")
        baseline = number_formats.pinned(space.baseline, choice)
        space = dataclasses.replace(space, baseline=baseline)
        space = experiment.create(folder, space, content, choice)
        if choice is not None:
            say(number_formats.sentence(choice))
    if is_command(space.workload.name):  # which runs in its own folder, not in a copy
        frozen_code.write_searched(folder)
    return space, plan.values(space, folder, measured) if options.address is None else None


def measured_plan(
    request: SearchRequest, options: SearchOptions, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the plan with measured times, and keep nothing on disk.

    A new search of a user's workload is tried as `create` does. Raises `ConfigError` with what is
    wrong with the workload.
    """
    users_file = request.space.workload.file is not None
    space, is_here = request.space, options.address is None
    if request.content is None or not users_file or not options.check:
        return plan.values(space, request.folder, measure(space, say), is_here)
    with tempfile.TemporaryDirectory(prefix="tunediff-check-") as folder:
        space, measured = _create_checked(request, Path(folder) / request.folder.name, say)
        space = dataclasses.replace(space, source=request.space.source)
        return plan.values(space, request.folder, measured, is_here)


def _create_checked(
    request: SearchRequest, folder: Path, say: Callable[[str], None]
) -> tuple[SearchSpace, Measured]:  # fmt: skip
    assert request.content is not None
    if is_command(request.space.workload.name):
        check_baseline(request.space, say)
        space = experiment.create(folder, request.space, request.content)
        return space, {"evaluation_s": 0.0}  # it evaluates itself within its budget
    from tunediff.inspector import check  # imports torch

    return check.create(folder, request.space, request.content, say)


def _resumed(options: SearchOptions) -> SearchRequest:
    """Return folder and space of an earlier search. Raises `ConfigError`."""
    if options.given(SearchSetup, RunLimit) or options.given(Drawing).keys() - {"trials", "total"}:
        raise ConfigError(
            "--resume: takes file, knobs and budget from the folder; only --trials, --total,"
            " --confirm and --track can change"
        )
    folder = search_space.folder_of(str(options.resume), Path(options.storage)).resolve()
    if not options.dry_run:
        lock.check_free(folder)  # before a user's file is imported, which may take minutes
    for stage in (folder, *sessions.confirming_folders(folder)):
        for trial in record.read_trials(stage):
            if not trial.finished:
                remote.pull(stage / "trials" / trial.name, heavy=True)
    done, limits = sum(trial.finished for trial in record.read_trials(folder)), _limits(options)
    fits = options.trials is None or options.trials >= done
    allow(fits, "--trials", options.trials, f"at least {done}, which are done")
    spent_s = sessions.all_spent_s(folder)
    fits = (options.total or math.inf) >= spent_s
    allow(fits, "--total", limits.get("total"), f"at least {math.ceil(spent_s)}s, which are spent")
    others: dict[str, Any] = {"track": options.track} if options.track is not None else {}
    if options.confirm is not None:
        earlier = Experiment.read(folder).space.get("confirm")
        others["confirm"] = _confirming(options.confirm, earlier)
    space = experiment.reopen(folder, limits, keep=not options.dry_run, others=others)
    return SearchRequest(folder, space)


def _confirming(finalists: int, earlier: Any) -> dict[str, Any] | None:
    """Return the section `confirm:` of a search file for so many finalists."""
    return {**(earlier or {}), "of": finalists} if finalists else None


def _new(options: SearchOptions, engine: bool) -> SearchRequest:
    """Return folder, space and search file of a new search. Raises `ConfigError`."""
    storage = Path(options.storage).resolve()  # Ray's processes may run elsewhere
    if options.name is not None:
        remote.pull(storage / options.name / FILE)
        check_name(options.name)
        check_new(storage / options.name, FILE)
    files = [word for word in options.words if "=" not in word]
    settings = [word for word in options.words if "=" in word]
    if len(files) > 1:
        raise ConfigError(f"command line: one search file at most, found {', '.join(files)}")
    path = search_space.find(files[0] if files else None)
    content = _with_options(_content(path, settings, options.address, engine), options)
    content = _without_shipped_total(content, options, path)
    content, words, notices = search_space.narrow(content, str(path), path.parent, settings)
    for notice in notices:
        log.info(notice)
    limits = _limits(options)
    parse = functools.partial(search_space.parse, source=str(path), folder=path.parent, words=words)
    space = parse(content, budget=limits)
    if (name := content.get("warm_start")) is not None:
        earlier = search_space.folder_of(name, storage)
        allow(is_search(earlier), "--warm-start", name, f"a search in {storage}")
        points = experiment.best_points(space, earlier)
        content = {**content, "first": [*content.get("first", ()), *points]}
        space = parse(content, budget=limits)
        log.info("the best %d configurations of %s are tried first", len(points), name)
    if options.seed is not None:
        space = dataclasses.replace(space, seed=options.seed)
    return SearchRequest(storage / (options.name or _name(path)), space, content)


def _content(path: Path, settings: Sequence[str], address: str | None, engine: bool) -> Lines:
    """Return a search file's content, completed for a workload."""
    here, sizes = resources.local(), tuple[int, ...]()
    # The machine of the search may train nothing: on a cluster every knob is searched that may
    # help.
    cores, gpu, emulated = NODE_CORES, True, machine.emulated()
    if address is None:
        cores, gpu, sizes = here.cores, here.gpus > 0, resources.world_sizes_of(here)
    read = search_space.read(path, sizes, here.gpus > 0)
    content = search_space.completed(read, path, settings, cores, gpu, emulated, engine)
    if content is read or not engine:
        return content
    if not gpu and "bf16" in emulated and "precision.amp" not in content["search"]:
        log.info("precision.amp=bf16 is not searched: this CPU only emulates it")
    if address is not None:
        log.info(
            "%s: knobs are chosen for nodes with a GPU and %d or more CPU cores",
            path.name,
            NODE_CORES,
        )
    return content


def _with_options(content: Lines, options: SearchOptions) -> Lines:
    """Return a search file's content with the options' changes. Raises `ConfigError`."""
    keys = {"track", "early_stopping", "warm_start"}
    content = {**content, **options.model_dump(include=keys & options.model_fields_set)}
    if options.target is not None:
        content["objective"] = {
            **objective_section(content.get("objective")),
            "target": options.target,
        }
    if options.confirm is not None:
        confirm = _confirming(options.confirm, content.pop("confirm", None))
        content |= {"confirm": confirm} if confirm else {}
    if options.parallel:
        allow(options.address is None, "--address", options.address, "none with --parallel")
        at_once.run_devices()
        confirms = isinstance(content.get("confirm"), dict)
        allow(confirms, "--parallel", True, "with confirm: in the file, or --confirm 1 or more")
        content["confirm"] = {**content["confirm"], "parallel": True}
    return content


def _without_shipped_total(content: Lines, options: SearchOptions, path: Path) -> Lines:
    """Return the content of a shipped file without its limit for the whole search, if the options
    give another number or length of trials than the limit was made for."""
    changed = [f"--{name}" for name in ("trials", "budget") if getattr(options, name) is not None]
    total = (content.get("budget") or {}).get("total")
    shipped = path.resolve().is_relative_to(search_space.SHIPPED.resolve())
    if not changed or total is None or options.total is not None or not shipped:
        return content
    log.info("no limit for the whole search: the %s of %s are for its own %s; --total sets one",
             total, path.stem, " and ".join(changed))  # fmt: skip
    budget = {name: value for name, value in content["budget"].items() if name != "total"}
    return {**content, "budget": budget}


def _name(path: Path) -> str:
    """Return the default name of a search: that of its file, and the time."""
    return timed_name("".join(filter(str.isprintable, path.stem)).lstrip(".-")[:40] or "search")


def _limits(options: SearchOptions) -> Lines:
    """Return the limits of the options, as `budget:` has them."""
    limits = options.given(RunLimit, Drawing)
    names = {"budget": "per_trial", "unit": "unit", "compile": "compile"}
    names |= {"trials": "trials", "total": "total"}
    return {key: limits[name] for name, key in names.items() if name in limits}


def activity(module: str, folder: Path, space: SearchSpace, resume: str = "") -> Activity:
    """Return what listeners know of a search; `resume`: what goes on with it, if not the command."""
    resume = resume or text.command("search", "--resume", folder.name, storage=folder.parent)
    settings = {
        "workload": space.workload.name,
        "objective": space.metric,
        "direction": space.mode,
        "seed": space.seed,
        **{f"budget.{name}": value for name, value in space.budget.lines.items()},
    }
    return Activity(
        module,
        folder,
        resume,
        space.metric,
        settings,
        space.track,
        functools.partial(reading.flat_of, folder),
    )
