"""How the processes of a training share its work. To add one: a subclass of `Single` beside the
others."""

from __future__ import annotations

from tunediff.config.systems import Systems
from tunediff.distributed import World
from tunediff.training.strategies.ddp import Ddp
from tunediff.training.strategies.single import Single

__all__ = ["Single", "build"]


def build(config: Systems, world: World) -> Single:
    """The strategy that the configuration asks for; one process trains alone, but with `dp`."""
    if config.parallel.strategy == "dp" and config.parallel.workers > 1:
        from tunediff.training.strategies.dp import Dp

        return Dp(config, world)
    name = config.parallel.strategy if world.size > 1 else "single"
    if name == "fsdp":
        from tunediff.training.strategies.fsdp import Fsdp  # a second of imports

        return Fsdp(config, world)
    if name == "pipeline":
        from tunediff.training.strategies.pipeline import Pipeline

        return Pipeline(config, world)
    return {"ddp": Ddp, "single": Single}[name](config, world)
