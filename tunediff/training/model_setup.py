"""Take a workload's model: move it to its device and wrap it as the knobs say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from tunediff.training import adapters, memory, precision, shared_code
from tunediff.training.engine import Engine
from tunediff.training.state import Stateful


def prepare(
    run: Engine,
    model: nn.Module,
    blocks: type[nn.Module] | None,
    flops_per_sample: float | Literal["count"] | None,
    export: nn.Module | None,
    kept: Mapping[str, Stateful],
) -> nn.Module:
    """Return the model on its device, under the strategy and torch.compile; see `Trial.prepare`."""
    _move_to_device(run, model, blocks)
    if (
        run.capture.make_graph is not None
        and run.amp.dtype is not None
        and not run.config.compile.active
    ):
        precision.cast_weights_together(model, run.amp.dtype)
    if run.config.compile.active:
        run.shared_code.use(shared_code.key(model, run.config))
    prepared = run.compilation.apply(run.strategy.wrap(model, blocks), model, blocks)
    run.model = _observed(run, model, prepared)
    run.flops_per_sample = flops_per_sample
    if export is not None:
        run.result = export
        kept = {**kept, "export": export}
    if kept:
        strategy = run.config.parallel.strategy
        if run.world.size > 1 and strategy in ("fsdp", "pipeline"):
            raise run.mistake(
                f"parallel.strategy: {strategy} is not allowed with an optimizer made before"
                " trial.prepare, which replaces the parameters; allowed: ddp, or make the"
                " optimizer of net.parameters() after it"
            )
        run.keep({"net": model} | dict(kept))
    return run.model


def adopt(run: Engine, model: nn.Module) -> None:
    """Take a model that a framework wraps, compiles and calls by itself."""
    _move_to_device(run, model, None)
    _observed(run, model, model)
    run.model, run.adopted = model, True


def _observed(run: Engine, model: nn.Module, prepared: nn.Module) -> nn.Module:
    for observer in run.observers:
        prepared = observer.after_prepare(run, model, prepared)
    return prepared


def _move_to_device(run: Engine, model: nn.Module, blocks: type[nn.Module] | None) -> None:
    """Move the model to its device, in its memory format, with the weights that it starts from."""
    if not isinstance(model, nn.Module):
        raise run.mistake(f"trial.prepare takes a torch.nn.Module, not {type(model).__name__}")
    if run.model is not None:
        raise run.mistake(
            "trial.prepare was called twice, and a training has one model; put several into one"
            " nn.ModuleDict"
        )
    run.seeded = torch.initial_seed() == run.config.seed
    model.to(run.device)
    if run.world.size == 1 or run.config.parallel.strategy == "ddp":
        adapters.note_base(model)  # other strategies divide it
    if run.config.memory.channels_last:
        model.to(memory_format=torch.channels_last)
    if (share := run.config.memory.checkpoint) > 0:
        memory.checkpoint(model, blocks, share)
    if run.initial is not None:
        adapters.put_into(model, run.initial)
    run.result = model
