"""Runs at the same time on equal devices of this machine: which device a run gets.

Both sides of a pair run at the same time, so that both have the same minute of the machine, on two
devices that they swap in every other round. Imports neither torch nor Ray.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tunediff.config import ConfigError
from tunediff.core import environment, machine
from tunediff.core.options import allow
from tunediff.tuning.resources import Machine, ResourcePartition


class RunDevice(NamedTuple):
    """What one run has for itself: a GPU, or CPU cores."""

    cores: tuple[int, ...]
    """Numbers of the CPU cores; empty: the system places the threads."""
    gpu: str | None = None
    """The GPU, as `CUDA_VISIBLE_DEVICES` names it."""
    threads: int = 1

    def pin(self) -> None:
        """Keep this thread, and all processes that it starts from now on, on these cores."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment that shows a process no other GPU."""
        return {} if self.gpu is None else {machine.VISIBLE: self.gpu}


def run_devices() -> list[RunDevice]:
    """Return the equal devices of this machine, see `equal_devices`."""
    chosen = int(os.environ.get(machine.OMP) or 1) if machine.threads() is None else None
    numbers = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    models = environment.describe_machine()["gpus"]
    return equal_devices(machine.cores(), numbers, chosen, machine.gpus(), models)


def equal_devices(
    cores: int, numbers: Sequence[int], chosen: int | None, gpus: list[str], models: Sequence[str]
) -> list[RunDevice]:
    """Return equal devices of a machine, an even number: a GPU of the most frequent model each;
    else as many cores as the user has chosen threads, by default half of all.

    `numbers`: of the cores; `models`: of the GPUs. Raises `ConfigError` for fewer than two.
    """
    if len(gpus) == len(models) and gpus:
        (model, _), *_ = collections.Counter(models).most_common(1)
        gpus = [gpu for gpu, its in zip(gpus, models, strict=True) if its == model]
    threads = chosen or max(1, cores // 2)
    count = (len(gpus) or cores // threads) // 2 * 2
    if count < 2:
        of_cores = f"{cores} CPU cores with {threads} threads for each run"
        has = f"{len(gpus)} GPU" if gpus else of_cores
        raise ConfigError(
            f"--parallel: there are no two equal devices for the sides of a pair ({has});"
            f" allowed: without it, or fewer threads by {machine.OMP}"
        )
    threads = cores // count if gpus else threads
    return [
        RunDevice(
            tuple(numbers[i * threads : (i + 1) * threads]),
            gpus[i] if gpus else None,
            max(1, threads),
        )
        for i in range(count)
    ]


def as_it_began(count: int) -> list[RunDevice]:
    """Return devices for `count` runs at once; [] for one. Raises `ConfigError` if too few."""
    if count == 1:
        return []
    found = run_devices()
    allow(len(found) == count, "--parallel", len(found), f"{count} equal devices, as it began")
    return found


def divided_among(
    run_devices: Sequence[RunDevice], share: Callable[..., ResourcePartition]
) -> Callable[..., ResourcePartition]:
    """Return the machine divided for single-worker runs on `run_devices`, else as `share`."""

    def divided(*machines: Machine) -> ResourcePartition:
        if not run_devices:
            return share(*machines)
        first, count = run_devices[0], len(run_devices)  # the others are equal
        used = Machine(count * first.threads, count if first.gpu is not None else 0)
        return dataclasses.replace(share(used), exclusive=False, at_once=count)

    return divided


class DeviceRotation:
    """Chooses devices for simultaneous runs so that the candidates take turns on them."""

    def __init__(self, candidates: int, at_once: int) -> None:
        self._candidates, self.at_once = candidates, at_once
        self.is_a_round_together = at_once >= candidates
        """Whether all runs of a round are at the same time."""
        self.groups = max(1, at_once // candidates)
        """How many rounds are at the same time, each on a group of devices."""

    def _cycle(self, round_: int) -> int:
        """Return how many times devices or order have turned before a round.

        Where a round has more runs than there are devices, these are as many rounds as fill all
        devices.
        """
        if 1 < self.at_once < self._candidates:
            return round_ * self._candidates // math.lcm(self._candidates, self.at_once)
        return round_ // self.groups + round_ % self.groups

    def order(self, round_: int) -> list[int]:
        """Return the candidates of a round in the order in which they begin.

        Every other one runs backwards, so that a machine that slows down favours no candidate; of
        rounds at the same time every other one too, so that no candidate has the even devices.
        Where a round has more runs than there are devices, later ones begin with other candidates,
        so that neighbours change.
        """
        order, cycle = list(range(self._candidates)), self._cycle(round_)
        shift = cycle // 2 % self._candidates if 1 < self.at_once < self._candidates else 0
        order = order[shift:] + order[:shift]
        return order[::-1] if cycle % 2 else order

    def devices(self, wave: Sequence[tuple[int, int]]) -> list[int]:
        """Return the devices of runs (candidate, round) that begin together: they move on by one
        with each cycle, among those of the round's group or else of all."""
        if self.is_a_round_together:
            count = self._candidates
            return [r % self.groups * count + (i + self._cycle(r)) % count for i, r in wave]
        first = self._cycle(wave[0][1]) if wave else 0
        return [(first + place) % self.at_once for place in range(len(wave))]
