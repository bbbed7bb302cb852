"""A slot runs one trial at a time in a warm group of Ray Train workers.

Starting workers takes longer than a short trial: a controller and every worker start Python and import torch, one after
the other. So a group stays, and its workers take one job after the other from their slot. A job that needs another
`Kind` of group, that compiles, or that follows a fault gets a fresh one. The slot itself is an actor that imports no
torch; trial drivers (Tune) and workers (Train) both talk to it, and each may die and come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import ray

from tunediff.files import plain
from tunediff.record import End, Point
from tunediff.tuning.group import run_group
from tunediff.tuning.messages import NAMESPACE, Decision, Event, Job, Kind, Lost, Order
from tunediff.tuning.resources import Share

POLL_S = 10.0  # a long poll is answered empty after this long, so that a lost caller leaves no request behind for ever
T = TypeVar("T")


class Slot:
    """The meeting place of trial drivers and workers. Methods are coroutines of one actor: no locks but `_turn`."""

    def __init__(self, name: str, storage: str, share: Share) -> None:
        """`storage`: absolute folder of Ray Train's own files."""
        self._name, self._storage, self._share = name, storage, share
        self._changed, self._turn = asyncio.Condition(), asyncio.Lock()
        self._job: Job | None = None
        self._serial = ""  # names the job in hand; unique, so that a slot that was restarted is not mistaken for itself
        self._events: list[Event] = []
        self._ended = True
        self._decisions: set[int] = set()  # indices of the points after which training may go on
        self._dropped: set[str] = set()
        self._waiting_for: int | None = None  # index of the point whose decision the workers wait for
        self._generation = ""
        self._group: Any = None  # the task that runs TorchTrainer.fit()
        self._group_kind, self._group_fresh = Kind(0, False), False
        self._retired: set[str] = set()

    def __repr__(self) -> str:
        job = self._job.name if self._job is not None and not self._ended else "idle"
        return f"Slot({self._name}, {job})"

    async def warm(self, kind: Kind) -> None:
        """Start a group before there is a job for it."""
        async with self._turn:
            if self._group is None:
                self._start(kind, fresh=False)

    async def note(self, line: str) -> None:
        """Log a line; the call's own name is what the dashboard's table of tasks shows."""
        print(line, file=sys.stderr, flush=True)  # the log that the actor's page opens with

    # ---- for trial drivers
    async def submit(self, job: Job) -> str:
        """Hand in a job; returns its serial. A driver that was restarted is attached to its running job."""
        async with self._turn:
            if self._job is not None and not self._ended:
                if self._job.key == job.key:
                    return self._serial
                await self._abandon()
            if self._group is None or self._group_kind != job.kind or job.fresh or self._group_fresh:
                await self._retire()
                self._start(job.kind, job.fresh)
            async with self._changed:
                self._serial = uuid.uuid4().hex
                self._job, self._events, self._decisions, self._ended = job, [], set(), False
                self._waiting_for = None
                self._changed.notify_all()
            return self._serial

    async def event(self, serial: str, cursor: int) -> Event | None:
        """Event number `cursor` of the job, as soon as there is one; None after `POLL_S`."""

        def next_event() -> Event | None:
            if serial != self._serial:
                return Lost("its slot was restarted")
            return self._events[cursor] if cursor < len(self._events) else None

        return await self._wait(next_event)

    async def let_go_on(self, serial: str, index: int) -> None:
        """Answer the workers that wait after point `index`. A scheduler that stops a trial ends its driver instead."""
        async with self._changed:
            if serial == self._serial:
                self._decisions.add(index)
                self._changed.notify_all()

    async def kill(self, reason: str) -> None:
        """End the group now, whatever it does: its workers may hang."""
        async with self._turn:
            await self._kill(reason)

    async def close(self) -> None:
        """Let the group leave, if it is idle; end it otherwise."""
        async with self._turn:
            if self._ended:
                await self._retire()
            else:
                await self._kill("the search ends")

    # ---- for workers
    async def take(self, generation: str, done: str) -> Order | None:
        """The next job, which is not `done`, or to leave when the group is no longer wanted; None: ask again."""

        def next_order() -> Order | None:
            if generation in self._retired or generation != self._generation:
                return Order()
            if self._job is not None and not self._ended and self._serial != done:
                return Order(self._serial, self._job)
            return None

        return await self._wait(next_order)

    async def post(self, serial: str, event: Point | End) -> None:
        """Tell the driver: a point (the workers then ask for the `decision`), or the end of the job."""
        async with self._changed:
            if serial != self._serial or self._ended:
                return
            self._events.append(event)
            self._ended = isinstance(event, End)
            if isinstance(event, End) and event.status in ("oom", "error"):
                self._group_fresh = True  # the workers end with this fault; the next job needs others
            self._waiting_for = event.index if isinstance(event, Point) else None
            self._changed.notify_all()

    async def decision(self, serial: str, index: int) -> Decision | None:
        """Whether to train on after point `index`; None: ask again."""

        def decided() -> Decision | None:
            if serial in self._dropped:
                return "stop"
            if serial != self._serial:
                return "unknown"
            return "go" if index in self._decisions else None

        answer: Decision | None = await self._wait(decided)
        if answer is not None and serial == self._serial:
            self._waiting_for = None
        return answer

    # ---- the group
    def _start(self, kind: Kind, fresh: bool) -> None:
        self._generation = uuid.uuid4().hex[:8]
        self._group_kind, self._group_fresh = kind, fresh
        task = ray.remote(run_group).options(
            num_cpus=0, max_retries=0, name=f"workers of {self._name}, group {self._generation}"
        )
        self._group = task.remote(self._name, self._generation, kind, self._storage, self._share)
        self._watching = asyncio.ensure_future(self._watch(self._generation, self._group))

    async def _watch(self, generation: str, group: Any) -> None:
        reason = "the worker group ended"
        try:
            await group
        except Exception as error:  # whatever ended it, the trial hears of it
            reason = _reason(error)
        async with self._changed:
            if generation == self._generation:
                self._group = None
                if generation not in self._retired:
                    self._lose(reason)
            self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        """The job in hand, if there is one, goes down with its group."""
        if not self._ended:
            self._events.append(Lost(reason))
            self._ended = True

    async def _abandon(self) -> None:
        """The job's driver is gone. If it was stopped early, the workers wait for a decision; else they are busy."""
        async with self._changed:
            waiting = self._waiting_for is not None
            self._dropped.add(self._serial)
            self._ended = True
            self._changed.notify_all()
        if not waiting:
            await self._kill("its trial was given up")

    async def _retire(self) -> None:
        """Let the group leave when its workers ask for the next job, and wait until its resources are free."""
        group = self._group
        if group is None:
            return
        async with self._changed:
            self._retired.add(self._generation)
            self._changed.notify_all()
        try:
            await asyncio.wait_for(asyncio.shield(self._gone(group)), timeout=60)
        except TimeoutError:
            await self._kill("it did not leave")

    async def _kill(self, reason: str) -> None:
        group = self._group
        if group is None:
            return
        async with self._changed:
            self._retired.add(self._generation)
            self._lose(reason)
            self._changed.notify_all()
        ray.cancel(group, force=True)  # its controller and workers belong to it and end with it
        await self._gone(group)

    async def _gone(self, group: Any) -> None:
        while self._group is group:
            async with self._changed:
                await self._changed.wait()

    async def _wait(self, ready: Callable[[], T | None]) -> T | None:
        """The first answer of `ready` that is not None, or None after `POLL_S`."""
        until = time.monotonic() + POLL_S
        async with self._changed:
            while (answer := ready()) is None and (left := until - time.monotonic()) > 0:
                try:
                    await asyncio.wait_for(self._changed.wait(), timeout=left)
                except TimeoutError:
                    return None
            return answer


