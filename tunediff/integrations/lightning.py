"""A LightningModule as a workload: Lightning's `Trainer` under the clock of the trial.

from tunediff.integrations.lightning import fit

def train(trial):
    fit(trial, MyModule(lr=trial.knobs.lr), datamodule=MyData(), max_epochs=10)
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tunediff.integrations import require
from tunediff.integrations.loaders import (
    BudgetScheduler,
    StepLosses,
    UserLoader,
    check_finished,
    divided,
    in_folder,
    refuse_knobs,
    without_early_stopping,
    without_settings,
)
from tunediff.training.state import copied
from tunediff.training.trial import Trial

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Packages of Lightning, with the same names in both; classes of one are unknown to the other."""
_INSTALLED = PACKAGES[not importlib.util.find_spec("lightning")]
PACKAGE = next((name for name in PACKAGES if name in sys.modules), _INSTALLED)
"""The one that the user's file has imported."""
require("lightning", PACKAGE.partition(".")[0])
pl: Any = importlib.import_module(PACKAGE)
precision: Any = importlib.import_module(f"{PACKAGE}.plugins.precision")
strategies: Any = importlib.import_module(f"{PACKAGE}.strategies")
environments: Any = importlib.import_module(f"{PACKAGE}.plugins.environments")

SET_BY = {
    "precision": "precision.amp", "accumulate_grad_batches": "loader.accumulation",
    "accelerator": "the search",
    "devices": "parallel.workers", "num_nodes": "parallel.workers", "strategy": "parallel.strategy",
    "max_time": "the budget", "min_epochs": "the budget", "min_steps": "the budget",
    "plugins": "precision.amp",
    "val_check_interval": "evaluation.points", "check_val_every_n_epoch": "evaluation.points",
    "num_sanity_val_steps": "the check before a search",
    "use_distributed_sampler": "parallel.workers",
    "limit_train_batches": "the budget", "overfit_batches": "the budget",
    "fast_dev_run": "the budget", "reload_dataloaders_every_n_epochs": "the one loop of a trial",
}  # fmt: skip
"""Settings of Lightning's Trainer, and what sets them here."""


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
    if not isinstance(model, pl.LightningModule):
        trial.fail(f"{type(model).__name__} is no LightningModule of {PACKAGE}")
    refuse_knobs(trial, "Lightning")
    made = fixed(trial)
    trainer_options = without_settings(trial, pl.Trainer, trainer_options, SET_BY, made)
    trial.adopt(model)
    clock = _Clock(trial, model)
    given = trainer_options.pop("callbacks", None) or []
    callbacks = clock.allowed([clock, *(given if isinstance(given, list | tuple) else [given])])
    options = _options(trial, callbacks, trainer_options)
    trainer = pl.Trainer(**options, **made, callbacks=callbacks)
    if isinstance(train_dataloaders, pl.LightningDataModule):
        train_dataloaders, datamodule = None, train_dataloaders
    if train_dataloaders is not None:
        train_dataloaders = clock.wrap(train_dataloaders)
    else:
        owner = datamodule if datamodule is not None else model
        make = owner.train_dataloader
        owner.train_dataloader = lambda: clock.wrap(make())
    knobs = trial.config.compile
    if knobs.active:
        model = torch.compile(model, mode=knobs.mode, dynamic=knobs.dynamic or None)
    trainer.fit(model, train_dataloaders, val_dataloaders, datamodule)
    stopped_by = "a callback such as EarlyStopping, or a hook, stopped it"
    check_finished(trial, clock.finished, "Trainer", stopped_by)
    return trainer


