"""A slot as the driver of a trial sees it: an actor of Ray, or a part of this process. Imports no
Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tunediff.tuning.messages import Event, get
from tunediff.tuning.resources import Placement
from tunediff.tuning.trial_spec import TrialSpec


class SlotClient(Protocol):
    """What the driver of a trial calls."""

    def submit(self, job: TrialSpec) -> str:
        """Hand over a job and return its serial; the job of a driver that was restarted runs on."""

    def event(self, serial: str, cursor: int) -> Event | None:
        """Return event number `cursor` of the job; None if it does not happen within seconds."""

    def let_go_on(self, serial: str, index: int) -> None:
        """Let the trial train on after point `index`."""

    def kill(self, reason: str) -> None:
        """End the job and its processes at once."""

    def missing_s(self) -> float:
        """Return for how many seconds the workers have been starting; 0: they have started."""

    def gone(self, nodes: Sequence[str]) -> list[str]:
        """Return those of these nodes that are not alive any more."""

    def draining(self, nodes: Sequence[str]) -> list[str]:
        """Return those of these nodes that will be removed soon."""

    def lacks(self, place: Placement) -> str:
        """Return in words what workers that have not started wait for."""


LOCAL: dict[str, SlotClient] = {}
"""Slots of this process, by name."""


def client(slot: str) -> SlotClient:
    """Return a slot by its name: one of this process, or an actor of Ray."""
    if slot in LOCAL:
        return LOCAL[slot]
    from tunediff.tuning.slot import RaySlot

    return RaySlot(get(slot))
