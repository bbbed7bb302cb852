"""The actor of a slot, as other processes call it."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from tunediff.ray_backend import cluster
from tunediff.tuning.backend import Event
from tunediff.tuning.mailbox import Command
from tunediff.tuning.trial_spec import TrialSpec

NAMESPACE = "tunediff"


class RaySlot:
    """The actor of a slot as drivers (a `backend.Slot`) and ranks (a `RankMailbox`) call it."""

    def __init__(self, name: str) -> None:
        self._actor = ray.get_actor(name, namespace=NAMESPACE)

    # ---- for drivers
    def start(self, job: TrialSpec) -> str:
        return str(ray.get(self._actor.start.remote(job)))

    def event(self, serial: str, cursor: int) -> Event | None:
        event: Event | None = ray.get(self._actor.event.remote(serial, cursor))
        return event

    def go_on(self, serial: str, index: int) -> None:
        ray.get(self._actor.go_on.remote(serial, index))

    def stop(self, reason: str) -> None:
        ray.get(self._actor.stop_job.remote(reason))

    def missing_s(self) -> float:
        return float(ray.get(self._actor.missing_s.remote()))

    def gone(self, nodes: Sequence[str]) -> list[str]:
        return cluster.gone(nodes)

    # ---- for ranks
    def take_of(self, generation: str, done: str) -> tuple[str, TrialSpec] | None:
        job: tuple[str, TrialSpec] | None = ray.get(self._actor.take_of.remote(generation, done))
        return job

    def post(self, serial: str, event: Event) -> None:
        ray.get(self._actor.post.remote(serial, event))

    def command(self, serial: str, seen: int) -> Command | None:
        command: Command | None = ray.get(self._actor.command.remote(serial, seen))
        return command