def _options(trial: Trial, callbacks: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's other options: the user's, with all files in the trial's folder."""
    checkpoints, bars = (
        any(isinstance(callback, kind) for callback in callbacks)
        for kind in (pl.callbacks.Checkpoint, pl.callbacks.ProgressBar)
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


class TrainedMixed(precision.MixedPrecision):  # type: ignore[misc]
    """Mixed precision in training; every model is judged in float32."""

    @contextlib.contextmanager
    def val_step_context(self) -> Iterator[None]:
        yield


class Ranks(environments.ClusterEnvironment):  # type: ignore[misc]
    """The ranks of a trial, which are there already."""

    creates_processes_externally, main_address, main_port = True, "127.0.0.1", 0

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._world = trial.world

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world.size

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return 0  # each node of Lightning is one rank here, with one device

    def node_rank(self) -> int:
        return self._world.rank


def fixed(trial: Trial) -> dict[str, Any]:
    """Return the settings of the Trainer that the trial's knobs and ranks determine."""
    return {
        "strategy": _strategy(trial), "devices": 1, "num_nodes": trial.world.size,
        "accelerator": "gpu" if trial.device.type == "cuda" else "cpu",
        "use_distributed_sampler": True,
        "accumulate_grad_batches": trial.config.loader.accumulation, "num_sanity_val_steps": 0,
        "val_check_interval": 10**12, "check_val_every_n_epoch": None,
    }  # fmt: skip


def _strategy(trial: Trial) -> Any:
    """Return the strategy of Lightning for the ranks and the number format of this trial."""
    amp, scaler = trial.config.precision.amp, trial.scaler
    if amp == "none":
        plugin = precision.Precision()
    else:
        name = {"bf16": "bf16-mixed", "fp16": "16-mixed"}[amp]
        scaler_of_amp = scaler if amp == "fp16" else None
        plugin = TrainedMixed(name, trial.device.type, scaler_of_amp)
    if trial.world.size == 1:
        return strategies.SingleDeviceStrategy(trial.device, precision_plugin=plugin)
    options = trial.config.parallel
    return strategies.DDPStrategy(
        parallel_devices=[trial.device], cluster_environment=Ranks(trial),
        precision_plugin=plugin,
        bucket_cap_mb=options.bucket_mib, static_graph=options.static_graph,
        gradient_as_bucket_view=True,
    )  # fmt: skip


class _Clock(pl.Callback):  # type: ignore[misc]
    """Brings a fit of Lightning under the clock of a trial, as one of its callbacks."""

    trainer: Any
    _loader: UserLoader | None = None

    def __init__(self, trial: Trial, module: Any) -> None:
        self._trial, self._module = trial, module
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
        known, trial = pl.callbacks, self._trial
        if any(isinstance(one, known.GradientAccumulationScheduler) for one in callbacks):
            trial.fail("GradientAccumulationScheduler is not allowed; allowed: loader.accumulation")
        return without_early_stopping(trial, callbacks, known.EarlyStopping)

    def wrap(self, loader: Any) -> UserLoader:
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
        self._loader = UserLoader(trial, divided(loader, trial), group=accumulation)
        self._loader.schedulers = self._schedulers
        self._losses = StepLosses(trial, self._loader, lambda: self.trainer.optimizers)
        return self._loader

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
        trial.keep(callbacks=CallbackStates(trainer, pl_module))
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


# ---- what a checkpoint takes from Lightning
class Loops:
    """How far Lightning's loops are: counters that a resume restores, and the warm-up puts back."""

    def __init__(self, trainer: Any) -> None:
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._fit, self._epoch = fit, epoch
        self._parts = {
            "epoch": fit.epoch_progress, "batch": epoch.batch_progress,
            "scheduler": epoch.scheduler_progress,
            "optimizer": epoch.automatic_optimization.optim_progress,
            "manual": epoch.manual_optimization.optim_step_progress,
            "validation": epoch.val_loop.batch_progress,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in self._parts.items()}
        return {**states, "stepped": self._epoch._batches_that_stepped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self._epoch._batches_that_stepped = state["stepped"]
        self._epoch._results.reset()  # means over the epoch begin anew
        if (fetcher := self._fit._data_fetcher) is not None:
            fetcher.fetched = self._epoch.batch_progress.current.ready


class CallbackStates:
    """What callbacks, data module and module put into a checkpoint of Lightning."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module
        self._callbacks = [
            callback
            for callback in trainer.callbacks
            if not isinstance(callback, pl.callbacks.Checkpoint)
        ]
        datamodule = [trainer.datamodule] if trainer.datamodule is not None else []
        self._stateful = {
            getattr(part, "state_key", type(part).__qualname__): part
            for part in (*self._callbacks, *datamodule)
        }

    def state_dict(self) -> dict[str, Any]:
        trainer, weights = self._trainer, self._module.state_dict()
        content = {
            "state_dict": weights,
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
        }
        for callback in self._callbacks:
            callback.on_save_checkpoint(trainer, self._module, content)
        self._module.on_save_checkpoint(content)
        if content["state_dict"] is weights:
            del content["state_dict"]  # the module is kept by itself
        return {
            "states": {name: part.state_dict() for name, part in self._stateful.items()},
            "hooks": content,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = _on_devices_of(self.state_dict(), state)
        content = {"state_dict": self._module.state_dict(), **state["hooks"]}
        self._module.on_load_checkpoint(content)
        for callback in self._callbacks:
            callback.on_load_checkpoint(self._trainer, self._module, content)
        for name, part in self._stateful.items():
            # without a state it had none yet; Lightning does not load that either
            if kept := state["states"][name]:
                part.load_state_dict(kept)


def _on_devices_of(now: Any, state: Any) -> Any:
    """Return `state` with its tensors where those of `now` are: callbacks may keep them."""
    if isinstance(state, torch.Tensor):
        return state.to(now.device) if isinstance(now, torch.Tensor) else state
    if isinstance(state, Mapping) and isinstance(now, Mapping):
        return {name: _on_devices_of(now.get(name), value) for name, value in state.items()}
    if isinstance(state, list | tuple) and isinstance(now, list | tuple):
        pairs = itertools.zip_longest(now[: len(state)], state)
        return type(state)([_on_devices_of(*pair) for pair in pairs])
    return state
