"""Digits out of noise: diffusers' U-Net learns the velocity of straight paths from noise to image (flow matching,
Lipman et al. 2022, arXiv 2210.02747; straight paths: Liu et al. 2022, arXiv 2209.03003), and Heun's method follows it.

Judged by the Fréchet distance of 512 images in the features of a small classifier of these digits, which is called so:
FD (classifier). It is no FID, and is compared only with numbers of this file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from diffusers import UNet2DModel
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tunediff import Choice, Metric, Range, Trial
from tunediff.data import images
from tunediff.data.knobs import Data
from tunediff.evaluation.features import Classifier
from tunediff.evaluation.generation import SampleRequest
from tunediff.evaluation.judge import Judge


@dataclass(frozen=True)
class Knobs:
    channels: Annotated[int, Choice(16, 32, 48)] = 16
    """Of the U-Net's first level; the second has twice as many."""
    lr: Annotated[float, Range(1e-4, 1e-2, log=True)] = 1e-3
    spread: Annotated[float, Range(0.0, 2.0)] = 1.0
    """How times are drawn: 0 all in the middle of the path, 1 the logistic-normal of SD3 (arXiv 2403.03206)."""
    ema: Annotated[float, Range(0.9, 0.999)] = 0.98
    """Decay per step of the averaged weights, which are judged."""


OBJECTIVE = Metric("frechet", "min", "FD")
UNIT = "images"
BASELINE = {"loader.batch_size": 64, "loader.workers": 0}


def network(knobs: Knobs) -> nn.Module:
    unet: nn.Module = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=8,
        block_out_channels=(knobs.channels, 2 * knobs.channels), add_attention=False,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return unet


def train(trial: Trial) -> None:
    unet = network(trial.knobs)
    net = trial.prepare(unet)
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    averaged = AveragedModel(
        unet, multi_avg_fn=get_ema_multi_avg_fn(trial.knobs.ema), use_buffers=True
    )
    trial.keep(net=unet, optimizer=optimizer, averaged=averaged)
    trial.export_model(averaged.module)

    digits = images.load(
        Data(name="digits", split="all", image_size=8, channels=1, horizontal_flip=False)
    )
    judge = Judge(digits, Classifier(digits, trial.device), trial.world)
    noises = torch.randn(4, 128, 1, 8, 8, generator=torch.Generator().manual_seed(0)).to(
        trial.device
    )

    def judged() -> dict[str, object]:
        mine = noises[trial.world.rank :: trial.world.size]
        metrics = judge(heun(averaged.module, noise) for noise in mine)
        trial.show("samples", judge.last_images)
        return dict(metrics)

    trial.evaluate_with(judged)
    for pixels in trial.batches(digits.pixels):
        image = pixels / 127.5 - 1
        noise, time = trial.randn_like(image), trial.randn_like(image[:, 0, 0, 0])
        time = torch.sigmoid(trial.knobs.spread * time)
        between = torch.lerp(noise, image, time[:, None, None, None])
        with trial.autocast():
            loss = F.mse_loss(velocity(net, between, time), image - noise)
        trial.step(loss, optimizer)
        if trial.sync_gradients:
            averaged.update_parameters(unet)


def velocity(net: nn.Module, x: Tensor, time: Tensor) -> Tensor:
    return net(x, 1000 * time, return_dict=False)[0]


def heun(net: nn.Module, x: Tensor, steps: int = 5) -> Tensor:
    """Bytes from noise; each step takes the mean of the velocities at its two ends."""
    for start in range(steps):
        now, then = (x.new_full((len(x),), one / steps) for one in (start, start + 1))
        first = velocity(net, x, now)
        x = x + (first + velocity(net, x + first / steps, then)) / 2 / steps
    return ((x + 1) * 127.5).round().clamp(0, 255).byte()


@torch.no_grad()
def sample_images(
    net: nn.Module, config: Any, request: SampleRequest
) -> Iterator[tuple[int, Tensor]]:
    """What `tunediff sample RUN` draws."""
    for start, stop in request.batches():
        yield start, heun(net, request.noise(start, stop, (1, 8, 8)))
