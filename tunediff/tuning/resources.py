"""What trials get of a machine or of a cluster's nodes. Imports no ray."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from tunediff.config import ConfigError, is_command
from tunediff.config.systems import Systems
from tunediff.core import text
from tunediff.core.machine import cores, gpus
from tunediff.search_space import SearchSpace


@dataclasses.dataclass(frozen=True)
class Machine:
    """CPU cores and GPUs that a search may use: of this machine, or of a node of a cluster."""

    cores: int
    gpus: int
    name: str = ""
    """Address of a node."""
    id: str = ""
    """Ray's, of a node."""

    @property
    def device(self) -> str:
        """Return what trials train on: "cuda" or "cpu"."""
        return "cuda" if self.gpus else "cpu"

    def __str__(self) -> str:
        has = f"{text.pluralize(self.cores, 'CPU core')}, {text.pluralize(self.gpus, 'GPU')}"
        return f"{self.name}: " * bool(self.name) + has


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the workers of a trial run, and what each of them gets."""

    nodes: tuple[str, ...] = ()
    """Ray's ids; empty: the only one there is."""
    cpus: float = 1.0
    gpu: bool = False
    """Whether each has GPUs."""
    threads: int = 1
    """torch threads of each worker."""
    each: int = 1
    """GPUs of each worker: several for the one worker of `parallel.strategy: dp`."""
    per_gpu: int = 1
    """Trials that share each GPU."""

    @property
    def resources(self) -> dict[str, float]:
        """Return the resources of each worker, as Ray counts."""
        return {"CPU": self.cpus, **({"GPU": self.each / self.per_gpu} if self.gpu else {})}


