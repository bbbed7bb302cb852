"""Every process has the model and a part of each batch."""

from __future__ import annotations

import contextlib

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tunediff.config import ConfigError
from tunediff.training.strategies.single import Single

UNUSED = "parameters that were not used in producing loss"
"""torch's message after a step with unused parameters, unless the graph is static."""


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

    def explain(self, error: RuntimeError) -> None:
        if self._wrapped is not None and UNUSED in str(error):
            raise ConfigError(
                "parallel.static_graph: False is not allowed: a step has not used all parameters;"
                " allowed: True where no step uses them, or parallel.strategy: fsdp"
            ) from error

    def unsynchronized(self) -> contextlib.AbstractContextManager[object]:
        return self._wrapped.no_sync() if self._wrapped is not None else contextlib.nullcontext()
