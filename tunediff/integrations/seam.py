"""What the adapters share: schedules over the budget, ranks, and unavailable knobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tunediff.integrations.loaders import UserLoader
from tunediff.training.trial import Trial


class BudgetScheduler:
    """A learning rate scheduler of `total` steps whose last one is the end of the budget.

    Frameworks call `step`, which does nothing: `follow` moves to where the budget is. With a budget
    of `total` steps every rate is that of the framework alone.
    """

    def __init__(self, scheduler: Any, total: float, trial: Trial) -> None:
        """Raise `WorkloadError` for one that does not count its steps, such as ChainedScheduler."""
        if not hasattr(scheduler, "last_epoch"):
            trial.fail(
                f"{type(scheduler).__name__} is not allowed with a schedule over the budget, since"
                " it has no last_epoch; allowed: SequentialLR, LambdaLR or another single"
                " scheduler of torch.optim.lr_scheduler"
            )
        self._scheduler, self._total, self._trial = scheduler, total, trial

    def step(self, *_: Any) -> None:
        """Do nothing."""

    def follow(self) -> None:
        """Make the steps that the progress of the training asks for."""
        scheduler, target = self._scheduler, int(self._trial.progress * self._total + 1e-6)
        if isinstance(
            scheduler, torch.optim.lr_scheduler.LambdaLR | torch.optim.lr_scheduler.OneCycleLR
        ):
            # their rates follow from the position alone
            scheduler.last_epoch = max(scheduler.last_epoch, target - 1)
        while scheduler.last_epoch < target:
            scheduler.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_scheduler"], name)


def in_folder(trial: Trial, path: str | os.PathLike[str] | None) -> Path:
    """Return where a run writes what the user's file would write to `path`: below the working
    directory, each run in the same place of its own folder. None: that folder."""
    place, working_folder = Path(path or "").absolute(), Path.cwd()
    if place.is_relative_to(working_folder) and not place.is_relative_to(trial.folder):
        return trial.folder / place.relative_to(working_folder)
    return place


class StepLosses:
    """Sums the losses of a framework's backward passes, and records each step that it has made."""

    def __init__(
        self, trial: Trial, loader: UserLoader, optimizers: Callable[[], Sequence[Any]]
    ) -> None:
        """`optimizers`: returns those of the framework; the first one's rate is recorded."""
        self._trial, self._optimizers = trial, optimizers
        self._sum: torch.Tensor | None = None
        loader.after_step = self._record

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a backward pass, before loss scaling."""
        # a copy: a CUDA graph of torch.compile overwrites its output
        self._sum = loss.detach().clone() if self._sum is None else self._sum + loss.detach()

    def _record(self) -> None:
        """Record the step since the last call; a batch that was not trained is none."""
        if self._sum is not None:
            self._trial.record_step(self._sum, next(iter(self._optimizers()), None))
            self._sum = None


class Attributes:
    """The state of an object that lies in some of its attributes, for `trial.keep`."""

    def __init__(self, owner: Any, names: Iterable[str]) -> None:
        self._owner, self._names = owner, tuple(names)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._names:
            value, now = state[name], getattr(self._owner, name)
            setattr(
                self._owner, name, value.to(now.device) if isinstance(now, torch.Tensor) else value
            )


def refuse_knobs(trial: Trial, framework: str) -> None:
    """Raise `WorkloadError` for knobs the framework cannot have; note what it ignores."""
    config = trial.config
    strategy, several = config.parallel.strategy, config.parallel.workers > 1
    if several and strategy != "ddp":
        trial.fail(f"parallel.strategy: {strategy} is not allowed with {framework}; allowed: ddp")
    if config.compile.active and config.compile.scope == "blocks":
        trial.fail(f"compile.scope: blocks is not allowed with {framework}; allowed: model")
    if several and config.parallel.gradients != "float32":
        trial.ignores("parallel.gradients")


SHARDING = ("fsdp", "fsdp_plugin", "deepspeed", "deepspeed_plugin", "parallelism_config")
"""Settings of transformers and accelerate that divide a model over ranks."""


def without_settings(
    trial: Trial, kind: type[Any], settings: Mapping[str, Any], knobs: Mapping[str, str],
    made: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the settings of a class of the framework, without those that a knob makes: it wins.

    One warning names those that ask for something else than `made`. Raises `WorkloadError` for
    `SHARDING`, which no knob stands for.
    """
    for name in SHARDING:
        if settings.get(name):
            trial.fail(
                f"{kind.__name__}: {name} is not allowed; allowed: ranks by parallel.workers"
            )
    other = [
        f"{name}={value!r} ({knobs[name]})"
        for name, value in settings.items()
        if name in knobs and repr(value) != repr(made.get(name))  # 1.0 may mean all, and 1 one
    ]
    if other:
        trial.warn(
            f"{kind.__name__}: {', '.join(other)}: what stands in brackets sets it;"
            ' BASELINE = {"KNOB": VALUE} in your file is for the baseline'
        )
    return {name: value for name, value in settings.items() if name not in knobs}


def check_finished(trial: Trial, finished: bool, framework: str, causes: str) -> None:
    """Raise `WorkloadError` if the framework ended the training before the budget."""
    if not finished and not trial.is_over:
        steps = trial.step_count
        trial.fail(
            f"{framework} ended its training after {steps} steps, before the budget: {causes}"
        )


def begin_accelerate(trial: Trial) -> None:
    """Let accelerate see this trial's ranks, not an earlier one's of the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if trial.world.size > 1:
        # or accelerate would change it
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))


def in_float32(model: torch.nn.Module, judge: Callable[[], Any]) -> Any:
    """Call `judge` while the model's forward pass is without accelerate's autocast."""
    attributes = vars(model)
    mixed, plain = attributes.get("forward"), attributes.get("_original_forward")
    if plain is None:
        return judge()
    attributes["forward"] = plain
    try:
        return judge()
    finally:
        attributes["forward"] = mixed
