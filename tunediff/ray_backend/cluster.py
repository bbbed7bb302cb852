"""A Ray cluster that existed before: what its nodes have, and if they suffice."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

import tunediff
from tunediff.core.environment import RAY_BEFORE
from tunediff.ray_backend import _RAY_ENVIRONMENT
from tunediff.tuning.resources import Machine, Placement

HEAD_S = 45.0
"""Seconds without the head until a search ends; Ray ends its processes after 60 s."""
NOTICE_S = 2.0
"""Seconds between looks for a node's notice; clouds give it 30 to 120 s before."""


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
    """Return the nodes that are alive and stay, with the resources that Ray has on each."""
    alive = [_machine(node) for node in ray.nodes() if node["Alive"]]
    leaving = draining(machine.id for machine in alive)
    return [machine for machine in alive if machine.id not in leaving]


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


def draining(ids: Iterable[str]) -> list[str]:
    """Return those of these nodes that an autoscaler or `ray drain-node` will remove."""
    # as Ray Train's own watcher
    draining_nodes = ray._private.state.state.get_draining_nodes() if (ids := list(ids)) else {}
    return [node for node in ids if node in draining_nodes]


@contextlib.contextmanager
def watched(ids: Sequence[str], notice: Callable[[list[str]], None]) -> Iterator[None]:
    """Call `notice` once, from a thread, with those of these nodes that begin to drain meanwhile.

    In a thread, as a slow answer must not hold up a training. Ray Train's own `get_preemption_info`
    is a barrier of all workers at every call (5 to 10 ms of two on 2 cores, Ray 2.60), and its
    watcher a process more for each group.
    """

    def look() -> bool:
        with contextlib.suppress(Exception):  # a head that does not answer now may do so later
            if leaving := draining(ids):
                notice(leaving)
                return True
        return False

    with _watching("draining nodes", NOTICE_S, look) if ids else contextlib.nullcontext():
        yield


def lacks(place: Placement) -> str:
    """Return what workers that have not started wait for: room on nodes, or the start."""
    if not any(group["state"] == "PENDING" for group in ray.util.placement_group_table().values()):
        return "they have their place and start"
    resources = ", ".join(f"{value:g} {name}" for name, value in place.resources.items())
    return f"there is no room yet for workers of {resources}; free: {_free(place.nodes)}"


def _free(ids: Sequence[str]) -> str:
    """Return in words the resources that are free on these nodes now; without any, on all."""
    has = ray._private.state.available_resources_per_node()
    words = []
    for machine in nodes():
        if machine.id in ids or not ids:
            left = has.get(machine.id, {})
            words.append(f"{machine.name}: {left.get('CPU', 0):g} CPU, {left.get('GPU', 0):g} GPU")
    return "; ".join(words)


class Nodes:
    """The usable nodes of now: none that drains, was refused, or is being checked."""

    def __init__(
        self, machines: Iterable[Machine], checks: Sequence[Callable[[list[Machine]], None]],
        environment: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`machines`: have been checked; `checks`: each raises `ConfigError` for what one of these
        nodes lacks; `environment`: of one that trains, see `describe`."""
        self.environment = environment or {}
        self._fit: dict[str, Machine | None] = {machine.id: machine for machine in machines}
        self._checks, self._checked = checks, queue.SimpleQueue[tuple[Machine, str]]()
        self._over, self._threads = threading.Event(), list[threading.Thread]()
        self.say: Callable[[str], None] = lambda line: None

    def __call__(self) -> list[Machine]:
        for node in draining(node for node, machine in self._fit.items() if machine is not None):
            self.say(
                f"a node is draining: {self._fit[node]}; no trial starts there, and those there go"
                " on elsewhere"
            )
            self._fit[node] = None
        machines = nodes()
        # In threads: during a check of minutes the trials of other nodes would stand still.
        for machine in machines:
            if machine.id not in self._fit:
                self._fit[machine.id] = None  # until its check has ended
                self._threads.append(
                    threading.Thread(
                        target=self._look_at, args=(machine,), daemon=True, name="node check"
                    )
                )
                self._threads[-1].start()
        while not self._checked.empty():
            machine, lacks = self._checked.get()
            self._fit[machine.id] = None if lacks else machine
            self.say(
                f"WARNING: a node has come and is not used: {lacks}"
                if lacks
                else f"a node has come: {machine}"
            )
        return [machine for machine in machines if self._fit[machine.id] is not None]

    def close(self) -> None:
        """End the checks before Ray is shut down: later calls would start a cluster here."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _look_at(self, machine: Machine) -> None:
        """Check a node; the next call says what it lacks, or uses it."""
        try:
            for check in self._checks:
                if self._over.is_set():
                    return
                check([machine])
            self._checked.put((machine, ""))
        except Exception as error:  # as of a full disk: nobody else would see it
            self._checked.put((machine, str(error) or type(error).__name__))
