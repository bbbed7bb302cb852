"""Connect to a Ray cluster, or start one on this machine, and open what runs trials: Ray's backend
or, where a command runs them one by one on this machine, the local one.

Ray is imported inside functions: it takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core.errors import FAILED
from tunediff.core.listeners import Listeners
from tunediff.core.progress import log_exceptions
from tunediff.core.signals import terminable
from tunediff.core.template import TemplateError
from tunediff.experiment.model import is_search
from tunediff.search_space import SearchSpace
from tunediff.tuning import local, resources
from tunediff.tuning.at_once import RunDevice
from tunediff.tuning.backend import Backend
from tunediff.tuning.experiment import why_stopped
from tunediff.tuning.rounds import writing_to
from tunediff.tuning.sessions import NotStartedError, StoppedError, alive, all_spent_s
from tunediff.tuning.templates import Templates

if TYPE_CHECKING:
    from tunediff.ray_backend.backend import RayBackend

START_S = 120.0
"""Seconds for Ray's processes to start; Ray's 30 s are too few on busy cores."""
_TOKEN, _TOKEN_FILE, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"
_files: list[Path] = []
"""The file with the random token of the cluster that runs, if it has one."""


@contextlib.contextmanager
def random_token() -> Iterator[None]:
    """Give the cluster that starts inside a random token, in a file for its user alone.

    Ray's token is for all clusters of a user, in a file that others may read. A user's stays.
    """
    if (
        os.environ.get(_TOKEN)
        or os.environ.get(_TOKEN_FILE)
        or os.environ.get(_MODE, "token").lower() != "token"
    ):
        yield
        return
    with tempfile.NamedTemporaryFile("w", prefix="tunediff-ray-token-", delete=False) as output:
        output.write(token := secrets.token_hex(32))
    os.environ[_TOKEN] = token
    _files.append(file := Path(output.name))
    _forget_token()
    try:
        yield
    finally:
        os.environ.pop(_TOKEN, None)
        file.unlink(missing_ok=True)
        _files.remove(file)
        _forget_token()


def _forget_token() -> None:
    """Let Ray read the token again, which it keeps once it was read in this process."""
    from ray._private.authentication import authentication_token_setup as setup

    setup.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def longer_start() -> Iterator[None]:
    """Let a `ray.init` inside wait `START_S` for the processes that it starts.

    Ray has no setting for that: its 30 s stand in the middle of a function, which asks `get_node`
    whether they are up. A Ray without this function keeps its own limit.
    """
    from ray._private import services

    get_node, deadline = getattr(services, "get_node", None), time.monotonic() + START_S
    if get_node is None:
        yield
        return

    def wait_for_node(*args: Any) -> Any:
        while True:
            try:
                return get_node(*args)
            except RuntimeError:  # it is not there yet
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.1)

    services.get_node = wait_for_node
    try:
        yield
    finally:
        services.get_node = get_node


def dashboard(url: str, address: str | None = None) -> str:
    """Return the line that says where Ray's pages are, and how to open them.

    `address`: of an existing cluster; who reaches its pages is its own matter.
    """
    if address is not None:
        return f"dashboard http://{url} (of the cluster at {address})"
    named = next((name for name in (_TOKEN, _TOKEN_FILE) if os.environ.get(name)), "none")
    token = f"cat {_files[-1]}" if _files else named
    return f"dashboard http://{url} (loopback; Ray's other ports: all interfaces; token: {token})"


@contextlib.contextmanager
def cluster(address: str | None) -> Iterator[Any]:
    """Connect to the Ray cluster at `address`, or start one on this machine; yield Ray's context.

    Raises `ConfigError` if no cluster answers, `NotStartedError` if Ray does not start here.
    """
    if address is not None:
        with _connected(address) as context:
            yield context
        return
    with random_token(), _connected(None) as context:
        yield context
    # Ray never deletes its logs and sockets, and refuses work once its disk is 95 % full
    address_info = getattr(context, "address_info", None) or {}
    shutil.rmtree(address_info.get("session_dir") or "", ignore_errors=True)


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
            with longer_start() if address is None else contextlib.nullcontext():
                context = ray.init(address=address or "local", **options)
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


def _ray_options(address: str | None) -> dict[str, Any]:
    """Return `ray.init`'s options: our cores and GPUs for a local cluster, or our code."""
    if address is not None:
        from tunediff.ray_backend import cluster as ray_cluster

        return {"runtime_env": ray_cluster.runtime_env()}
    # Ray's own count knows nothing of affinity, and ours is what the plan was made for
    machine = resources.local()
    # The dashboard frees the placement groups of stopped trials: else a search can hang.
    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1"}
    return {"num_cpus": machine.cores, "num_gpus": machine.gpus, **dashboard}


