"""A Ray cluster that existed before: what its nodes have, and if they suffice."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError

import tunediff
from tunediff.config import ConfigError
from tunediff.core.environment import RAY_BEFORE
from tunediff.ray_backend import _RAY_ENVIRONMENT
from tunediff.tuning.resources import Machine

HEAD_S = 45.0
"""Seconds without the head until a search ends; Ray ends its processes after 60 s."""


def runtime_env() -> dict[str, Any]:
    """Return what Ray ships to nodes without our checkout: this package and its settings.

    A user's workload lies in the folder of its search, on the shared storage.
    """
    names = [
        name for name in (*_RAY_ENVIRONMENT, RAY_BEFORE, "GOMP_SPINCOUNT") if name in os.environ
    ]
    return {
        "py_modules": [str(Path(tunediff.__file__).parent)],
        "env_vars": {name: os.environ[name] for name in names},
    }


def beside() -> dict[str, str]:
    """Return Ray's label selector of the search's node, whose end ends everything else."""
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}


def own_cluster() -> dict[str, str]:
    """Return environment variables by which a process in this cluster finds it.

    Ray Train's cleaner of placement groups reads them, and else a file that another cluster may
    have left: it must not ask that cluster whether its controller is alive.
    """
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


@contextlib.contextmanager
def _watching(name: str, every_s: float, look: Callable[[], bool]) -> Iterator[None]:
    """Call `look` in a thread again and again until it returns True or the block ends."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s) and not look():
            pass

    threading.Thread(target=watch, daemon=True, name=name).start()
    try:
        yield
    finally:
        over.set()


@contextlib.contextmanager
def head_watched(lost: Callable[[], None], every_s: float = 5.0) -> Iterator[None]:
    """Call `lost` in a thread when the cluster's head has not answered for `HEAD_S`."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    last_answer = time.monotonic()

    def look() -> bool:
        nonlocal last_answer
        try:
            socket.create_connection((host.strip("[]"), int(port)), every_s).close()
            last_answer = time.monotonic()
        except OSError:
            if time.monotonic() - last_answer > HEAD_S:
                lost()
                return True
        return False

    with _watching("head watched", every_s, look):
        yield


@contextlib.contextmanager
def raylet_watched(lost: Callable[[], None], every_s: float = 1.0) -> Iterator[None]:
    """Call `lost`, in a thread of its own, when a process ends without which the cluster that this
    process has started does nothing, and Ray waits for it without a word."""
    needed = [
        child for child in psutil.Process().children() if child.name() in ("raylet", "gcs_server")
    ]

    def look() -> bool:
        ended = False
        for one in needed:
            try:
                ended |= one.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                ended = True
        if ended:
            lost()
        return ended

    with _watching("raylet watched", every_s, look):
        yield


# ---- what there is
def nodes() -> list[Machine]:
    """Return the nodes that are alive, with the resources that Ray has on each."""
    return [_machine(node) for node in ray.nodes() if node["Alive"]]


def _machine(node: dict[str, Any]) -> Machine:
    has = node["Resources"]
    name = f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"
    return Machine(int(has.get("CPU", 0)), int(has.get("GPU", 0)), name, node["NodeID"])


def gone(ids: Iterable[str]) -> list[str]:
    """Return those of these nodes that are not alive any more."""
    alive = (
        {node["NodeID"] for node in ray.nodes() if node["Alive"]} if (ids := list(ids)) else set()
    )
    return [node for node in ids if node not in alive]


ANSWER_S = 180.0
"""Seconds for a node's answer; at first it unpacks this package and imports Ray's workers."""


def check_shared(folder: Path, machines: Iterable[Machine]) -> None:
    """Check that all nodes see the folder: each reads a new word. Raises `ConfigError`."""
    nonce, proof = uuid.uuid4().hex, folder / f".shared-{uuid.uuid4().hex[:8]}"
    proof.write_text(nonce)
    try:
        answers = _on_each(machines, _read, str(proof))
    finally:
        proof.unlink(missing_ok=True)
    unlike = {machine: answer for machine, answer in answers.items() if answer != nonce}
    if unlike:
        listed = "; ".join(f"{machine.name}: {answer}" for machine, answer in unlike.items())
        raise ConfigError(
            f"--storage: {folder.parent} is not shared by all nodes ({listed}); put it on a disk"
            " that all nodes have at this path (NFS, Lustre, a volume), or leave these nodes out"
            " of the cluster"
        )


def check_packages(machines: Iterable[Machine]) -> None:
    """Check that each node imports what trains, with this torch. Raises `ConfigError`."""
    expected = _torch_version()
    answers = _on_each(machines, _import_packages)
    if differing := {machine: answer for machine, answer in answers.items() if answer != expected}:
        listed = "; ".join(
            f"node {machine.name}: {answer}" for machine, answer in differing.items()
        )
        allowed = f"nodes with all dependencies of tunediff, and {expected} as here"
        raise ConfigError(f"--address: {listed} is not allowed; allowed: {allowed}")


def _on_each(
    machines: Iterable[Machine], function: Callable[..., str], *args: Any
) -> dict[Machine, str]:
    """Return what a function returns on each node, or why it did not."""
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    answers = {
        machine: task.options(label_selector={"ray.io/node-id": machine.id}).remote(*args)
        for machine in machines
    }
    return {machine: answer_text(answer) for machine, answer in answers.items()}


def answer_text(answer: Any) -> str:
    try:
        return str(ray.get(answer, timeout=ANSWER_S))
    except GetTimeoutError:
        return f"no answer within {ANSWER_S:.0f} s"
    except RayError as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        return error.strerror or str(error)


def _import_packages() -> str:
    """Import what a worker imports; return its torch. Raises for a missing package."""
    import torchvision  # noqa: F401

    import tunediff.tuning.worker  # noqa: F401

    return _torch_version()


def _torch_version() -> str:
    """Return the version of torch, without its build: a node without a GPU may have another one."""
    return f"torch {importlib.metadata.version('torch').partition('+')[0]}"
