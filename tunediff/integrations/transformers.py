"""A Hugging Face `Trainer` as a workload, under the clock of the trial.

from tunediff.integrations.transformers import fit

def train(trial):
    args = TrainingArguments("out", learning_rate=trial.knobs.lr, num_train_epochs=3)
    fit(trial, args, model_init=make_model, train_dataset=train_set, eval_dataset=held_out)
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch

from tunediff.data import randomness
from tunediff.integrations import require
from tunediff.integrations.loaders import (
    Attributes,
    BudgetScheduler,
    StepLosses,
    UserLoader,
    begin_accelerate,
    check_finished,
    in_float32,
    in_folder,
    refuse_knobs,
    without_early_stopping,
    without_settings,
)
from tunediff.training.trial import Trial

require("transformers", "transformers", "accelerate")

from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    set_seed,
)

_SET_BY = {
    "per_device_train_batch_size": "loader.batch_size",
    "gradient_accumulation_steps": "loader.accumulation",
    "dataloader_num_workers": "loader.workers",
    "dataloader_prefetch_factor": "loader.prefetch_factor",
    "dataloader_persistent_workers": "loader.persistent_workers",
    "dataloader_pin_memory": "loader.pin_memory",
    "bf16": "precision.amp", "fp16": "precision.amp", "torch_compile": "compile.mode",
    "torch_compile_mode": "compile.mode", "seed": "seed",
    "data_seed": "seed", "eval_on_start": "evaluation.points",
    "ddp_bucket_cap_mb": "parallel.bucket_mib", "ddp_static_graph": "parallel.static_graph",
    "fsdp": "parallel.strategy", "deepspeed": "parallel.strategy",
    "parallelism_config": "parallel.strategy", "auto_find_batch_size": "loader.batch_size",
    "load_best_model_at_end": "the budget",
}  # fmt: skip
"""Fields of TrainingArguments, and what sets them here."""
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedules that step by evaluations."""
_TIMES = ("_runtime", "_per_second", "_preparation_time")


def fit(
    trial: Trial, args: Any, *, model: Any = None, model_init: Callable[[], Any] | None = None,
    trainer_class: type[Any] = Trainer, **trainer_options: Any,
) -> Any:  # fmt: skip
    """Call `trainer_class(model, args, **trainer_options).train()` for the trial's budget.

    `evaluate` of the Trainer is the evaluation at every point, unless `trial.evaluate_with` was
    called: an objective such as `eval_loss`. `max_steps` and `num_train_epochs` end nothing: they
    are the length of the learning rate's schedule, which the budget stands for.
    """
    refuse_knobs(trial, "transformers")
    begin_accelerate(trial)
    args = _with_knobs(trial, args)
    if callbacks := trainer_options.get("callbacks"):
        kept = without_early_stopping(trial, callbacks, EarlyStoppingCallback)
        trainer_options["callbacks"] = kept
    if model is None:
        if model_init is None:
            trial.fail("fit(trial, args, …) needs model= or model_init=")
        set_seed(args.seed)
        model = model_init()
    kind = type(f"Trial{trainer_class.__name__}", (_UnderClock, trainer_class), {})
    # as after Trainer.train, which would make the model again
    with contextlib.ExitStack() as preserved:
        if model_init is not None:
            devices = [trial.device] if trial.device.type == "cuda" else []
            preserved.enter_context(torch.random.fork_rng(devices))
            preserved.enter_context(randomness.forked())
        trainer = kind(model=model, args=args, **trainer_options)
        trainer.begin(trial)
    trainer.train()
    check_finished(
        trial,
        trainer.own_loader.finished,
        "Trainer",
        "a callback such as EarlyStoppingCallback did it",
    )
    return trainer


