"""Every process has the model and a part of each batch."""

from __future__ import annotations

import contextlib

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tunediff.training.strategies.single import Single


class Ddp(Single):
    """DistributedDataParallel averages the gradients while the backward pass goes on."""

    _wrapped: nn.parallel.DistributedDataParallel | None = None

    def wrap(self, model: nn.Module, blocks: type[nn.Module] | None = None) -> nn.Module:
        device, options = self._world.device, self._options
        wrapped = self._wrapped = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # they are constants, or their mean would not be what one process has
            bucket_cap_mb=options.bucket_mib,
            static_graph=options.static_graph,
        )
        if options.gradients == "bf16":
            # By its own name DistributedDataParallel refuses it without a GPU, though gloo can do it.
            wrapped.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
        return wrapped

    def unsynchronized(self) -> contextlib.AbstractContextManager[object]:
        return self._wrapped.no_sync() if self._wrapped is not None else contextlib.nullcontext()
