"""Run trials on this machine without Ray: the parent of their processes is this one."""

from __future__ import annotations

import contextlib
import functools
import queue
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tunediff.core.point import Point
from tunediff.core.template import Run, TemplateError
from tunediff.tuning import slot_client
from tunediff.tuning.messages import Event, Lost
from tunediff.tuning.pool import Pool
from tunediff.tuning.resources import Placement, ResourcePartition, omp_notes
from tunediff.tuning.templates import Templates
from tunediff.tuning.trial_spec import TrialSpec

POLL_S = 10.0
OUTPUT = "output.txt"
"""File in the folder of a comparison with what its runs print."""


class LocalSlot:
    """Trains one job at a time, in a thread for each rank; a `SlotClient`."""

    def __init__(self, output: Path, workloads: Sequence[str], threads: int) -> None:
        """`workloads`: whose templates are prepared at once, for trials of one rank with as many
        `threads` of torch."""
        self._output = open(output, "ab")  # noqa: SIM115 – closed with the slot
        self._changed = threading.Condition()
        self._ranks: list[_Rank] = []
        self._serial, self._key = "", ""
        self._events: list[Event] = []
        self._decisions: queue.SimpleQueue[int] = queue.SimpleQueue()
        if workloads:
            self._ranks_for(1, threads)
            self._ranks[0].jobs.put(functools.partial(self._ranks[0].prepare, workloads))

    # ---- for the driver of a trial
    def submit(self, job: TrialSpec) -> str:
        self._ranks_for(job.group.size // job.group.place.each, job.group.place.threads)
        self._serial, self._events = uuid.uuid4().hex, []
        self._decisions = queue.SimpleQueue()
        variables = _variables(len(self._ranks))
        for rank, of_rank in zip(self._ranks, variables, strict=True):
            rank.jobs.put(functools.partial(self._train, rank, job, self._serial, of_rank))
        return self._serial

    def event(self, serial: str, cursor: int) -> Event | None:
        with self._changed:
            self._changed.wait_for(lambda: cursor < len(self._events), POLL_S)
            return self._events[cursor] if cursor < len(self._events) else None

    def let_go_on(self, serial: str, index: int) -> None:
        self._decisions.put(index)

    def kill(self, reason: str) -> None:
        self._post(self._serial, Lost(reason))
        self._end_ranks()

    def missing_s(self) -> float:
        return 0.0

    def gone(self, nodes: Sequence[str]) -> list[str]:
        return []

    def draining(self, nodes: Sequence[str]) -> list[str]:
        return []

    def lacks(self, place: Placement) -> str:
        return ""

    def close(self) -> None:
        """End all processes."""
        self._end_ranks()
        self._output.close()

    # ---- in the threads of the ranks
    def _train(self, rank: _Rank, job: TrialSpec, serial: str, variables: dict[str, str]) -> None:
        try:
            rank.templates.train(job, variables, functools.partial(self._take, job, serial))
        except TemplateError as error:
            self._post(serial, Lost(str(error)))
            if variables:  # the other ranks wait for this one
                self._end_ranks()

    def _take(self, job: TrialSpec, serial: str, run: Run, event: Event) -> None:
        self._post(serial, event)
        if isinstance(event, Point) and event.index < job.points:
            self._decisions.get()
            run.send("go")

    def _post(self, serial: str, event: Event) -> None:
        with self._changed:
            ended = bool(self._events) and not isinstance(self._events[-1], Point)
            if serial == self._serial and not ended:
                self._events.append(event)
                self._changed.notify_all()

    # ---- the ranks
    def _ranks_for(self, size: int, threads: int) -> None:
        """Let there be as many ranks, with as many threads of torch each."""
        if [rank.threads for rank in self._ranks] != [threads] * size:
            self._end_ranks()
            self._ranks = [_Rank(threads, self._output) for _ in range(size)]

    def _end_ranks(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.end()


class _Rank:
    """A thread with the templates of one rank: the kernel ends them with the thread."""

    def __init__(self, threads: int, output: Any) -> None:
        self.threads, self.templates = threads, Templates(threads, output)
        self.jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="rank").start()

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            with contextlib.suppress(TemplateError):  # of a template that is prepared in advance
                job()

    def prepare(self, workloads: Sequence[str]) -> None:
        """Prepare all templates: the clock of the first trial would tell of one that is prepared
        later."""
        for template in [self.templates.prepare(workload) for workload in workloads]:
            template.ready()

    def end(self) -> None:
        self.templates.close()
        self.jobs.put(None)


def _variables(ranks: int) -> list[dict[str, str]]:
    """Return the environment of every rank as torchrun describes it; {} of one that trains
    alone."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


class LocalSlots:
    """The one slot of what runs alone on this machine, as callers use `slots.Slots`."""

    environment = None
    actors: Sequence[Any] = ()

    def __init__(self, folder: Path, share: ResourcePartition, workloads: Sequence[str]) -> None:
        self.device = "cuda" if share.gpu else "cpu"
        self._notes = (*share.notes, *omp_notes(share))
        prefix = f"local-{uuid.uuid4().hex[:6]}-"
        self.pool = Pool(share, prefix=prefix)
        self.name = f"{prefix}0"
        place = share.place(share.machines[:1], 1)
        known = workloads if share.sizes[-1] == 1 else ()
        self.slot = LocalSlot(folder / OUTPUT, known, place.threads)

    def tell(self, say: Callable[[str], None]) -> None:
        """Call `say` with the notes on this machine."""
        for note in self._notes:
            say(note)
        self.pool.say = say


@contextlib.contextmanager
def opened(
    folder: Path, share: ResourcePartition, workloads: Sequence[str]
) -> Iterator[LocalSlots]:
    """Yield the slot for what runs in `folder`; prepare the templates of `workloads` meanwhile."""
    slots = LocalSlots(folder, share, workloads)
    slot_client.LOCAL[slots.name] = slots.slot
    try:
        yield slots
    finally:
        del slot_client.LOCAL[slots.name]
        slots.slot.close()
