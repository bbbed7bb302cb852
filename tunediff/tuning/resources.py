"""What one trial gets of the machine, and how many trials run at once. Imports no ray: used before anything starts."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence

from tunediff.config import ConfigError
from tunediff.machine import cores, gpus
from tunediff.space import SearchSpace


@dataclasses.dataclass(frozen=True)
class Machine:
    """CPU cores and GPUs that a search may use."""

    cores: int
    gpus: int

    @property
    def device(self) -> str:
        """What trials train on."""
        return "cuda" if self.gpus else "cpu"

    def __str__(self) -> str:
        return f"{self.cores} CPU cores, {self.gpus} GPUs"


@dataclasses.dataclass(frozen=True)
class Share:
    """How trials are placed."""

    slots: int
    """Trials at once. One on a machine without GPUs: two would disturb each other's clocks."""
    gpu: bool
    per_worker: dict[int, dict[str, float]]
    """Ray resources of each worker, by world size."""
    threads: dict[int, int]
    """torch threads of each worker, by world size."""
    here: str = dataclasses.field(default_factory=os.getcwd)
    """Where the search was started: relative paths in a user's file are meant from there."""


def local() -> Machine:
    """This machine: the cores this process may use and the GPUs it may see."""
    return Machine(cores(), len(gpus()))


def world_sizes_of(machine: Machine) -> tuple[int, ...]:
    """1, 2, 4, … up to what the machine can place: what `parallel.workers: all` stands for."""
    limit = max(1, machine.gpus or machine.cores)
    return tuple(2**power for power in range(limit.bit_length()))


def world_sizes(space: SearchSpace) -> list[int]:
    """Every world size that a trial of this space may have."""
    sizes = {space.baseline.parallel.workers}
    for dimension in space.dimensions:
        if dimension.name == "parallel.workers":
            step = int(dimension.step or 1)
            sizes |= set(dimension.choices or range(int(dimension.low), int(dimension.high) + 1, step))
    return sorted(sizes)


def share(space: SearchSpace, machine: Machine) -> Share:
    """Refuse what can never be placed (Ray would retry for ever), else divide the machine."""
    drawn = (dimension.choices or () for dimension in space.dimensions if dimension.name == "compile.mode")
    modes = itertools.chain([space.baseline.compile.mode], *drawn)
    return divided(machine, world_sizes(space), modes, space.source, space.alone)


def divided(machine: Machine, sizes: Sequence[int], modes: Iterable[str], source: str, alone: bool = False) -> Share:
    """The machine for trials of these world sizes, the largest last, and of these `compile.mode`s."""
    limit, unit = (machine.gpus, "GPU") if machine.gpus else (machine.cores, "CPU core")
    if sizes[-1] > limit:
        raise ConfigError(
            f"{source}: parallel.workers: {sizes[-1]} is not allowed on this machine; each worker needs one "
            f"{unit} and there are {machine}; allowed: at most {limit}"
        )
    if not machine.gpus and (mode := "reduce-overhead") in modes:
        raise ConfigError(f"{source}: compile.mode: {mode!r} needs a GPU, and there are {machine}")
    slots = machine.gpus // sizes[-1] if machine.gpus and not alone else 1
    each = machine.cores / slots
    # A little is left free: drivers need 0.01 CPU each, and a full machine would deadlock.
    cpus = {size: int(100 * (each - 0.1) / size) / 100 for size in sizes}
    extra = {"GPU": 1.0} if machine.gpus else {}
    per_worker = {size: {"CPU": cpus[size], **extra} for size in sizes}
    return Share(slots, bool(machine.gpus), per_worker, {size: max(1, round(each / size)) for size in sizes})
