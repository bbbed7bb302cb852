"""The job that travels: a trial, from its proposer to its workers. Imports no torch, Ray."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import Systems, Values
from tunediff.core.clock import UNITS, Budget, UnitName
from tunediff.core.journal import Journal
from tunediff.core.progress import DOING
from tunediff.core.target import Target
from tunediff.core.trial_record import Role
from tunediff.search_space import SearchBudget, SearchSpace
from tunediff.tuning.resources import Allocation, Placement

ITS_OWN_END = Budget(steps=sys.maxsize)
"""Of a command that nothing ends before its own end."""


@dataclasses.dataclass(frozen=True)
class WorkerGroupSpec:
    """The workers of a group: where they run, and how many they are."""

    size: int
    """`parallel.workers`: as many processes, or one with `place.each` devices."""
    place: Placement = dataclasses.field(default_factory=Placement)
    together: bool = False
    """Whether one process uses all devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """One trial that is to run, as processes hand it on.

    Its configuration is in the journal of its folder: its proposer has validated it and written it
    there, and the trial's own processes read it.
    """

    name: str
    """`t0007`: the trial's number in the search."""
    folder: Path
    """Of the trial, absolute."""
    role: Role = "draw"
    """Why it runs: a run is a configuration, its seed and a role."""
    workload: str
    """The name of its workload: of a user's file, the path."""
    points: int
    """Points of its curve."""
    budget: Budget
    unit: UnitName = "wall"
    """Unit of the search's budgets; `budget` is in training seconds."""
    deadline_s: float
    """Wall-clock, evaluations included, after which the trial is given up."""
    metric: str
    """The objective."""
    mode: str
    """"min" or "max"."""
    target: Target | None = None
    """What the workload's metric is to reach: the trial ends there, and fails if it never does."""
    evaluates: bool = True
    """Whether the model is judged at every point."""
    keeps: bool = True
    """Whether checkpoints, pictures and weights are written: a probe of the speed is measured again
    rather than continued, and its weights are worth nothing."""
    profile_steps: int = 0
    """Steps after the training whose operations are written down; 0: none."""
    final: Values = dataclasses.field(default_factory=dict)
    """Knobs of one more evaluation of the finished model; empty: none."""
    run_device: int = 0
    """This machine's device on which it runs, where several run at the same time."""
    slot: int = 0
    actor: str = ""
    """Name of the slot's actor; '' until the trial is placed."""
    group: WorkerGroupSpec = dataclasses.field(default_factory=lambda: WorkerGroupSpec(1))
    """The workers that it needs, and where they run, once the trial is placed."""
    attempt: str = ""
    """Names the attempt: a restarted driver asks its slot for the same one."""

    @classmethod
    def of(
        cls,
        experiment: Path,
        name: str,
        config: Systems,
        budget: SearchBudget,
        **settings: Any,
    ) -> TrialSpec:
        """Return the trial of a validated configuration; `settings`: further fields."""
        return cls(
            name=name,
            folder=experiment / "trials" / name,
            workload=config.schema.workload,
            points=config.evaluation.points,
            group=WorkerGroupSpec(config.parallel.workers, together=config.parallel.together),
            budget=budget.of(config.devices) if budget.per_trial_s else ITS_OWN_END,
            unit=budget.unit,
            deadline_s=budget.trial_deadline_s,
            **settings,
        )

    @classmethod
    def of_space(
        cls,
        space: SearchSpace,
        experiment: Path,
        name: str,
        config: Systems,
        role: Role = "draw",
        run_device: int = 0,
    ) -> TrialSpec:
        """Return the trial of a configuration of a search space."""
        return cls.of(
            experiment,
            name,
            config,
            space.budget,
            role=role,
            run_device=run_device,
            metric=space.metric,
            mode=space.mode,
            target=space.target,
            evaluates=space.evaluates,
            keeps=space.evaluates,
            profile_steps=space.operations,
            final=space.final,
        )

    @property
    def seconds_to_target(self) -> Callable[..., float | None] | None:
        """Return what says when points have met the target, see `Target.seconds`; None: there is none."""
        along = UNITS[self.unit].along
        return self.target and functools.partial(self.target.seconds, along=along)

    @property
    def number(self) -> int:
        """Return the trial's number in its search."""
        return int(self.name[1:])

    def on(self, allocation: Allocation) -> TrialSpec:
        """Return the trial with a slot and with workers on the devices of an allocation."""
        group = dataclasses.replace(self.group, place=allocation.place)
        return dataclasses.replace(self, slot=allocation.slot, actor=allocation.actor, group=group)

    def begin(self, config: Systems, drawn: Values) -> Journal:
        """Write to the trial's journal that it begins, with the configuration that its processes
        then read there, and the knobs that were drawn; return the journal."""
        (self.folder / DOING).unlink(missing_ok=True)  # of an attempt that was killed
        journal = Journal(self.folder)
        known = *cfg.identity(config), drawn, self.budget.seconds
        journal.start(*known, self.number, self.unit, self.role)
        return journal
