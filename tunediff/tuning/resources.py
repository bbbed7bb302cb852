"""What trials get of one machine or of a cluster's nodes. Imports no ray: used before anything starts."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunediff.config import ConfigError, flat
from tunediff.config.systems import Systems
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
    accelerator: str = ""
    """Type of its GPUs, as Ray calls it; '' if unknown."""

    @property
    def device(self) -> str:
        """What trials train on."""
        return "cuda" if self.gpus else "cpu"

    def __str__(self) -> str:
        kind = f" ({self.accelerator})" if self.accelerator and self.gpus else ""
        return f"{self.name}: " * bool(self.name) + f"{self.cores} CPU cores, {self.gpus} GPUs{kind}"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the workers of a trial run, and what each of them gets."""

    nodes: tuple[str, ...] = ()
    """Ray's ids; empty: the only one there is."""
    cpus: float = 1.0
    gpu: bool = False
    """Whether each has GPUs."""
    threads: int = 1
    """torch threads of each."""
    each: int = 1
    """GPUs of each: several of the one worker that `parallel.strategy: dp` has."""

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Placement:
        """What `dataclasses.asdict` made of one, JSON or not."""
        return cls(**{**plain, "nodes": tuple(plain["nodes"])})

    @property
    def resources(self) -> dict[str, float]:
        """Of each worker, as Ray counts."""
        return {"CPU": self.cpus, **({"GPU": float(self.each)} if self.gpu else {})}


