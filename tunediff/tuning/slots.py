"""The slots of a session: started, warmed up and closed together."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from tunediff.config import Systems
from tunediff.core.files import plain
from tunediff.tuning import cluster
from tunediff.tuning.cluster import beside
from tunediff.tuning.messages import NAMESPACE
from tunediff.tuning.pool import Pool
from tunediff.tuning.resources import ResourcePartition, omp_notes
from tunediff.tuning.slot import Slot
from tunediff.tuning.trial_spec import WorkerGroupSpec

IDLE_S = 5.0  # workers without a job keep their devices this long where other slots may need them
WARM_S = 60.0  # the same for workers that were started before the first job


class Slots:
    """The slots of a session: as many actors as trials have run at once."""

    def __init__(
        self, folder: Path, share: ResourcePartition, nodes: cluster.Nodes | None = None
    ) -> None:
        """`folder`: of the search, for Ray Train's own files; `nodes`: the usable nodes of a
        cluster."""
        # Several searches may share a cluster, where a name must be its own.
        self.prefix = f"{plain(folder.name)}-{uuid.uuid4().hex[:6]}-slot-"
        self.device = "cuda" if share.gpu else "cpu"
        self.environment = None if nodes is None else nodes.environment
        """Of a cluster's node; {}: not known; None: trials run on this machine."""
        self._storage, self._here = str(folder / "train"), share.here
        self.actors: list[Any] = []
        self._others = (
            share.slots > 1 or nodes is not None
        )  # slots or nodes that may need the devices of an idle slot
        self.pool = Pool(share, nodes, self._make, self._free, self.prefix)
        self._notes, self._nodes = (*share.notes, *omp_notes(share)), nodes

    def warm(self, config: Systems) -> None:
        """Start the workers of the first trials, which train this configuration, while Tune starts
        up."""
        allocations = []
        while (allocation := self.pool.take(config.parallel.workers, waits=False)) is not None:
            allocations.append(allocation)
            spec = WorkerGroupSpec(config.parallel.workers, allocation.place)
            self.actors[allocation.slot].warm.remote(spec, config.schema.workload)
        for allocation in allocations:
            self.pool.give(allocation.slot, used=False)
            self._free(allocation.slot, WARM_S)

    def tell(self, say: Callable[[str], None]) -> None:
        """Call `say` with the notes on the machines now, and later with what changes."""
        for note in self._notes:
            say(note)
        self.pool.say = say
        if self._nodes is not None:
            self._nodes.say = say

    def close(self) -> None:
        """Let all workers leave."""
        for actor in self.actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(actor.close.remote(), timeout=30)

    def _make(self, slot: int) -> None:
        while len(self.actors) <= slot:
            self.actors.append(
                _create(f"{self.prefix}{len(self.actors)}", self._storage, self._here)
            )

    def _free(self, slot: int, after_s: float = IDLE_S) -> None:
        if self._others:
            self.actors[slot].free.remote(after_s)


@contextlib.contextmanager
def opened(
    folder: Path, share: ResourcePartition, warm: Systems | None, nodes: cluster.Nodes | None = None
) -> Iterator[Slots]:
    """Yield the slots for what runs in `folder`.

    `warm`: configuration that the first trials train, if their workers may start now.
    """
    slots = Slots(folder, share, nodes)
    try:
        if warm is not None:
            slots.warm(warm)
        yield slots
        slots.close()  # not after a fault: the slots end with the cluster
    finally:
        if nodes is not None:
            nodes.close()


def _create(name: str, storage: str, here: str) -> Any:
    actor = ray.remote(Slot).options(
        name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=1000, max_restarts=-1, max_task_retries=-1,
        label_selector=beside(),
    )  # fmt: skip
    return actor.remote(name, storage, here)
