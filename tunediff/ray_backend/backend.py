"""Run trials in a Ray cluster: the slots of a session, one actor each."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from tunediff.config import Systems
from tunediff.core.files import plain
from tunediff.core.listeners import Listener
from tunediff.ray_backend import cluster
from tunediff.ray_backend.client import NAMESPACE, RaySlot
from tunediff.ray_backend.cluster import beside
from tunediff.ray_backend.dashboard import RayDashboardReporter
from tunediff.ray_backend.slot import CALLS_OF_A_RANK, OTHER_CALLS, SlotActor
from tunediff.search_space import SearchSpace
from tunediff.tuning.backend import Reported
from tunediff.tuning.pool import Pool
from tunediff.tuning.resources import Machine, ResourcePartition
from tunediff.tuning.templates import SharedTemplates
from tunediff.tuning.trial import run_trial_on_slot
from tunediff.tuning.trial_spec import TrialSpec, WorkerGroupSpec

IDLE_S = 5.0
"""Seconds for which workers without a job keep their devices where other slots may need them."""
WARM_S = 60.0
"""The same for workers that were started before the first job."""
WIDTH = 200
"""Characters of a task's name on the dashboard."""


class RayBackend:
    """The slots of a session, as many actors as trials have run at once; a `Backend`."""

    interrupt_s = 0.0  # the end of the connection to Ray ends the processes

    def __init__(
        self, folder: Path, share: ResourcePartition, of_cluster: bool = False,
        templates: SharedTemplates | None = None,
    ) -> None:  # fmt: skip
        """`folder`: of the search, for Ray Train's own files; `of_cluster`: whether Ray was
        there before; `templates`: of this machine, where all workers are here."""
        # Several searches may share a cluster, where a name must be its own.
        prefix = f"{plain(folder.name)}-{uuid.uuid4().hex[:6]}-slot-"
        self.device = "cuda" if share.gpu else "cpu"
        self._storage, self._share = str(folder / "train"), share
        self._actors, self._templates = list[Any](), templates
        known = {machine.id for machine in share.machines}

        def left() -> list[Machine]:  # later ones have not been checked
            return [machine for machine in cluster.nodes() if machine.id in known]

        look = left if of_cluster else None
        self.devices = Pool(share, look, self._provide_actor, prefix)
        # slots or nodes that may need the devices of an idle slot
        self._others = share.slots > 1 or of_cluster

    def warm(self, config: Systems) -> None:
        """Start the first trials' workers, which train this configuration, beside Tune."""
        size, allocations = config.parallel.workers, []
        while (allocation := self.devices.take(size, waits=False)) is not None:
            allocations.append(allocation)
            spec = WorkerGroupSpec(size, allocation.place)
            self._actors[allocation.slot].warm.remote(spec, config.schema.workload)
        for allocation in allocations:
            self.devices.give(allocation.slot)
            self._release(allocation.slot, "", WARM_S)

    def run(self, spec: TrialSpec, check: Callable[[], bool]) -> Iterator[Reported]:
        """Run a trial on its slot; see `Backend.run`."""
        yield from run_trial_on_slot(spec, RaySlot(spec.actor), check)

    def release(self, spec: TrialSpec) -> None:
        """End what is left of a trial that is over, and later give its devices to other slots."""
        self._release(spec.slot, spec.name, IDLE_S)

    def _release(self, slot: int, trial: str, idle_s: float) -> None:
        self._actors[slot].release.remote(trial, idle_s if self._others else None)

    def say_through(self, say: Callable[[str], None]) -> None:
        """Call `say` with the notes on the machines now, and later with what changes."""
        for note in self._share.notes:
            say(note)
        self.devices.say = say

    def show(self, slot: int, line: str) -> None:
        """Show a line on the dashboard: in its table of tasks, and in the log of the actor."""
        if slot < len(self._actors):  # there is one as soon as a trial has its devices
            self._actors[slot].note.options(name=line[:WIDTH]).remote(line)

    def listeners(self, folder: Path, space: SearchSpace) -> Sequence[Listener]:
        """Return what shows the trials of a search on the dashboard."""
        return (RayDashboardReporter(folder, space, self.show),)

    def _provide_actor(self, slot: int, name: str) -> None:
        calls = CALLS_OF_A_RANK * self._share.sizes[-1] + OTHER_CALLS
        if slot == len(self._actors):  # numbers are given in order
            actor = ray.remote(SlotActor).options(
                name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=calls, max_restarts=-1,
                max_task_retries=-1, label_selector=beside(),
            )  # fmt: skip
            arguments = (name, self._storage, self._share.working_folder, self._templates)
            self._actors.append(actor.remote(*arguments))