@dataclasses.dataclass(frozen=True)
class ResourcePartition:
    """The machines that a search uses, and how it divides them."""

    machines: tuple[Machine, ...]
    """The largest first."""
    sizes: tuple[int, ...]
    """World sizes of its trials, the largest last."""
    gpu: bool
    whole: bool
    """Whether a trial has its machine to itself. So it is without GPUs: two would disturb each other's clocks."""
    notes: tuple[str, ...] = ()
    """Which machines are not used, and what makes the others unlike, in words."""
    here: str = dataclasses.field(default_factory=os.getcwd)
    """Where the search was started: relative paths in a user's file are meant from there."""

    def units(self, machine: Machine) -> int:
        """Workers that fit on a machine."""
        return machine.gpus if self.gpu else machine.cores

    def usable(self, machines: Iterable[Machine]) -> tuple[Machine, ...]:
        """Those that workers fit on, the largest first; of GPUs only one type."""
        ours = {machine.accelerator for machine in self.machines}
        fitting = [one for one in machines if self.units(one) and (not self.gpu or not ours or one.accelerator in ours)]
        return tuple(sorted(fitting, key=lambda one: (-self.units(one), -one.cores, one.name, one.id)))

    def place(self, machines: Sequence[Machine], size: int, together: bool = False) -> Placement:
        """Of a trial of `size` workers on these machines: on one, its own ratio of cores to GPUs; on several, the
        least of them. `together`: of one worker with as much as they would have."""
        alone = self.whole and len(machines) == 1
        split = {machine: size if alone else self.units(machine) for machine in machines}
        # A little is left free: drivers need 0.01 CPU each, and a full machine would deadlock.
        free = {machine: machine.cores - max(0.1, 0.02 * (not self.whole) * split[machine]) for machine in machines}
        cpus = max(0.0, min(int(100 * free[machine] / split[machine]) / 100 for machine in machines))
        threads = max(1, min(round(machine.cores / split[machine]) for machine in machines))
        each = size if together else 1
        ids = tuple(machine.id for machine in machines if machine.id)
        return Placement(ids, round(each * cpus, 2), self.gpu, each * threads, each)

    @property
    def slots(self) -> int:
        """Trials at once, at most."""
        return max(1, self._at_once(self.sizes[0]))

    @property
    def least(self) -> int:
        """Trials at once, if all are of the largest world size."""
        return max(1, self._at_once(self.sizes[-1]))

    def _at_once(self, size: int) -> int:
        each = [min(1, self.units(one) // size) if self.whole else self.units(one) // size for one in self.machines]
        return sum(each) or sum(map(self.units, self.machines)) // size


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


def values_of(space: SearchSpace, name: str) -> set[Any]:
    """Every value of a knob with choices that a trial of this space may have."""
    drawn = [dimension.choices or () for dimension in space.dimensions if dimension.name == name]
    named = [one[name] for one in space.candidates if name in one]  # of a ladder nothing is drawn
    return {flat(space.baseline)[name], *named, *itertools.chain(*drawn)}


def share(space: SearchSpace, *machines: Machine, may_come: Sequence[Machine] = ()) -> ResourcePartition:
    """Refuse what can never be placed (Ray would retry for ever), else divide the machines; see `divided`."""
    protocols = [space.final, space.confirm.final if space.confirm is not None else {}]
    judged = (protocol.get("evaluation.precision", "") for protocol in protocols)
    values = itertools.chain(gpu_only(space.baseline), judged, values_of(space, "compile.mode"))
    strategies = values_of(space, "parallel.strategy")
    return divided(machines, world_sizes(space), values, space.source, space.alone, may_come, strategies)


_GPU_ONLY = {"reduce-overhead": "compile.mode", "tf32": "evaluation.precision"}


def gpu_only(config: Systems) -> list[str]:
    """The values of this configuration's knobs of which some need a GPU."""
    return [config.compile.mode, getattr(config.evaluation, "precision", "")]


def divided(
    machines: Sequence[Machine], sizes: Sequence[int], values: Iterable[str], source: str, alone: bool = False,
    may_come: Sequence[Machine] = (), strategies: Iterable[str] = (),
) -> ResourcePartition:  # fmt: skip
    """The machines for trials of these world sizes, the largest last, of these values (see `gpu_only`) and
    `parallel.strategy`s.

    `may_come`: nodes that a cluster would start if they were asked for. Raises `ConfigError` for what fits nowhere.
    """
    every = [*machines, *may_come]
    gpu = any(machine.gpus for machine in every)
    unit = "GPU" if gpu else "CPU core"
    kinds: dict[str, int] = {}
    for machine in [one for one in (machines if any(m.gpus for m in machines) else may_come) if gpu]:
        kinds[machine.accelerator] = kinds.get(machine.accelerator, 0) + machine.gpus
    kind = max(kinds, key=lambda name: kinds[name]) if kinds else ""
    one_kind = [one for one in machines if not gpu or one.accelerator == kind]
    found = ResourcePartition((), tuple(sizes), gpu, alone or not gpu)
    found = dataclasses.replace(found, machines=found.usable(one_kind))
    limit = max(sum(map(found.units, some)) for some in (found.machines, may_come))
    there = "; ".join(map(str, machines)) or "no nodes"
    if sizes[-1] > limit:
        where = "on this cluster" if any(machine.id for machine in every) else "on this machine"
        raise ConfigError(
            f"{source}: parallel.workers: {sizes[-1]} is not allowed {where}; each worker needs one {unit}"
            f"{f' of one type ({kind})' if len(kinds) > 1 else ''} and there are {there}; allowed: at most {limit}"
        )
    for value in values:
        if not gpu and value in _GPU_ONLY:
            raise ConfigError(f"{source}: {_GPU_ONLY[value]}: {value!r} needs a GPU, and there are {there}")
    notes = tuple(_notes(found, machines))
    if sizes[-1] > 1 and "dp" in strategies:
        _check_dp(sizes[-1], max(map(found.units, [*found.machines, *may_come])), gpu, there, source)
        notes += ("parallel.strategy=dp is the slow one, for comparison: ddp learns the same in less time",)
    return dataclasses.replace(found, notes=notes)


def _check_dp(size: int, most: int, gpu: bool, there: str, source: str) -> None:
    """One process has all the GPUs. Raises `ConfigError` where there are none, or not so many on one node."""
    if not gpu:
        why = "torch.nn.DataParallel needs GPUs, and would pass through without a word"
        raise ConfigError(f"{source}: parallel.strategy: 'dp' is not allowed here: {why}; there are {there}")
    if size > most:
        why = f"needs as many GPUs on one node for parallel.strategy: 'dp'; allowed: at most {most}"
        raise ConfigError(f"{source}: parallel.workers: {size} {why}; there are {there}")


def _notes(share: ResourcePartition, machines: Sequence[Machine]) -> Iterable[str]:
    """What of a cluster is not used, and whether what is used is alike."""
    for machine in machines:
        if machine not in share.machines:
            why = "without GPUs" if not machine.gpus else "GPUs of one type are compared with each other only"
            yield f"{machine}: not used, {why if share.gpu else 'no CPU cores'}"
    places = {share.place([machine], 1).threads for machine in share.machines}
    if len(places) > 1:
        each = "; ".join(f"{one.name}: {share.place([one], 1).threads}" for one in share.machines)
        yield f"WARNING: nodes differ in CPU cores per worker ({each}): what they measure cannot be compared strictly"
    most = max(map(share.units, share.machines), default=0)
    if (size := share.sizes[-1]) > most > 0:
        yield f"parallel.workers={size} spans nodes: one has room for {most}"