@dataclasses.dataclass(frozen=True)
class ResourcePartition:
    """The machines that a search uses, and how it divides them."""

    machines: tuple[Machine, ...]
    """The largest first."""
    sizes: tuple[int, ...]
    """World sizes of its trials, the largest last."""
    gpu: bool
    exclusive: bool
    """Whether a trial has its machine alone; without GPUs it must: clocks would suffer."""
    per_gpu: int = 1
    """Trials that share each GPU."""
    at_once: int = 1
    """Trials that share the cores of a machine without GPUs, if several do."""
    working_folder: str = dataclasses.field(default_factory=os.getcwd)
    """Where the search was started: relative paths in a user's file are meant from there."""

    def units(self, machine: Machine) -> int:
        """Return how many workers fit on a machine."""
        if self.gpu:
            return machine.gpus * self.per_gpu
        return self.at_once if self.at_once > 1 else machine.cores

    def usable(self, machines: Iterable[Machine]) -> tuple[Machine, ...]:
        """Return the machines that workers fit on, the largest first."""
        fitting = filter(self.units, machines)
        return tuple(
            sorted(
                fitting, key=lambda other: (-self.units(other), -other.cores, other.name, other.id)
            )
        )

    def place(self, machines: Sequence[Machine], size: int, together: bool = False) -> Placement:
        """Return the placement of a trial of `size` workers on these machines.

        Each worker gets the ratio of cores to GPUs that its machine has; on several machines, the
        least of them. `together`: one worker gets the devices of all.
        """
        alone = self.exclusive and len(machines) == 1
        split = {machine: size if alone else self.units(machine) for machine in machines}
        # A little is left free: drivers need 0.01 CPU each, and a full machine would deadlock.
        free = {
            machine: machine.cores - max(0.1, 0.02 * (not self.exclusive) * split[machine])
            for machine in machines
        }
        cpus = max(
            0.0, min(int(100 * free[machine] / split[machine]) / 100 for machine in machines)
        )
        threads = max(1, min(round(machine.cores / split[machine]) for machine in machines))
        devices = size if together else 1
        ids = tuple(machine.id for machine in machines if machine.id)
        return Placement(
            ids, round(devices * cpus, 2), self.gpu, devices * threads, devices, self.per_gpu
        )

    @property
    def slots(self) -> int:
        """Return how many trials run at once, at most."""
        return max(1, self._at_once(self.sizes[0]))

    @property
    def least(self) -> int:
        """Return how many trials run at once if all are of the largest world size."""
        return max(1, self._at_once(self.sizes[-1]))

    def _at_once(self, size: int) -> int:
        trials = [
            min(1, self.units(machine) // size) if self.exclusive else self.units(machine) // size
            for machine in self.machines
        ]
        return sum(trials) or sum(map(self.units, self.machines)) // size


def local() -> Machine:
    """Return this machine: the cores that this process may use and the GPUs that it may see."""
    return Machine(cores(), len(gpus()))


def world_sizes_of(machine: Machine) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to what the machine can place, for `parallel.workers: all`."""
    limit = max(1, machine.gpus or machine.cores)
    return tuple(2**power for power in range(limit.bit_length()))


def world_sizes(space: SearchSpace) -> list[int]:
    """Return every world size that a trial of this space may have."""
    sizes = {space.baseline.parallel.workers}
    for dimension in space.dimensions:
        if dimension.name == "parallel.workers":
            step = int(dimension.step or 1)
            sizes |= set(
                dimension.choices or range(int(dimension.low), int(dimension.high) + 1, step)
            )
    return sorted(sizes)


def values_of(space: SearchSpace, name: str) -> set[Any]:
    """Return every value of a knob with choices that a trial of this space may have."""
    drawn = [dimension.choices or () for dimension in space.dimensions if dimension.name == name]
    named = [
        point[name] for point in space.candidates if name in point
    ]  # of a ladder nothing is drawn
    of_baseline = operator.attrgetter(name)(space.baseline)
    return {of_baseline, *named, *itertools.chain(*drawn)}


def share(space: SearchSpace, *machines: Machine) -> ResourcePartition:
    """Refuse what never fits (Ray would retry for ever); divide the machines: `divided`."""
    protocols = [space.final, space.confirm.final if space.confirm is not None else {}]
    judged = (protocol.get("evaluation.precision", "") for protocol in protocols)
    values = itertools.chain(gpu_only(space.baseline), judged, values_of(space, "compile.mode"))
    strategies = values_of(space, "parallel.strategy")
    if is_command(space.workload.name):  # several GPUs of a command belong to its one process
        strategies = {COMMAND}
    partition = divided(machines, world_sizes(space), values, space.source, strategies=strategies)
    if (per_gpu := space.trials_per_gpu) == 1:
        return partition
    if not partition.gpu or partition.sizes[-1] > 1:
        why = "there are no GPUs"
        if partition.gpu:
            why = "trials of several workers have GPUs of their own"
        raise ConfigError(
            f"{space.source}: trials_per_gpu: {per_gpu} is not allowed here: {why}; allowed: 1"
        )
    return dataclasses.replace(partition, per_gpu=per_gpu)


COMMAND = "command"
"""Stands for the strategy of a command, whose one process gets all its GPUs."""
_GPU_ONLY = {"reduce-overhead": "compile.mode", "tf32": "evaluation.precision"}


def gpu_only(config: Systems) -> list[str]:
    """Return the values of this configuration's knobs of which some need a GPU."""
    return [config.compile.mode, getattr(config.evaluation, "precision", "")]


def divided(
    machines: Sequence[Machine], sizes: Sequence[int], values: Iterable[str], source: str,
    alone: bool = False, strategies: Collection[str] = (),
) -> ResourcePartition:  # fmt: skip
    """Return the machines for trials of these world sizes, the largest last.

    `values`: of knobs of which some need a GPU (see `gpu_only`); `alone`: whether a trial has its
    machine to itself; `strategies`: of
    `parallel.strategy`. Raises `ConfigError` for what fits nowhere.
    """
    gpu = any(machine.gpus for machine in machines)
    unit = "GPU" if gpu else "CPU core"
    partition = ResourcePartition((), tuple(sizes), gpu, alone or not gpu)
    partition = dataclasses.replace(partition, machines=partition.usable(machines))
    limit = sum(map(partition.units, partition.machines))
    listed = "; ".join(map(str, machines)) or "no nodes"
    most = max(map(partition.units, partition.machines), default=0)
    one_process = {COMMAND: "gpus", "dp": "parallel.strategy: 'dp'"}  # with all GPUs of a trial
    for key in (key for name, key in one_process.items() if name in strategies and sizes[-1] > 1):
        if not gpu or sizes[-1] > most:
            raise ConfigError(
                f"{source}: {key}: {sizes[-1]} GPUs of one machine are not allowed here; there are"
                f" {listed}; allowed: at most {most if gpu else 0}"
            )
    if sizes[-1] > limit:
        where = "on this machine" if machines and not machines[0].id else "on this cluster"
        raise ConfigError(
            f"{source}: parallel.workers: {sizes[-1]} is not allowed {where}; each worker needs one"
            f" {unit} and there are {listed}; allowed: at most {limit}"
        )
    for value in values:
        if not gpu and value in _GPU_ONLY:
            raise ConfigError(
                f"{source}: {_GPU_ONLY[value]}: {value!r} needs a GPU, and there are {listed}"
            )
    return partition


LOOK_S = 2.0
"""Seconds between two queries of which nodes there are."""
PATIENCE_S = 60.0
"""Seconds after which a trial that finds no room is reported, once."""


class Allocation(NamedTuple):
    """The slot and the devices that a trial gets."""

    slot: int
    place: Placement
    actor: str = ""
    """Name of the slot's actor."""


class Pool:
    """Allocate a device per worker, of one machine if possible, else of several.

    A trial without room waits, and so do all later ones: smaller trials must not overtake it.
    """

    def __init__(
        self, share: ResourcePartition, look: Callable[[], Iterable[Machine]] | None = None,
        taken: Callable[[int, str], None] = lambda slot, actor: None, prefix: str = "",
    ) -> None:  # fmt: skip
        """`look` returns the nodes of a cluster as of now; `taken` is called with every slot that
        gets a trial, and the name of its actor; `prefix`: of these names."""
        self.say: Callable[[str], None] = lambda line: None
        self._share, self.machines, self._look = share, share.machines, look
        self.unsteady = look is not None
        """Whether nodes may be lost."""
        self._on_taken, self._prefix = taken, prefix
        self._looked = time.monotonic()
        self._taken: dict[int, dict[Machine, int]] = {}
        self._last: dict[
            int, tuple[Placement, int]
        ] = {}  # what a slot's workers were started for: they are still warm
        self._waits: float | None = None

    def room(self) -> bool:
        """Return whether the smallest trial finds room."""
        self._update_machines()
        return self._find(self._share.sizes[0]) is not None or not self._taken

    def take(self, size: int, waits: bool = True, together: bool = False) -> Allocation | None:
        """Allocate devices to `size` workers, or to one worker with all (`together`).

        None: there is no room now; if the trial `waits`, the wait is reported.
        """
        self._update_machines()
        if (workers := self._find(size)) is None or (together and len(workers) > 1):
            if waits:
                self._wait(size, time.monotonic())
            return None
        self._waits = None
        place = self._share.place(list(workers), size, together)
        free = [slot for slot in range(len(self._taken) + 1) if slot not in self._taken]
        slot = next(
            (
                one
                for one in self._last
                if one not in self._taken and self._last[one] == (place, size)
            ),
            free[0],
        )
        self._taken[slot], self._last[slot] = workers, (place, size)
        actor = f"{self._prefix}{slot}"
        self._on_taken(slot, actor)
        return Allocation(slot, place, actor)

    def give(self, slot: int) -> None:
        """Free the devices of a slot whose trial is over."""
        del self._taken[slot]

    def _update_machines(self) -> None:
        """Query the nodes again if the last query is older than `LOOK_S`."""
        now = time.monotonic()
        if self._look is not None and now - self._looked > LOOK_S:
            self._looked, self.machines = now, self._share.usable(self._look())

    def _find(self, size: int) -> dict[Machine, int] | None:
        """Return the units of each machine for a trial of `size` workers; None: there is no room.

        Takes the machine that the trial fills best, so that larger trials find room later.
        """
        units, exclusive = self._share.units, self._share.exclusive
        free = {
            machine: units(machine) - sum(taken.get(machine, 0) for taken in self._taken.values())
            for machine in self.machines
        }
        if any(units(machine) >= size for machine in free):
            fitting = [machine for machine in free if free[machine] >= size]
            if not fitting:
                return None
            best = fitting[0] if exclusive else min(fitting, key=lambda machine: free[machine])
            return {best: units(best) if exclusive else size}
        workers: dict[Machine, int] = {}
        for machine in sorted(free, key=lambda machine: -free[machine]):
            if free[machine] and sum(workers.values()) < size:
                left = size - sum(workers.values())
                workers[machine] = free[machine] if exclusive else min(left, free[machine])
        return workers if sum(workers.values()) >= size else None

    def _wait(self, size: int, now: float) -> None:
        """Report once what the trial waits for."""
        if self._waits is None:
            self._waits = now
        if now >= self._waits + PATIENCE_S:
            self._waits = math.inf
            unit = "GPU" if self._share.gpu else "CPU core"
            self.say(f"the next trial waits for {text.pluralize(size, unit)}")
