"""Messages between trial drivers, slots and workers, and how these find each other. Imports no torch.

A configuration travels as the nested dictionary of `config.to_dict`: the class of a workload's configurations is made
where it is needed and cannot be pickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ray

from tunediff import config as cfg
from tunediff.config import Lines, Systems, Values
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget
from tunediff.core.journal import Journal
from tunediff.core.point import Point
from tunediff.core.trial_record import End
from tunediff.search_space import SearchBudget, SearchSpace
from tunediff.tuning.resources import Placement

NAMESPACE = "tunediff"


@dataclasses.dataclass(frozen=True)
class WorkerGroupSpec:
    """Settings that the processes of a group are started with and keep."""

    size: int
    """`parallel.workers`: as many processes, or one with `place.each` devices."""
    keep_freed: bool
    """`memory.keep_freed`; on a GPU, where it changes nothing, always False."""
    place: Placement = dataclasses.field(default_factory=Placement)
    cudnn_benchmark: bool = False
    """`precision.cudnn_benchmark`: a process keeps the plan that cuDNN has chosen for a shape, however the setting
    changes. Without a GPU, where it changes nothing, always False."""

    def __post_init__(self) -> None:
        unused = "keep_freed" if self.place.gpu else "cudnn_benchmark"
        object.__setattr__(self, unused, False)

    @classmethod
    def of(cls, config: Systems, place: Placement) -> WorkerGroupSpec:
        """Return the group that the training of a configuration needs."""
        return cls(config.parallel.workers, config.memory.keep_freed, place, config.precision.cudnn_benchmark)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings that all trial drivers of a search share."""

    slots: str
    """Prefix of the names of the slots' actors; the number of the slot follows."""
    experiment: Path
    """The search's folder, absolute."""
    baseline: Lines
    """As `config.to_dict` writes it."""
    source: str
    metric: str
    mode: str
    budget: SearchBudget
    deadline_s: float
    """Wall-clock after which a trial is given up."""
    evaluates: bool
    """Whether models are judged, and kept."""
    fresh: bool
    """Whether every trial gets processes of its own."""
    profile_steps: int
    final: Values
    """Knobs of one more evaluation of every finished model; empty: none."""

    @classmethod
    def of(cls, space: SearchSpace, experiment: Path, slots: str) -> Plan:
        """Return the plan of a search in its folder; `slots`: prefix of the names of their actors."""
        return cls(
            slots=slots, experiment=experiment, baseline=cfg.to_dict(space.baseline), source=space.source,
            metric=space.metric, mode=space.mode, evaluates=space.evaluates, final=space.final, fresh=space.fresh,
            budget=space.budget, deadline_s=space.budget.trial_deadline_s, profile_steps=space.operations,
        )  # fmt: skip

    def configuration(self, drawn: Mapping[str, Any]) -> Systems:
        """Return the full configuration of a trial from its drawn knobs."""
        baseline: Systems = cfg.from_dict(self.baseline, self.source)
        return cfg.override(baseline, drawn, self.source)


def drawn(params: Mapping[str, Any]) -> Values:
    """Return the knobs by dotted name from Tune's parameters of a trial, which hold `trial`, `slot` and `place` too."""
    return {name: value for name, value in params.items() if name not in ("trial", "slot", "place")}


@dataclasses.dataclass(frozen=True)
class Job:
    """One attempt at one trial, for a group of workers."""

    name: str
    """Of the trial."""
    key: str
    """Names the attempt: a driver that was restarted asks for the same one."""
    folder: Path
    """Of the trial, absolute."""
    config: Lines
    """As `config.to_dict` writes it."""
    budget: Budget
    kind: WorkerGroupSpec
    fresh: bool = False
    """Whether it needs processes that have trained nothing, which then train nothing else."""
    evaluates: bool = True
    """Whether the model is judged at every point."""
    keeps: bool = True
    """Whether checkpoints, pictures and weights are written: a probe of the speed is measured again rather than
    continued, and its weights are worth nothing."""
    profile_steps: int = 0
    """Steps after the training whose operations are written down; 0: none."""
    final: Values = dataclasses.field(default_factory=dict)
    """Knobs of one more evaluation of the finished model; empty: none."""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What a group of workers does next: a job, or leave."""

    serial: str = ""
    """Identifies the job; see `Slot.submit`."""
    job: Job | None = None
    """None: leave."""


def end(folder: Path, end: End) -> None:
    """Write the end of a trial to its journal: it will not be run again, so its checkpoint goes, whole or half-written.

    Raises `OSError`; until the end is on disk a restart needs the checkpoint.
    """
    Journal(folder).end(end)
    for left in (*folder.glob(record.CHECKPOINT), *folder.glob(f".{record.CHECKPOINT}.*")):
        left.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Lost:
    """The group died or leaves a node that drains, or the slot was restarted and knows nothing of the job."""

    reason: str


Event = Point | End | Lost
"""What a driver gets of its job; an `End` or `Lost` is the last."""
Decision = Literal["go", "stop", "unknown"]
"""Whether to train on after a point; "unknown": the slot has no such job."""


def get(slot: str) -> Any:
    """Return the actor of a slot, from any process of the search."""
    return ray.get_actor(slot, namespace=NAMESPACE)
