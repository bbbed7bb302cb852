"""What the commands that use saved models call of this workload. Imports torch late."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff.workloads.diffusion import diffusers_export

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.evaluation.generation import SampleRequest


def write_pipeline(folder: Path, config: Any, weights: Callable[[], Mapping[str, Tensor]]) -> str:
    """Write a pipeline folder of diffusers; return the call that samples from it as we do.

    `weights` is called after everything else was checked. Raises `ConfigError`, `OSError`.
    """
    diffusers_export.check(folder, config)
    diffusers_export.write_pipeline(folder, config, weights())
    return diffusers_export.example(folder, config)


def sample_images(
    network: Any, config: Any, request: SampleRequest
) -> Iterator[tuple[int, Tensor]]:
    """Iterate over this rank's batches: (first number, uint8 [b, C, H, W]).

    It raises `NonFiniteError`, which may happen on one rank alone.
    """
    from tunediff.workloads.diffusion.image_sampling import generate
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
