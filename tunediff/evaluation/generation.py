"""Images that a command asks a generator for, and noise that depends on their numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tunediff.data.items import mix


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """The images that a workload's `sample_images(network, config, request)` generates here.

    Example, for a network that turns noise [B, 1, 8, 8] into images in [−1, 1]:

        def sample_images(network, config, request):
            for start, stop in request.batches():
                images = network(request.noise(start, stop, (1, 8, 8)))
                yield start, ((images + 1) * 127.5).round().clamp(0, 255).byte()
    """

    images: int
    """N, images of all ranks; their numbers are 0 to N − 1."""
    seed: int
    batch_size: int
    """Images at once on each rank, at most."""
    device: torch.device
    rank: int = 0
    ranks: int = 1
    progress: Callable[..., None] | None = None
    """Call it after every step of the sampler, if it has steps; arguments are ignored."""

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield (first number, last number + 1) of each batch of this rank."""
        _, size = shares(self.images, self.ranks, self.batch_size)
        for start in range(self.rank * size, self.images, self.ranks * size):
            yield start, min(start + size, self.images)

    def noise(self, start: int, stop: int, shape: Sequence[int]) -> Tensor:
        """Return normal noise, float32 [stop − start, *shape], equal for an image in any batch."""
        return ImageNoise(self.seed, shape, self.device).initial(start, stop)


class ImageNoise:
    """Standard normal noise by image number: the same for an image in any batch, process or run."""

    BLOCK = 64  # images per generator: small enough to start anywhere, large enough to be cheap

    def __init__(self, seed: int, shape: Sequence[int], device: torch.device | str) -> None:
        self._seed, self._shape, self._device = seed, tuple(shape), torch.device(device)

    def initial(self, start: int, stop: int) -> Tensor:
        """Return x_T of images start…stop−1, float32 [stop − start, C, H, W]."""
        return self.step("initial", start, stop)

    def step(self, k: int | str, start: int, stop: int) -> Tensor:
        """Return what sampling step k adds to these images, float32 [stop − start, C, H, W]."""
        # On the CPU: a GPU's generator gives other numbers on other devices.
        first, blocks = start // self.BLOCK, []
        for block in range(first, -(-stop // self.BLOCK)):
            generator = torch.Generator().manual_seed(mix("noise", self._seed, k, block))
            blocks.append(torch.randn(self.BLOCK, *self._shape, generator=generator))
        offset = first * self.BLOCK
        noise = torch.cat(blocks)[start - offset : stop - offset]
        if self._device.type != "cuda":
            return noise.to(self._device)
        # From page-locked memory the host draws the next step's noise while the GPU computes.
        return noise.pin_memory().to(self._device, non_blocking=True)


def shares(n: int, ranks: int, batch_size: int) -> tuple[int, int]:
    """Return (batches of the busiest rank, images in each).

    The batch is the largest one up to `batch_size` that spreads n images evenly over the ranks.
    """
    turns = -(-n // (ranks * batch_size))
    return turns, -(-n // (ranks * turns))
