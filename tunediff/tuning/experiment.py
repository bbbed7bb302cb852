"""One search from its folder: start or resume it, run it through Ray Tune, keep all on disk.

ray_results/NAME/
  search.yaml  baseline.yaml   what was asked for, as checked
  workload/                    the user's file with what it imports from its folder
  sessions.jsonl               when it ran, with which command, on what
  trials/t0000/                journal.jsonl, weights.safetensors, and what its workload shows
  study.db                     the Optuna study; optuna-dashboard opens it
  tune/  train/                Ray's own files
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import config as cfg
from tunediff import search_space as spaces
from tunediff.config import ConfigError, Systems
from tunediff.core import environment, machine_options, text
from tunediff.core import trial_record as record
from tunediff.core.errors import FAILED
from tunediff.core.files import write_text
from tunediff.core.listeners import Listeners
from tunediff.core.machine_options import MachineOptions
from tunediff.core.progress import log_exceptions
from tunediff.core.refusals import check_new
from tunediff.core.signals import terminable
from tunediff.search_space import SearchSpace
from tunediff.tuning import resources
from tunediff.tuning.sessions import NotStartedError, StoppedError, alive, all_spent_s

if TYPE_CHECKING:
    from tunediff.tuning.backend import Backend
    from tunediff.tuning.cluster import Nodes
    from tunediff.tuning.ray_backend import RayBackend


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
    """Give a `KeyboardInterrupt` or `StoppedError` from inside the message that says how to resume
    what ran.

    `module`: the command that resumes; `options`: the machine or cluster that was chosen.
    """
    try:
        yield
    except (KeyboardInterrupt, StoppedError) as error:
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StoppedError
        raise kind(why_stopped(error, module, folder, machine_options.words(options))) from error


# ---- the folder
def create(folder: Path, space: SearchSpace, content: Mapping[str, Any]) -> SearchSpace:
    """Make the folder of a new search; return its space, with the copy of a user's workload that
    lies there.

    Raises `ConfigError` if the name is taken or the folder cannot be written.
    """
    check_new(folder)
    new = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        (new / "trials").mkdir(parents=True)
        in_baseline = ("workload", "base", "fixed", "baseline")
        settings = {key: value for key, value in content.items() if key not in in_baseline}
        settings |= {"base": "baseline.yaml", "budget": space.budget.lines, "seed": space.seed}
        baseline = cfg.take_along(
            space.baseline, new
        )  # edits of the original do not reach the trials
        write_text(
            new / "baseline.yaml", cfg.dump(baseline, [f"the baseline of {space.source}"], new)
        )
        write_text(new / "search.yaml", cfg.to_yaml(settings))
        new.rename(folder)  # atomic: a folder of that name is complete
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise ConfigError(f"--storage: {folder} cannot be written: {error.strerror}") from None
    return dataclasses.replace(space, baseline=cfg.load(folder / "baseline.yaml"))


@contextlib.contextmanager
def start_of(folder: Path, new: bool) -> Iterator[None]:
    """Remove the folder of a new search when its start fails before the first trial: its name is
    free again."""
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

    `limits` (`trials`, `total`) and `others` (keys of `RunOptions`) replace its own; `keep` writes
    them to its search.yaml. Raises `ConfigError`.
    """
    limits, others = dict(limits or {}), dict(others or {})
    space = dataclasses.replace(spaces.load(spaces.of_search(folder), budget=limits), **others)
    if (limits or others) and keep:
        content = cfg.read_yaml(folder / "search.yaml") | others
        content["budget"] |= limits
        try:
            write_text(folder / "search.yaml", cfg.to_yaml(content))
        except OSError as error:
            raise ConfigError(f"--storage: {folder} cannot be written: {error.strerror}") from None
    return space


