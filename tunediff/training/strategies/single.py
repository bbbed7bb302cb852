"""One process, and several that each have the model; what every strategy answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tunediff.config.systems import Systems
from tunediff.distributed import World

Context = Callable[[], contextlib.AbstractContextManager[object]]
LossOf = Callable[..., Tensor]


class Single:
    """One process. One object per training; other strategies change some of its methods."""

    owns_passes = False
    """Whether forward and backward pass are its own, by `passes`."""
    devices = 1
    """Devices that each process keeps busy."""

    def __init__(self, config: Systems, world: World) -> None:
        self._options, self._world = config.parallel, world
        self.replicas = world
        """The ranks that have a part of each batch; one, where each sees the complete batch."""

    def wrap(self, model: nn.Module, blocks: type[nn.Module] | None = None) -> nn.Module:
        """Return the model as the training calls it, on its device; the optimizer is made after
        this. `blocks`: the class of the parts that repeat in it."""
        return model

    def keeps(self, stateful: Any) -> None:
        """Called with all that is in a checkpoint: its state shall be complete on every rank."""

    def states_as_shares(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which states may hold this rank's share, for the same ranks."""
        return contextlib.nullcontext()

    def states_for_file(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which only rank 0's states are complete. All ranks enter it."""
        return contextlib.nullcontext()

    def passes(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        loss_of: LossOf,
        weights: Tensor,
        autocast: Context,
    ) -> Tensor:
        """Run forward and backward of Σ weights·losses; return losses [b] on all ranks.

        Only where `owns_passes`. Inputs, targets and weights are rank 0's; the tensor `weights` of
        others becomes it.
        """
        raise NotImplementedError

    def unsynchronized(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of an accumulation's passes but the last: gradients stay local."""
        return contextlib.nullcontext()

    def callable_alone(self, *models: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Return the context in which each rank may call these freely. All ranks enter it."""
        return contextlib.nullcontext()

    def complete(self, *models: nn.Module) -> None:
        """Fill in what other ranks learned of these and of all kept. All ranks call it."""

    def clip(self, parameters: Iterable[nn.Parameter], norm: float) -> None:
        """Scale the gradients down to this global norm."""
        nn.utils.clip_grad_norm_(parameters, norm)


class Ddp(Single):
    """DistributedDataParallel averages the gradients while the backward pass goes on."""

    _wrapped: nn.parallel.DistributedDataParallel | None = None

    def wrap(self, model: nn.Module, blocks: type[nn.Module] | None = None) -> nn.Module:
        device, options = self._world.device, self._options
        wrapped = self._wrapped = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            # they are constants, or their mean would not be what one process has
            broadcast_buffers=False,
            bucket_cap_mb=options.bucket_mib,
            static_graph=options.static_graph,
        )
        if options.gradients == "bf16":
            # A lambda: without a GPU the hook is refused by its name, though gloo can do it.
            wrapped.register_comm_hook(
                None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
            )
        return wrapped

    def unsynchronized(self) -> contextlib.AbstractContextManager[object]:
        return self._wrapped.no_sync() if self._wrapped is not None else contextlib.nullcontext()
