"""A LightningModule as a workload: Lightning's `Trainer` under the clock of the trial.

from tunediff.integrations.lightning import fit

def train(trial):
    fit(trial, MyModule(lr=trial.knobs.lr), datamodule=MyData(), max_epochs=10)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tunediff.integrations import require
from tunediff.integrations.lightning_settings import SET_BY, Ranks, TrainedMixed, fixed
from tunediff.integrations.lightning_state import CallbackStates, Loops
from tunediff.integrations.seam import (
    BudgetScheduler,
    StepLosses,
    check_finished,
    in_folder,
    refuse_knobs,
    without_settings,
)
from tunediff.training.epochs import EpochLoader
from tunediff.training.state import copied
from tunediff.training.trial import Trial

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Packages of Lightning, with the same names in both; classes of one are unknown to the other."""
if not any(importlib.util.find_spec(package.partition(".")[0]) for package in PACKAGES):
    require("lightning", "pytorch_lightning")


class _Framework:
    """One package of Lightning: its modules, and our classes that are derived from its."""

    def __init__(self, package: str) -> None:
        self.pl: Any = importlib.import_module(package)
        self.callbacks: Any = importlib.import_module(f"{package}.callbacks")
        self.precision: Any = importlib.import_module(f"{package}.plugins.precision")
        self.strategies: Any = importlib.import_module(f"{package}.strategies")
        environments = importlib.import_module(f"{package}.plugins.environments")
        self.clock: Any = type("_Clock", (_Clock, self.callbacks.Callback), {})
        self.ranks: Any = type("_Ranks", (Ranks, environments.ClusterEnvironment), {})
        mixed = (TrainedMixed, self.precision.MixedPrecision)
        self.trained_mixed: Any = type("_TrainedMixed", mixed, {})


@functools.cache
def _framework(package: str) -> _Framework:
    return _Framework(package)


def _framework_of(trial: Trial, model: Any) -> _Framework:
    """Return the package that a model's LightningModule comes from."""
    for kind in type(model).__mro__:
        for package in PACKAGES:
            if kind.__name__ == "LightningModule" and kind.__module__.startswith(f"{package}."):
                return _framework(package)
    trial.fail(f"{type(model).__name__} is no LightningModule of {' or '.join(PACKAGES)}")


def fit(
    trial: Trial, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None,
    datamodule: Any = None,
    **trainer_options: Any,
) -> Any:  # fmt: skip
    """Call `Trainer(**trainer_options).fit(model, …)` for the budget; returns the Trainer.

    The validation loop is the evaluation at every point, unless `trial.evaluate_with` was called;
    its logged values are what it finds. `max_steps` and `max_epochs` end nothing: they are the
    length of learning rate schedules, which the budget stands for.
    """
    framework = _framework_of(trial, model)
    pl = framework.pl
    refuse_knobs(trial, "Lightning")
    made = fixed(trial, framework)
    trainer_options = without_settings(trial, pl.Trainer, trainer_options, SET_BY, made)
    trial.adopt(model)
    clock = framework.clock(trial, model, framework)
    given = trainer_options.pop("callbacks", None) or []
    callbacks = clock.allowed([clock, *(given if isinstance(given, list | tuple) else [given])])
    options = _options(trial, framework, callbacks, trainer_options)
    trainer = pl.Trainer(**options, **made, callbacks=callbacks)
    if isinstance(train_dataloaders, pl.LightningDataModule):
        train_dataloaders, datamodule = None, train_dataloaders
    wrapped: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if train_dataloaders is not None:
        train_dataloaders = clock.wrap(train_dataloaders)
    else:
        owner = datamodule if datamodule is not None else model
        wrapped = _wrapped_loader(owner, clock.wrap)
    with wrapped:
        trainer.fit(_compiled(trial, model), train_dataloaders, val_dataloaders, datamodule)
    stopped_by = "a callback such as EarlyStopping, or a hook, stopped it"
    check_finished(trial, clock.finished, "Trainer", stopped_by)
    return trainer


def _compiled(trial: Trial, model: Any) -> Any:
    knobs = trial.config.compile
    if not knobs.active:
        return model
    return torch.compile(model, mode=knobs.mode, dynamic=knobs.dynamic or None)


