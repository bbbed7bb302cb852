"""A Ray cluster that existed before: what its nodes have, and if they suffice."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray

import tunediff
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