def _reason(error: Exception) -> str:
    """What Ray says, and the fault of its controller below it: Ray itself leaves out of which kind it is."""
    inner = getattr(getattr(error, "cause", error), "controller_failure", None)
    return str(error) if inner is None else f"{error}\n{type(inner).__name__}: {inner}"


@dataclasses.dataclass(frozen=True)
class Slots:
    """The slots of a session."""

    names: tuple[str, ...]
    actors: tuple[Any, ...]
    device: str
    """Of their workers: `cpu` or `cuda`."""


@contextlib.contextmanager
def opened(folder: Path, share: Share, warm: Kind | None) -> Iterator[Slots]:
    """As many slots as trials may run at once; `warm`: what the workers of the first trials are, if they may start now.

    `folder`: of the search; Ray Train's own files lie in it.
    """
    session = uuid.uuid4().hex[:6]  # several searches may share a cluster, where a name must be its own
    names = tuple(f"{plain(folder.name)}-{session}-slot-{i}" for i in range(share.slots))
    actors = tuple(_create(name, str(folder / "train"), share) for name in names)
    if warm is not None:
        for actor in actors:  # while Tune starts
            actor.warm.remote(warm)
    yield Slots(names, actors, "cuda" if share.gpu else "cpu")
    for actor in actors:  # not after a fault: the cluster's end is theirs
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(actor.close.remote(), timeout=30)


def _create(name: str, storage: str, share: Share) -> Any:
    actor = ray.remote(Slot).options(
        name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=1000, max_restarts=-1, max_task_retries=-1
    )
    return actor.remote(name, storage, share)
