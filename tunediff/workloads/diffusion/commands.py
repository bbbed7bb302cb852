"""What the commands that use saved models ask of this workload; see `workloads.contract`. Imports torch late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tunediff.workloads.contract import ForeignFormat, SamplerOptions
from tunediff.workloads.diffusion import diffusers_export, drawing

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.evaluation.generation import SampleRequest

sampler_options: SamplerOptions = drawing
foreign_format: ForeignFormat = diffusers_export


def sample_images(network: Any, config: Any, request: SampleRequest) -> Iterator[tuple[int, Tensor]]:
    """Return an iterator over this rank's batches: (number of the first, uint8 [b, C, H, W] or [b, columns, C, H, W]).

    It raises `NonFiniteError`, which may happen on one rank alone.
    """
    import dataclasses

    import torch

    from tunediff.workloads.diffusion.process import Diffusion
    from tunediff.workloads.diffusion.sampling import generate, to_uint8

    # ---- what does not depend on the batch is made before the first one is asked for: sampling alone is timed
    process = Diffusion(config.process, request.device)
    protocol = dataclasses.replace(config.evaluation, seed=request.seed, batch_size=request.batch_size)
    shape = (config.data.channels, config.data.image_size, config.data.image_size)
    steps, columns = protocol.passes(config.process.steps), request.columns
    shown_steps = {round(i * steps / (columns - 1)) for i in range(1, columns)}
    states: list[Tensor] = []

    def after_step(k: int, count: int, x: Tensor) -> None:
        if request.progress is not None:
            request.progress(k, count, x)
        if k + 1 in shown_steps:
            states.append(to_uint8(x))

    batches = generate(
        network, process, protocol, shape, request.images, request.device,
        rank=request.rank, world=request.ranks, progress=after_step,
    )  # fmt: skip
    if columns == 1:
        return batches

    def with_states() -> Iterator[tuple[int, Tensor]]:
        for start, batch in batches:
            count = len(batch)
            noise = to_uint8(request.noise(start, start + count, shape))
            yield start, torch.stack([noise, *(x[:count] for x in states)], 1)
            states.clear()

    return with_states()
