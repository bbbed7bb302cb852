"""What a checkpoint of a trial takes from Lightning: its loops' counters, its callbacks' states."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch


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

    def __init__(self, trainer: Any, module: Any, checkpoint: type) -> None:
        """`checkpoint`: the class of callbacks that write files."""
        self._trainer, self._module = trainer, module
        self._callbacks = [
            callback for callback in trainer.callbacks if not isinstance(callback, checkpoint)
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
