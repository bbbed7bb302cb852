"""Allocate the devices of the machines to trials. Imports no ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tunediff.core import text
from tunediff.tuning.resources import Machine, Placement, ResourcePartition

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
        self._share, self._machines, self._look = share, share.machines, look
        self._on_taken, self._prefix = taken, prefix
        self._looked = time.monotonic()
        self._taken: dict[int, dict[Machine, int]] = {}
        self._last: dict[
            int, tuple[Placement, int]
        ] = {}  # what a slot's workers were started for: they are still warm
        self._waits: float | None = None

    @property
    def unsteady(self) -> bool:
        """Return whether nodes may be lost."""
        return self._look is not None

    @property
    def machines(self) -> Sequence[Machine]:
        """Return the machines as of the last query."""
        return self._machines

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
            self._looked, self._machines = now, self._share.usable(self._look())

    def _free(self, machine: Machine) -> int:
        return self._share.units(machine) - sum(
            taken.get(machine, 0) for taken in self._taken.values()
        )

    def _find(self, size: int) -> dict[Machine, int] | None:
        """Return the units of each machine for a trial of `size` workers; None: there is no room.

        Takes the machine that the trial fills best, so that larger trials find room later.
        """
        units, exclusive = self._share.units, self._share.exclusive
        free = {machine: self._free(machine) for machine in self._machines}
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
