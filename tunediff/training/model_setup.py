"""Take a workload's model: move it to its device and wrap it as the knobs say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from tunediff.training import compilation, memory, precision, weights
from tunediff.training.engine import Engine
from tunediff.training.state import Stateful


def prepare(
    engine: Engine,
    model: nn.Module,
    blocks: type[nn.Module] | None,
    flops_per_sample: float | Literal["count"] | None,
    export: nn.Module | None,
    kept: Mapping[str, Stateful],
) -> nn.Module:
    """Return the model on its device, under the strategy and torch.compile; see `Trial.prepare`."""
    _move_to_device(engine, model, blocks)
    if (
        engine.capture.make_graph is not None
        and engine.amp.dtype is not None
        and not engine.config.compile.active
    ):
        precision.cast_weights_together(model, engine.amp.dtype)
    if engine.config.compile.active:
        engine.shared_code.use(compilation.code_key(model, engine.config))
    prepared = engine.compilation.apply(engine.strategy.wrap(model, blocks), model, blocks)
    engine.model = _observed(engine, model, prepared)
    engine.flops_per_sample = flops_per_sample
    if export is not None:
        engine.result = export
        kept = {**kept, "export": export}
    if kept:
        strategy = engine.config.parallel.strategy
        if engine.world.size > 1 and strategy in ("fsdp", "pipeline"):
            raise engine.mistake(
                f"parallel.strategy: {strategy} is not allowed with an optimizer made before"
                " trial.prepare, which replaces the parameters; allowed: ddp, or make the"
                " optimizer of net.parameters() after it"
            )
        engine.keep({"net": model} | dict(kept))
    return engine.model


def adopt(engine: Engine, model: nn.Module) -> None:
    """Take a model that a framework wraps, compiles and calls by itself."""
    _move_to_device(engine, model, None)
    _observed(engine, model, model)
    engine.model, engine.adopted = model, True


def _observed(engine: Engine, model: nn.Module, prepared: nn.Module) -> nn.Module:
    for observer in engine.observers:
        prepared = observer.after_prepare(engine, model, prepared)
    return prepared


def _move_to_device(engine: Engine, model: nn.Module, blocks: type[nn.Module] | None) -> None:
    """Move the model to its device, in its memory format, with the weights that it starts from."""
    if not isinstance(model, nn.Module):
        raise engine.mistake(f"trial.prepare takes a torch.nn.Module, not {type(model).__name__}")
    if engine.model is not None:
        raise engine.mistake(
            "trial.prepare was called twice, and a training has one model; put several into one"
            " nn.ModuleDict"
        )
    engine.seeded = torch.initial_seed() == engine.config.seed
    model.to(engine.device)
    if engine.world.size == 1 or engine.config.parallel.strategy == "ddp":
        weights.note_base(model)  # other strategies divide it
    if engine.config.memory.channels_last:
        model.to(memory_format=torch.channels_last)
    if (share := engine.config.memory.checkpoint) > 0:
        memory.checkpoint(model, blocks, share)
    if engine.initial is not None:
        weights.put_into(model, engine.initial)
    engine.result = model