def _options(
    trial: Trial, framework: _Framework, callbacks: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the Trainer's other options: the user's, with all files in the trial's folder."""
    checkpoints, bars = (
        any(isinstance(callback, kind) for callback in callbacks)
        for kind in (framework.callbacks.Checkpoint, framework.callbacks.ProgressBar)
    )
    for callback in callbacks:
        if getattr(callback, "dirpath", None) is not None:
            callback.dirpath = str(in_folder(trial, callback.dirpath))
    return {
        "max_epochs": -1, "logger": False, "enable_progress_bar": bars,
        "enable_model_summary": False,
        "enable_checkpointing": checkpoints, **given,
        "default_root_dir": in_folder(trial, given.get("default_root_dir")),
    }  # fmt: skip


@contextlib.contextmanager
def _wrapped_loader(owner: Any, wrap: Callable[[Any], EpochLoader]) -> Iterator[None]:
    """Put the training's loader under the clock, until the end of this trial."""
    make, replaced = owner.train_dataloader, "train_dataloader" in vars(owner)
    owner.train_dataloader = lambda: wrap(make())
    try:
        yield
    finally:
        if replaced:
            owner.train_dataloader = make
        else:
            del owner.train_dataloader


class _Clock:
    """Brings a fit of Lightning under the clock of a trial, as one of its callbacks."""

    trainer: Any
    _loader: EpochLoader | None = None

    def __init__(self, trial: Trial, module: Any, framework: _Framework) -> None:
        self._trial, self._module, self._framework = trial, module, framework
        self._schedulers: list[BudgetScheduler] = []
        self._finished: Mapping[str, Any] | None = None
        """Weights to judge that come from a file, not from this training."""

    @property
    def finished(self) -> bool:
        return self._loader is not None and self._loader.finished

    def allowed(self, callbacks: Sequence[Any]) -> list[Any]:
        """Return the callbacks without those that the budget replaces.

        Raises `WorkloadError` for one that does not work under the clock of a trial.
        """
        known, trial = self._framework.callbacks, self._trial
        if any(isinstance(one, known.GradientAccumulationScheduler) for one in callbacks):
            trial.fail("GradientAccumulationScheduler is not allowed; allowed: loader.accumulation")
        kept = [one for one in callbacks if not isinstance(one, known.EarlyStopping)]
        if len(kept) < len(callbacks):
            trial.warn(
                "EarlyStopping is off: the budget ends a trial, or early_stopping of a search"
            )
        return kept

    def wrap(self, loader: Any) -> EpochLoader:
        """Return the training's loader under the clock. Raises `WorkloadError` for several."""
        trial = self._trial
        if isinstance(loader, Mapping | list | tuple) or self._loader is not None:
            trial.fail("train_dataloader: several loaders are not allowed; allowed: one DataLoader")
        try:
            len(loader)
        except TypeError:
            trial.fail(
                "train_dataloader: a loader without a length is not allowed: Lightning fetches one"
                " batch ahead of it; allowed: a DataLoader with a length"
            )
        accumulation = trial.config.loader.accumulation
        self._loader = trial.epoch_loader(loader, group=accumulation, divide=True)
        self._loader.before_step = self._before_step
        self._losses = StepLosses(trial, self._loader, lambda: self.trainer.optimizers)
        return self._loader

    def _before_step(self) -> None:
        for scheduler in self._schedulers:
            scheduler.follow()

    # ---- hooks of Lightning
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take what learns into the checkpoints, and let the budget end the training."""
        self.trainer, trial = trainer, self._trial
        trainer.callbacks = self.allowed(trainer.callbacks)  # configure_callbacks has added some
        # of max_steps or max_epochs, whichever comes first
        steps = trainer.estimated_stepping_batches
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1
        by_itself = pl_module.automatic_optimization  # else the module makes its schedulers' steps
        for config in trainer.lr_scheduler_configs if by_itself else ():
            config.strict = False  # what a plateau is judged by is measured at points only
            if (
                not config.reduce_on_plateau
                and 0 < steps < math.inf
                and hasattr(config.scheduler, "last_epoch")
            ):
                total = steps if config.interval == "step" else steps / self._steps_per_epoch()
                if config.frequency != 1:
                    why = f"frequency: {config.frequency} is not allowed; allowed: 1"
                    trial.fail(f"configure_optimizers: lr_scheduler: {why}")
                config.scheduler = BudgetScheduler(config.scheduler, total, trial)
                self._schedulers.append(config.scheduler)
        trial.keep(module=pl_module, loops=Loops(trainer))
        trial.keep(
            **{f"optimizer{index}": optimizer for index, optimizer in enumerate(trainer.optimizers)}
        )
        schedulers = enumerate(config.scheduler for config in trainer.lr_scheduler_configs)
        trial.keep(**{f"scheduler{index}": scheduler for index, scheduler in schedulers})
        checkpoint = self._framework.callbacks.Checkpoint
        trial.keep(callbacks=CallbackStates(trainer, pl_module, checkpoint))
        if trial.evaluator is None and trainer.enable_validation:
            trial.evaluate_with(self._validate)

    def _steps_per_epoch(self) -> int:
        self.trainer.fit_loop.setup_data()
        batches = float(self.trainer.num_training_batches)
        return math.ceil(batches / self._trial.config.loader.accumulation)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Note the loss, which Lightning has divided by accumulation and scaled by its scaler."""
        scaler = self._trial.scaler
        self._losses.add(
            loss / scaler.scale(torch.ones_like(loss)) if scaler.is_enabled() else loss
        )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave Lightning's loop where the budget is spent."""
        trainer.should_stop = trainer.should_stop or self.finished

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Note what the point judges: by now callbacks have swapped in their averages."""
        if batch_idx == 0 and self._finished is not None:
            # the averages of callbacks are those of an untrained model
            pl_module.load_state_dict(self._finished)
        if batch_idx == 0 and self._trial.has_begun:
            self._trial.note_judged()

    def _validate(self) -> dict[str, Any]:
        """Run Lightning's validation loop, as it does itself within an epoch."""
        trainer, trial = self.trainer, self._trial
        loop = trainer.fit_loop.epoch_loop.val_loop
        # before the first batch nothing will be trained
        judges_module = not trial.has_begun and trial.exported is self._module
        self._finished = copied(self._module.state_dict()) if judges_module else None
        connector = trainer._logger_connector
        first, trainer.validating = connector._first_loop_iter, True
        try:
            found = loop.run()
        finally:
            trainer.training, connector._first_loop_iter = True, first
        values = {name: float(value) for metrics in found for name, value in metrics.items()}
        if not values:
            return values
        of_rank = torch.tensor(
            list(values.values()), dtype=torch.float64, device=self._trial.device
        )
        return dict(zip(values, self._trial.world.mean(of_rank).tolist(), strict=True))
