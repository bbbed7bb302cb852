"""One process; and what every strategy answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import nn

from tunediff.config.systems import Systems
from tunediff.distributed import World


class Single:
    """One process. One object per training; other strategies change some of its methods."""

    def __init__(self, config: Systems, world: World) -> None:
        self._options, self._world = config.parallel, world

    def wrap(self, model: nn.Module, blocks: type[nn.Module] | None = None) -> nn.Module:
        """The model as the training calls it, on its device; the optimizer is made after this.

        `blocks`: the class of the parts that repeat in it.
        """
        return model

    def keeps(self, one: Any) -> None:
        """Told of all that is in a checkpoint: its state shall be whole on every rank, as one process has it."""

    def unsynchronized(self) -> contextlib.AbstractContextManager[object]:
        """The context of all but the last pass of an accumulation: gradients need not be averaged yet."""
        return contextlib.nullcontext()

    def callable_alone(self, *models: nn.Module) -> contextlib.AbstractContextManager[object]:
        """The context of evaluations: each rank may call these as often as it likes. All ranks enter it together."""
        return contextlib.nullcontext()

    def whole(self, model: nn.Module) -> nn.Module:
        """The model with all of its weights, to be used by any rank without the others. All ranks ask together."""
        return model

    def clip(self, parameters: Iterable[nn.Parameter], norm: float) -> None:
        """Scale the gradients down to this global norm."""
        nn.utils.clip_grad_norm_(parameters, norm)
