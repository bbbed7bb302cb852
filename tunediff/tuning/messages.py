"""Messages between trial drivers, slots, workers and the processes that train, and how these find
each other. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunediff.core.point import Point
from tunediff.core.trial_record import End
from tunediff.tuning.trial_spec import TrialSpec

NAMESPACE = "tunediff"


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What a group of workers does next: a job, which is one attempt at a trial, or leave."""

    serial: str = ""
    """Identifies the job; see `Slot.submit`."""
    job: TrialSpec | None = None
    """None: leave."""


@dataclasses.dataclass(frozen=True)
class Lost:
    """The group died or leaves a node that drains, or the slot was restarted and knows nothing of
    the job."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Draining:
    """Nodes of a trial will be taken away: its process writes a checkpoint and ends."""

    nodes: list[str]


Event = Point | End | Lost
"""What a driver gets of its job; an `End` or `Lost` is the last."""
Decision = Literal["go", "stop", "unknown"]
"""Whether to train on after a point; "unknown": the slot has no such job."""


def get(slot: str) -> Any:
    """Return the actor of a slot, from any process of the search."""
    import ray

    return ray.get_actor(slot, namespace=NAMESPACE)