def _of_cluster(
    folder: Path, share: Callable[..., resources.ResourcePartition]
) -> resources.ResourcePartition:
    """Return the partition of the cluster that Ray is connected to.

    Raises `ConfigError` without room, or if a node lacks the folder or packages.
    """
    from tunediff.ray_backend import cluster as ray_cluster

    partition = share(*ray_cluster.nodes())
    ray_cluster.check_packages(partition.machines)
    ray_cluster.check_shared(folder, partition.machines)
    return partition


@contextlib.contextmanager
def started(address: str | None) -> Iterator[Any]:
    """Yield Ray's context as `cluster` does; SIGTERM raises `KeyboardInterrupt` all the time."""
    with terminable(), cluster(address) as context, terminable():  # Ray sets a handler of its own
        yield context


@contextlib.contextmanager
def workers(
    folder: Path,
    share: Callable[..., resources.ResourcePartition],
    address: str | None,
    greet: Callable[[str | None], None],
    templates: Templates | None = None,
    workload: str = "",
    ray: contextlib.AbstractContextManager[Any] | None = None,
) -> Iterator[RayBackend]:
    """Yield Ray's backend for what runs in `folder`.

    `greet` is called once it is up, with the line on Ray's dashboard; `share` divides machines;
    `templates`: which the workers of this machine use; that of `workload` is prepared while Ray
    starts. `ray`: yields the context of Ray where it runs already. Raises `KeyboardInterrupt` on
    Ctrl-C and SIGTERM, and `ConfigError` before anything starts.
    """
    local_partition = share(resources.local()) if address is None else None
    shared = templates.shared if templates is not None and address is None else ""
    if templates is not None and shared:
        with contextlib.suppress(TemplateError):  # the worker says it
            templates.prepare(workload)
    with ray or started(address) as context:
        from tunediff.ray_backend import backend  # imports Ray, which takes seconds
        from tunediff.ray_backend import cluster as ray_cluster

        url = getattr(context, "dashboard_url", None)
        log_exceptions("the start", greet, dashboard(url, address) if url else None)
        with contextlib.ExitStack() as stack:
            watched = ray_cluster.raylet_watched if address is None else ray_cluster.head_watched
            stack.enter_context(watched(functools.partial(_headless, folder, address)))
            partition = local_partition or _of_cluster(folder, share)
            yield backend.RayBackend(folder, partition, local_partition is None, shared)


@contextlib.contextmanager
def one_by_one(
    folder: Path,
    share: Callable[..., resources.ResourcePartition],
    address: str | None,
    greet: Callable[[str | None], None],
    workloads: Sequence[str],
    run_devices: Sequence[RunDevice] = (),
) -> Iterator[Backend]:
    """Yield the backend for runs of these workloads, one at a time or on `run_devices`: on
    this machine without Ray, or on the cluster at `address` as `workers` does."""
    if address is not None:
        with workers(folder, share, address, greet) as of_cluster:
            yield of_cluster
        return

    partition, workloads = share(resources.local()), [*dict.fromkeys(workloads)]
    with terminable(), local.opened(folder, partition, workloads, run_devices) as backend:
        log_exceptions("the start", greet, None)
        yield backend


def _headless(folder: Path, address: str | None) -> None:
    """Print why and end this process: its other threads wait for Ray, which waits for its head."""
    module = "search" if is_search(folder) else "compare"
    lost = (
        "a process of Ray was killed"
        if address is None
        else ("the head of the cluster does not answer any more")
    )
    where = [] if address is None else ["--address", address]
    message = why_stopped(StoppedError(lost), module, folder, where)
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(FAILED)


def search(folder: Path, space: SearchSpace, backend: Backend, listeners: Listeners) -> None:
    """Run the search in `folder` to a limit. Raises `StoppedError` if it is unwritable."""
    from tunediff.ray_backend import tuner  # imports Ray and Optuna, which takes seconds

    alive(folder)  # what this session has spent until here counts, too: Ray has started
    with writing_to(folder):
        tuner.search(folder, space, backend, all_spent_s(folder), listeners)
