"""A loop with an `Accelerator` as a workload: the loop stays, under the clock of the trial.

from tunediff.integrations.accelerate import TrialAccelerator

def train(trial):
    accelerator = TrialAccelerator(trial)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    trial.evaluate_with(lambda: {"accuracy": accuracy(model)})
    for epoch, loader in accelerator.epochs(loader):
        for batch in loader:
            ...
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tunediff.integrations import require
from tunediff.integrations.loaders import (
    BudgetScheduler,
    StepLosses,
    UserLoader,
    begin_accelerate,
    in_float32,
    in_folder,
    refuse_knobs,
    without_settings,
)
from tunediff.training.trial import Trial

require("accelerate", "accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DistributedDataParallelKwargs, TorchDynamoPlugin  # noqa: E402

_SET_BY = {
    "mixed_precision": "precision.amp", "gradient_accumulation_steps": "loader.accumulation",
    "gradient_accumulation_plugin": "loader.accumulation", "cpu": "the search",
    "dynamo_backend": "compile.mode",
    "dynamo_plugin": "compile.mode", "deepspeed_plugin": "parallel.strategy",
    "fsdp_plugin": "parallel.strategy",
    "parallelism_config": "parallel.strategy", "step_scheduler_with_optimizer": "the budget",
}  # fmt: skip
"""Arguments of an Accelerator, and what sets them here."""


class TrialAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator whose settings are the knobs of a trial."""

    def __init__(self, trial: Trial, *, schedule_steps: int | None = None, **options: Any) -> None:
        """`schedule_steps`: of the learning rate's schedule in all; the budget stands for them.
        None: a scheduler steps with the optimizer, whatever the budget is."""
        config = trial.config
        made = {
            "mixed_precision": {"none": "no"}.get(config.precision.amp, config.precision.amp),
            "gradient_accumulation_steps": config.loader.accumulation,
            "cpu": trial.device.type == "cpu",
        }  # fmt: skip
        options = without_settings(trial, Accelerator, options, _SET_BY, made)
        refuse_knobs(trial, "accelerate")
        self._trial, self._schedule_steps = trial, schedule_steps
        self._numbers = itertools.count(1)  # of what is kept beside the model
        self._loader: UserLoader | None = None
        self._losses: StepLosses | None = None
        self._budget_schedulers: list[BudgetScheduler] = []
        handlers = list(options.pop("kwargs_handlers", None) or [])
        if trial.world.size > 1 and not any(
            isinstance(one, DistributedDataParallelKwargs) for one in handlers
        ):
            parallel = config.parallel
            handlers.append(
                DistributedDataParallelKwargs(
                    bucket_cap_mb=int(parallel.bucket_mib), static_graph=parallel.static_graph
                )
            )
        if config.compile.active:
            mode, dynamic = config.compile.mode, config.compile.dynamic or None
            options["dynamo_plugin"] = TorchDynamoPlugin(
                backend="inductor", mode=mode, dynamic=dynamic
            )
        options["project_dir"] = str(in_folder(trial, options.get("project_dir")))
        if (project := options.get("project_config")) is not None:
            project.project_dir = str(
                in_folder(trial, project.project_dir or options["project_dir"])
            )
            project.logging_dir = str(in_folder(trial, project.logging_dir or project.project_dir))
        begin_accelerate(trial)
        super().__init__(kwargs_handlers=handlers, **made, **options)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepare as accelerate does; checkpoints keep models, optimizers and schedulers."""
        trial = self._trial
        for module in (one for one in objects if isinstance(one, nn.Module)):
            trial.adopt(module)
            trial.keep(model=module)
        prepared = super().prepare(*map(self._over_the_budget, objects), **options)
        for one in prepared if len(objects) > 1 else [prepared]:
            if isinstance(one, Optimizer) or hasattr(one, "get_last_lr"):
                trial.keep(**{f"{type(one).__name__}{next(self._numbers)}": one})
        return prepared

    def _over_the_budget(self, one: Any) -> Any:
        if (
            self._schedule_steps is None
            or not isinstance(one, LRScheduler)
            or isinstance(one, ReduceLROnPlateau)
        ):
            return one
        self._budget_schedulers.append(BudgetScheduler(one, self._schedule_steps, self._trial))
        return self._budget_schedulers[-1]

    def epochs(
        self, loader: Iterable[Any], *, samples: int | None = None
    ) -> Iterator[tuple[int, Iterable[Any]]]:
        """Yield each pass's number and batches of the loader, until the budget is spent."""
        trial = self._trial
        if (judge := trial.evaluator) is not None and self._models:
            trial.evaluate_with(lambda: in_float32(self.unwrap_model(self._models[0]), judge))
        if self.scaler is not None:
            trial.keep(scaler=self.scaler)
        steps = self.gradient_accumulation_steps
        passes = self._loader = UserLoader(trial, loader, samples=samples, group=steps)
        passes.schedulers = self._budget_schedulers
        self._losses = StepLosses(trial, passes, lambda: self._optimizers)
        yield from passes.passes()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Make a backward pass as accelerate does; its loss is part of the step's."""
        if self._losses is not None:
            self._losses.add(loss / self.gradient_accumulation_steps)
        super().backward(loss, **options)

    def end_training(self) -> None:
        """Finish the trackers; the process group is that of the trial, which is not over."""
        for tracker in self.trackers:
            tracker.finish()

    def _do_sync(self) -> None:
        """Update with a step's last batch: the batches of a step are fetched together."""
        if self._loader is None:
            super()._do_sync()
        else:
            self.gradient_state._set_sync_gradients(self._loader.last_of_step)
