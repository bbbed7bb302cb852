"""Every process has the model and a part of each batch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tunediff.config import ConfigError
from tunediff.training.strategies.single import Single

UNUSED = "parameters that were not used in producing loss"
"""What torch says in the step after one that has not used all parameters, unless the graph is
static."""


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
            # By its own name DistributedDataParallel refuses it without a GPU, though gloo can do
            # it.
            wrapped.register_comm_hook(
                None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
            )
        return wrapped

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        gradients = [one.grad for one in parameters if one.grad is not None]
        sent = torch.bfloat16 if self._options.gradients == "bf16" else None
        mean = self._world.mean(torch.cat([one.flatten().to(sent) for one in gradients]))
        for gradient, part in zip(
            gradients, torch.split(mean, [one.numel() for one in gradients]), strict=True
        ):
            gradient.copy_(part.view(gradient.shape))

    def explain(self, error: RuntimeError) -> None:
        if self._wrapped is None or UNUSED not in str(error):
            return
        learned = [
            name for name, one in self._wrapped.module.named_parameters() if one.requires_grad
        ]
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        names = [learned[int(index)] for index in (indices[1].split() if indices else ())]
        raise ConfigError(
            "parallel.static_graph: False is not allowed: a step has not used all parameters"
            f" ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}); allowed: True where no"
            " step uses them, or parallel.strategy: fsdp"
        ) from error

    def unsynchronized(self) -> contextlib.AbstractContextManager[object]:
        return self._wrapped.no_sync() if self._wrapped is not None else contextlib.nullcontext()
