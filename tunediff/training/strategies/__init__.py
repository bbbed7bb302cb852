"""How the processes of a training share its work. To add one: a subclass of `Single`."""

from __future__ import annotations

from tunediff.config.systems import Systems
from tunediff.distributed import World
from tunediff.training.strategies.single import Ddp, Single

__all__ = ["Single", "build"]


def build(config: Systems, world: World) -> Single:
    """Return the strategy of a configuration; one process trains alone, but with `dp`."""
    name = config.parallel.strategy
    if name == "dp" and config.parallel.workers > 1:
        from tunediff.training.strategies.dp import Dp

        return Dp(config, world)
    if name == "fsdp" and world.size > 1:
        from tunediff.training.strategies.fsdp import Fsdp  # a second of imports

        return Fsdp(config, world)
    if name == "pipeline" and world.size > 1:
        from tunediff.training.strategies.pipeline import Pipeline

        return Pipeline(config, world)
    return (Ddp if world.size > 1 else Single)(config, world)