class _UnderClock:
    """What a Trainer does differently under the clock of a trial."""

    trial: Trial
    own_loader: UserLoader
    schedule_steps: int

    def begin(self: Any, trial: Trial) -> None:
        """Hand the model to the trial, and say how it is judged."""
        self.trial = trial
        trial.adopt(self.model)
        self.callback_handler.callbacks.insert(0, _Epochs(self))
        if trial.evaluator is None and self.eval_dataset is not None:
            trial.evaluate_with(self.judge)

    def judge(self: Any) -> dict[str, Any]:
        """Return what the Trainer's own evaluation finds, without what it took."""
        found = in_float32(self.model, self.evaluate)
        return {
            name: value
            for name, value in found.items()
            if not name.endswith(_TIMES) and name != "epoch"
        }

    def get_train_dataloader(self: Any) -> Any:
        loader = super().get_train_dataloader()  # type: ignore[misc]
        group = self.args.gradient_accumulation_steps
        # trl's packing joins the sequences of a batch into one row
        samples = self.trial.shard.count if getattr(self, "padding_free", False) else None
        self.own_loader = UserLoader(self.trial, loader, group=group, samples=samples)
        self._losses = StepLosses(self.trial, self.own_loader, lambda: [self.optimizer])
        return self.own_loader

    def training_step(self: Any, *args: Any, **options: Any) -> Any:
        loss = super().training_step(*args, **options)  # type: ignore[misc]
        self._losses.add(loss)
        return loss

    def set_initial_training_values(self: Any, args: Any, dataloader: Any) -> tuple[Any, ...]:
        _, *values, self.schedule_steps = super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        return (sys.maxsize, *values, sys.maxsize)  # the budget ends the training

    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(self.schedule_steps, optimizer)  # type: ignore[misc]
        self.lr_scheduler = BudgetScheduler(scheduler, self.schedule_steps, self.trial)
        self.own_loader.schedulers = [self.lr_scheduler]
        return self.lr_scheduler

    def _prepare_for_training(self: Any, *args: Any) -> Any:
        prepared = super()._prepare_for_training(*args)  # type: ignore[misc]
        self.trial.keep(
            model=self.model, optimizer=self.optimizer, scheduler=self.lr_scheduler,
            progress=Attributes(self.state, ["global_step", "epoch", "total_flos", "log_history"]),
            losses=Attributes(self, ["_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"]),
        )  # fmt: skip
        if self.accelerator.scaler is not None:
            self.trial.keep(scaler=self.accelerator.scaler)
        return prepared

    def _run_epoch(
        self: Any, *, steps_in_epoch: int, num_update_steps_per_epoch: int, **options: Any
    ) -> None:
        loader = self.own_loader
        if loader.fill():
            batches, replays = loader.left_of_pass(steps_in_epoch)
            super()._run_epoch(  # type: ignore[misc]
                steps_in_epoch=batches,
                num_update_steps_per_epoch=num_update_steps_per_epoch + replays,
                **options,
            )
        self.control.should_training_stop |= loader.finished

    def _finalize_training(
        self: Any, trial: Any, num_train_samples: float, start_time: float
    ) -> Any:
        # what the number of samples covers, for samples per second
        self.state.max_steps = self.schedule_steps
        return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[misc]


class _Epochs(TrainerCallback):  # type: ignore[misc]
    """Corrects `state.epoch`: the Trainer counts the warm-up and passes since a resume."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loader = self._trainer.own_loader
        with contextlib.suppress(TypeError):  # a stream has no length
            state.epoch = loader.position["epoch"] + loader.position["batches"] / len(loader)


def _settings(trial: Trial) -> dict[str, Any]:
    """Return the training arguments that the trial's knobs and ranks determine."""
    loader, amp, compiled = trial.config.loader, trial.config.precision.amp, trial.config.compile
    parallel, several = trial.config.parallel, trial.world.size > 1
    return {
        "per_device_train_batch_size": trial.shard.count,
        "gradient_accumulation_steps": loader.accumulation,
        "dataloader_num_workers": loader.workers, "bf16": amp == "bf16", "fp16": amp == "fp16",
        "dataloader_prefetch_factor": loader.prefetch_factor if loader.workers else None,
        "dataloader_persistent_workers": loader.persistent_workers and loader.workers > 0,
        "dataloader_pin_memory": loader.pin_memory and trial.device.type == "cuda",
        "torch_compile": compiled.active,
        "torch_compile_mode": compiled.mode if compiled.active else None,
        "seed": trial.config.seed, "data_seed": None, "load_best_model_at_end": False,
        "auto_find_batch_size": False, "eval_on_start": False,
        "ddp_bucket_cap_mb": int(parallel.bucket_mib) if several else None,
        "ddp_static_graph": parallel.static_graph if several else None,
    }  # fmt: skip


def _with_knobs(trial: Trial, args: Any) -> Any:
    """Return the arguments with the knobs', which win over those that the user sets too."""
    if str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)) in _BY_METRIC:
        trial.fail(
            f"TrainingArguments: lr_scheduler_type: {args.lr_scheduler_type} is not allowed: it"
            " follows evaluations, which are the trial's points; allowed: a schedule of steps"
        )
    if trial.config.compile.active:
        trial.ignores("compile.dynamic")
    values = _settings(trial)
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    given = {name: getattr(args, name) for name in _SET_BY if name in defaults}
    given = {name: value for name, value in given.items() if value and value != defaults[name]}
    without_settings(trial, type(args), given, _SET_BY, values)
    # the user's own object: save_model(args.output_dir)
    args.output_dir = str(in_folder(trial, args.output_dir))
    ended = {
        "save_strategy": "no",
        "eval_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": trial.device.type == "cpu",
    }
    args = dataclasses.replace(args, **values, **ended)
    args._n_gpu = min(args.n_gpu, 1)  # of several visible ones, a trial has one in each process
    return args
