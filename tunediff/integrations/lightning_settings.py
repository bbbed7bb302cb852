"""Settings of Lightning's Trainer that the search sets: ranks, precision, strategy, points."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tunediff.training.trial import Trial

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


class TrainedMixed:
    """Mixed precision in training; every model is judged in float32."""

    @contextlib.contextmanager
    def val_step_context(self) -> Iterator[None]:
        yield


class Ranks:
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


def fixed(trial: Trial, framework: Any) -> dict[str, Any]:
    """Return the settings of the Trainer that the trial's knobs and ranks determine."""
    return {
        "strategy": _strategy(trial, framework), "devices": 1, "num_nodes": trial.world.size,
        "accelerator": "gpu" if trial.device.type == "cuda" else "cpu",
        "use_distributed_sampler": True,
        "accumulate_grad_batches": trial.config.loader.accumulation, "num_sanity_val_steps": 0,
        "val_check_interval": 10**12, "check_val_every_n_epoch": None,
    }  # fmt: skip


def _strategy(trial: Trial, framework: Any) -> Any:
    """Return the strategy of Lightning for the ranks and the number format of this trial."""
    amp, scaler, of = trial.config.precision.amp, trial.scaler, framework.strategies
    if amp == "none":
        precision = framework.precision.Precision()
    else:
        name = {"bf16": "bf16-mixed", "fp16": "16-mixed"}[amp]
        scaler_of_amp = scaler if amp == "fp16" else None
        precision = framework.trained_mixed(name, trial.device.type, scaler_of_amp)
    if trial.world.size == 1:
        return of.SingleDeviceStrategy(trial.device, precision_plugin=precision)
    options = trial.config.parallel
    return of.DDPStrategy(
        parallel_devices=[trial.device], cluster_environment=framework.ranks(trial),
        precision_plugin=precision,
        bucket_cap_mb=options.bucket_mib, static_graph=options.static_graph,
        gradient_as_bucket_view=True,
    )  # fmt: skip
