"""What a point says of speed: one definition of samples/s, of waiting for data and of memory."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from tunediff.core.clock import Clock
from tunediff.core.point import Point
from tunediff.distributed import World
from tunediff.training import hardware, memory
from tunediff.training.pace import Pace
from tunediff.training.phases import Phases

PER_STEP = (
    "loss", "samples_per_s", "samples_per_s_sd", "step_s", "phases_s", "data_wait_share", "peak_share", "samples_per_j",
)  # fmt: skip
"""Fields of a point that nothing is known of without a step."""


class Meter:
    """Throughput, step and loss since the last evaluation; memory since the training began. All
    ranks use it alike."""

    def __init__(
        self, clock: Clock, pace: Pace, phases: Phases, world: World, devices: int, constant: dict[str, Any]
    ) -> None:  # fmt: skip
        """`devices`: that all ranks keep busy together. `constant`: fields of `Point` that do not
        change, `first_step_s` and `peak_flops_per_s` among them."""
        self._clock, self._pace, self._phases, self._world = clock, pace, phases, world
        self._constant, self._peak = constant, dict[str, float]()
        self._losses: list[Tensor] = []  # not read yet: nothing waits for the device in every step
        self._sum, self._finite = np.float32(0.0), 0
        self.streak = 0
        """Steps in a row, up to the last, whose loss is not finite; as of the last `read`."""
        self._energy = hardware.EnergyMeter(world.device, devices // world.size)
        self._devices, self._before = devices, {"device_s": 0.0, "train_s": 0.0}
        self._waited_s = phases.read()["data_wait"]  # the device, as far as the clock knows it
        self._trained_j: float | None = 0.0
        """Joules of the training up to the last evaluation; None: not known."""
        self.restart()

    def restart(self) -> None:
        """Measure from here."""
        self._seconds, self._samples, self._steps = (
            dict(self._clock.seconds),
            self._pace.samples,
            self._pace.steps,
        )
        self._phase_s = self._phases.read()
        self._pace.rates.clear()
        self._joules, self._usage, self._counts = self._energy.joules(), hardware.Usage.now(), True

    @property
    def device_s(self) -> float:
        """Return training seconds times devices, those before a restart on other devices
        included."""
        return (
            self._before["device_s"]
            + (self._pace.train_s - self._before["train_s"]) * self._devices
        )

    def state_dict(self) -> dict[str, float | None]:
        """Return what the training has used so far, for the checkpoint; all ranks call it."""
        used = self._used_j() if self._counts else 0.0
        joules = (
            self._trained_j + used if self._trained_j is not None and used is not None else None
        )
        return {"device_s": self.device_s, "train_s": self._pace.train_s, "energy_j": joules}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Go on from a checkpoint; one of an earlier version has none of it."""
        if state:
            self._before = {name: float(state[name] or 0.0) for name in ("device_s", "train_s")}
            self._trained_j = state["energy_j"]

    def add(self, loss: Tensor) -> None:
        """Add one step's loss, a scalar on the device."""
        self._losses.append(loss)

    def read(self) -> None:
        """Take in what was added; only to be called when the device has finished what was
        queued."""
        waited_s = self._phases.read()["data_wait"]
        if self._phases.of_device:
            self._clock.move(waited_s - self._waited_s, "train", "data_wait")
            self._waited_s = waited_s
        self._energy.joules()  # counters of a CPU wrap around
        for loss in torch.stack(self._losses).float().tolist() if self._losses else ():
            if math.isfinite(loss):  # those that loss scaling passes over do not count
                self._sum, self._finite, self.streak = (
                    np.float32(self._sum + np.float32(loss)),
                    self._finite + 1,
                    0,
                )
            else:
                self.streak += 1
        self._losses.clear()

    def measure(self, index: int, fraction: float, before: Point | None = None) -> Point:
        """Return the point of this moment, without the workload's findings. `loss` is NaN when none
        was finite.

        Where no step was made since the point `before`, as a long one ends several segments at
        once, its loss and its speed are repeated.
        """
        seconds = {name: value - self._seconds[name] for name, value in self._clock.seconds.items()}
        trained = seconds["train"] + seconds["data_wait"]
        samples, steps = self._pace.samples - self._samples, self._pace.steps - self._steps
        parts = self._parts(trained, steps)
        rate = samples / trained if trained > 0 else 0.0
        flops, peak = self._constant.get("flops_per_sample"), self._constant["peak_flops_per_s"]
        price = self._clock.budget.price_per_device_hour
        self.read()
        loss = 0.0 if not steps else float(self._sum) / self._finite if self._finite else math.nan
        self._sum, self._finite = np.float32(0.0), 0
        point = Point(
            index=index,
            fraction=fraction,
            train_s=self._pace.train_s,
            device_s=self.device_s,
            price=self.device_s / 3600 * price if price is not None else None,
            samples=self._pace.samples,
            steps=self._pace.steps,
            loss=self._world.total(loss) / self._world.size,
            samples_per_s=rate,
            samples_per_s_sd=(
                statistics.stdev(self._pace.rates) if len(self._pace.rates) > 1 else 0.0
            ),
            step_s=trained / steps if steps else None,
            phases_s=parts,
            data_wait_share=parts["data_wait"] * steps / trained if trained > 0 and steps else 0.0,
            load_average=os.getloadavg()[0],
            peak_share=rate * flops / peak if flops is not None else None,
            **self._constant,
            **self._machine(samples),
            **self._memory(),
        )
        if steps or before is None:
            return point
        return dataclasses.replace(point, **{name: getattr(before, name) for name in PER_STEP})

    def _parts(self, trained: float, steps: int) -> dict[str, float]:
        """Return the seconds of the mean step's parts on this rank's device; `other` is what no
        part claims."""
        if not steps:
            return {}
        spent = {
            name: seconds - self._phase_s.get(name, 0.0)
            for name, seconds in self._phases.read().items()
        }
        parts = {name: seconds / steps for name, seconds in spent.items()}
        return {**parts, "other": max(0.0, trained - sum(spent.values())) / steps}

    def _machine(self, samples: int) -> dict[str, Any]:
        """Return CPU load, energy and what other processes took, over all ranks of this machine."""
        used = hardware.Usage.now().since(self._usage)
        ranks = self._world.gather((platform.node(), used.own_s))
        here = sum(own_s for node, own_s in ranks if node == platform.node())
        load = hardware.disturbance(used, here, psutil.cpu_count() or 1)
        joules, self._counts = self._used_j(), False
        self._trained_j = (
            self._trained_j + joules if self._trained_j is not None and joules is not None else None
        )
        if joules is not None:
            load |= {"energy_j": joules, "samples_per_j": samples / joules if joules > 0 else 0.0}
        if self._trained_j is not None:
            load["energy_wh"] = self._trained_j / 3600
        return load | {"cpu_share": used.own_s / max(1e-9, used.wall_s)}

    def _used_j(self) -> float | None:
        """Return the joules since `restart` of all ranks: each has its own GPU, those of a machine
        share its CPUs."""
        now = self._energy.joules()
        mine = now - self._joules if now is not None and self._joules is not None else None
        ranks = dict(
            self._world.gather(((platform.node(), self._world.rank * self._energy.own), mine))
        )
        return None if None in ranks.values() else sum(ranks.values())

    def _memory(self) -> dict[str, Any]:
        """Return the peak MiB of the rank that needs most."""
        used = memory.peak_mib(self._world.device)
        if (
            self._peak
        ):  # what judging reserved stays reserved: the point before it tells what training holds
            used.pop("peak_reserved_mib", None)
        self._peak |= {name: max(value, self._peak.get(name, 0.0)) for name, value in used.items()}
        return {name: self._world.largest(value) for name, value in self._peak.items()}
