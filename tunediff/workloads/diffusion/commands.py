"""What the commands that use saved models call of this workload. Imports torch late."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tunediff.workloads.diffusion.diffusers_export import write_pipeline as write_pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.evaluation.generation import SampleRequest


def sample_images(
    network: Any, config: Any, request: SampleRequest
) -> Iterator[tuple[int, Tensor]]:
    """Iterate over this rank's batches: (first number, uint8 [b, C, H, W]).

    It raises `NonFiniteError`, which may happen on one rank alone.
    """
    from tunediff.workloads.diffusion.evaluator import generate
    from tunediff.workloads.diffusion.process import Diffusion

    # What does not depend on the batch is built before the first batch, for sampling is timed.
    process = Diffusion(config.process, request.device)
    protocol = dataclasses.replace(
        config.evaluation, seed=request.seed, batch_size=request.batch_size
    )
    shape = (config.data.channels, config.data.image_size, config.data.image_size)
    return generate(
        network,
        process,
        protocol,
        shape,
        request.images,
        request.device,
        rank=request.rank,
        world=request.ranks,
        progress=request.progress,
    )