def foreign(folder: Path, backend: Backend | None = None) -> str:
    """Return a warning that trials of the search, or confirming runs, were measured on another
    machine; '' if not.

    `backend`: what will train, on a cluster; None: this machine trains.
    """
    here = None if backend is None else backend.environment
    if here == {}:  # no node of a cluster has said it
        return ""
    folders = (folder, *folder.glob("confirm*"))
    trials = [trial for below in folders for trial in record.read_trials(below) if trial.points]
    device = resources.local().device if backend is None else backend.device
    environments = [trial.environment for trial in trials]
    differences = [
        why for there in environments if (why := environment.differences(there, device, here))
    ]
    if not differences:
        return ""
    where = (
        f"{len(differences)} of its {len(trials)} trials were measured elsewhere"
        f" ({'; '.join(differences[0])})"
    )
    return f"{folder.name}: {where}: what is measured from now on cannot be compared with them"


# ---- running
@contextlib.contextmanager
def cluster(address: str | None) -> Iterator[Any]:
    """Connect to the Ray cluster at `address`, or start one on this machine; yield Ray's context.

    Raises `ConfigError` if no cluster answers, `NotStartedError` if Ray does not start here.
    """
    from tunediff.tuning import local_ray

    if address is not None:
        with _connected(address) as context:
            yield context
        return
    with local_ray.random_token(), local_ray.no_remains() as started, _connected(None) as context:
        started(context)
        yield context
    local_ray.remove_session(context)


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Connect or start as `cluster` does."""
    import ray

    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    options |= _ray_options(address)
    level = (log := logging.getLogger("ray")).level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            context = _init(address=address or "local", **options)
        except SystemExit:  # Ray's handler of SIGTERM, from the start of `ray.init` on
            raise KeyboardInterrupt from None
        except ConnectionError as error:
            # Ray sends its token to a cluster at an address only in this mode.
            token = (
                ""
                if "RAY_AUTH_MODE" in os.environ
                else "; one that asks for a token: RAY_AUTH_MODE=token"
            )
            raise ConfigError(
                f"--address: {address}: {str(error).strip().splitlines()[0]}{token}"
            ) from None
        # its processes came too late, or not at all: Ray has no class of error for that
        except Exception as error:
            if address is not None:
                raise
            why = " ".join(str(error).split()) or type(error).__name__
            raise NotStartedError(f"Ray did not start: {text.truncate(why, 300)}") from error
    try:
        yield context
    finally:
        ray.shutdown()
        log.setLevel(level)  # Ray's own is the one of the options


def _init(**options: Any) -> Any:
    """Return the context of `ray.init`, which is tried twice where Ray's processes come too late.

    On a busy machine its first start takes longest, since all its files are read from disk; the
    second one finds them in memory.
    """
    import ray

    from tunediff.tuning import local_ray

    def start() -> Any:
        with (
            local_ray.longer_start() if options["address"] == "local" else contextlib.nullcontext()
        ):
            return ray.init(**options)

    try:
        return start()
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        logging.getLogger(__name__).warning("Ray did not start in time; it is tried once more")
        ray.shutdown()
    return start()


def _ray_options(address: str | None) -> dict[str, Any]:
    """Return options of `ray.init`: a local cluster gets our count of cores and GPUs, a remote one
    our code."""
    if address is not None:
        from tunediff.tuning import cluster as there

        return {"runtime_env": there.runtime_env()}
    here = (
        resources.local()
    )  # Ray's own count knows nothing of affinity, and ours is what the plan was made for
    # The dashboard also frees the placement groups of trials that were stopped early: without it a
    # search can hang.
    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1"}
    return {"num_cpus": here.cores, "num_gpus": here.gpus, **dashboard}


def _of_cluster(
    folder: Path,
    share: Callable[..., resources.ResourcePartition],
    configs: Sequence[Systems],
    evaluates: bool,
) -> tuple[resources.ResourcePartition, Nodes]:
    """Return the partition of the cluster that Ray is connected to, and a live view of its nodes.

    Raises `ConfigError` if it has no room, or a node does not see the folder or lacks packages,
    data or weights.
    """
    from tunediff.tuning import cluster as there

    checks: list[Callable[[list[resources.Machine]], None]] = [
        there.check_packages,
        functools.partial(there.check_shared, folder),
        *(
            functools.partial(there.check_files, cfg.to_dict(config), evaluates)
            for config in configs
        ),
    ]
    machines = there.nodes()
    partition = share(*machines)
    for check in checks:
        check(list(partition.machines))
    return partition, there.Nodes(machines, checks, there.describe(partition.machines))


@contextlib.contextmanager
def workers(
    folder: Path,
    share: Callable[..., resources.ResourcePartition],
    address: str | None,
    warm: Systems | None,
    greet: Callable[[str | None], None],
    configs: Sequence[Systems] = (),
    evaluates: bool = True,
) -> Iterator[RayBackend]:
    """Yield Ray's backend for what runs in `folder`.

    `greet` is called once it is up, with the line on Ray's dashboard; `share` divides machines;
    `warm`: what the first trials train, if their workers may start now; every node of a cluster
    checks the files of `configs`. Raises `KeyboardInterrupt` on Ctrl-C and SIGTERM, and
    `ConfigError` before anything starts.
    """
    here = share(resources.local()) if address is None else None
    with terminable(), cluster(address) as context, terminable():  # Ray sets a handler of its own
        from tunediff.tuning import local_ray, ray_backend  # imports Ray, which takes seconds

        url = getattr(context, "dashboard_url", None)
        log_exceptions("the start", greet, local_ray.dashboard(url, address) if url else None)
        with contextlib.ExitStack() as stack:
            partition, nodes = here, None
            if partition is None:
                from tunediff.tuning import cluster as there

                stack.enter_context(
                    there.head_watched(functools.partial(_headless, folder, str(address)))
                )
                partition, nodes = _of_cluster(folder, share, configs, evaluates)
            yield stack.enter_context(ray_backend.opened(folder, partition, warm, nodes))


@contextlib.contextmanager
def one_by_one(
    folder: Path,
    share: Callable[..., resources.ResourcePartition],
    address: str | None,
    greet: Callable[[str | None], None],
    configs: Sequence[Systems],
    evaluates: bool = True,
) -> Iterator[Backend]:
    """Yield the backend for runs of these configurations, one at a time: on this machine without
    Ray, or on the cluster at `address` as `workers` does."""
    if address is not None:
        with workers(folder, share, address, None, greet, configs, evaluates) as of_cluster:
            yield of_cluster
        return
    from tunediff.tuning import local

    partition = share(resources.local())
    names = dict.fromkeys(config.schema.workload for config in configs)
    with terminable(), local.opened(folder, partition, list(names)) as here:
        log_exceptions("the start", greet, None)
        yield here


def _headless(folder: Path, address: str) -> None:
    """Print why and end this process: its other threads wait for Ray, which waits for its head."""
    module = "search" if (folder / "search.yaml").exists() else "compare"
    why = StoppedError("the head of the cluster does not answer any more")
    print(
        f"error: {why_stopped(why, module, folder, ['--address', address])}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(FAILED)


def warm(space: SearchSpace) -> Systems | None:
    """Return the configuration to start workers for in advance; None: it needs the devices of
    several."""
    return None if space.baseline.parallel.together else space.baseline


def search(folder: Path, space: SearchSpace, backend: Backend, listeners: Listeners) -> None:
    """Run the search in `folder` until a limit is reached. Raises `StoppedError` when it cannot be
    written."""
    from tunediff.tuning import tuner  # imports Ray and Optuna, which takes seconds

    alive(folder)  # what this session has spent until here counts, too: Ray has started
    if (why := tuner.search(folder, space, backend, all_spent_s(folder), listeners)) is not None:
        raise StoppedError(f"{folder} cannot be written: {why}")
