"""Contenders: our training step and sampler, and those of public packages, each in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core.clock import Budget
from tunediff.core.point import Point
from tunediff.data import images as data
from tunediff.data.images import Images
from tunediff.distributed import World, alone
from tunediff.training import memory, trial
from tunediff.training.compilation import Compilation
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.precision import Amp
from tunediff.workloads.diffusion import commands, unet
from tunediff.workloads.diffusion.evaluator import generate, to_uint8
from tunediff.workloads.diffusion.process import Diffusion

BATCHES = 8  # distinct batches, taken in turn
TUNED = {
    "memory.channels_last": True,
    "compile.mode": "default",
    "optimizer.implementation": "fused",
    "precision.cudnn_benchmark": True,
}


@dataclasses.dataclass(frozen=True)
class Job:
    """What one contender is to do."""

    name: str
    tuned: bool
    """Compiled, and with all of `TUNED`."""
    switches: bool
    """Whether a peer takes memory format and AMP from the configuration; else it is as it comes."""
    config: dict[str, Any]
    """Every knob by dotted name."""
    sampling: bool
    steps: int
    """Optimizer steps, or batches sampled, per round."""
    rounds: int
    """Counted rounds; one more comes before them."""

    @property
    def label(self) -> str:
        """The name in the table."""
        return self.name + (", tuned" if self.tuned else ", same switches" if self.switches else "")

    @property
    def channels_last(self) -> bool:
        """Whether a peer is to be in NHWC."""
        return self.switches and self.config["memory.channels_last"]

    @property
    def bf16(self) -> bool:
        """Whether a peer is to run under autocast."""
        return self.switches and self.config["precision.amp"] == "bf16"


class Turns:
    """A contender's side of the round robin."""

    def __init__(self, pipe: Connection, job: Job) -> None:
        self._pipe, self._left = pipe, job.rounds + 1

    def wait(self) -> bool:
        """Block until it is this contender's turn; False: there are no more."""
        if self._left == 0:
            return False
        self._left -= 1
        self._pipe.recv()
        return True

    def done(self, seconds: float, cpu_s: float, peak_mib: float, parameters: int) -> None:
        """One round took so long, by the wall clock and by the CPU time of the process."""
        self._pipe.send(
            {"seconds": seconds, "cpu_s": cpu_s, "peak_mib": peak_mib, "parameters": parameters}
        )


def contend(job: Job, pipe: Connection) -> None:
    """A contender's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    try:
        world, turns = alone(), Turns(pipe, job)
        config = cfg.from_dict(cfg.nest(job.config), "job")
        if job.name == "ours" and not job.sampling:
            our_training(job, config, world, turns)
        else:
            build = {name: part[job.sampling] for name, part in PEERS.items()}[job.name]
            steps(job, config, world, turns, build)
    except Exception:
        pipe.send({"error": traceback.format_exc()})


# ------------------------------------------------------------------------------------------------------------ training
def our_training(job: Job, config: Systems, world: World, turns: Turns) -> None:
    """The real loop: one round is what it trains between two of its points, its report waits for the next turn."""
    turns.wait()
    before_mib = 0.0 if world.device.type == "cuda" else _now_mib()
    points = {"evaluation.points": job.rounds + 1, "loader.resident": True}
    config = cfg.override(config, points, check=False)
    parameters = _count(unet.network(config.knobs))
    waited_s = 0.0  # for the turn, since the last point: no CPU time, but part of what `cpu_share` is a share of

    class PrintingObserver(Observer):
        def point(self, point: Point) -> bool:
            nonlocal waited_s
            entered = time.perf_counter()
            seconds = job.steps * config.loader.batch_size / point.samples_per_s
            cpu_s = point.cpu_share * (seconds + waited_s)
            turns.done(seconds, cpu_s, point.peak_memory_mib - before_mib, parameters)
            turns.wait()
            waited_s = time.perf_counter() - entered
            return True

    data.load = lambda section: random_images(config)  # this process has no other data
    budget = Budget(samples=(job.rounds + 1) * job.steps * config.loader.batch_size)
    trial.run(Engine(config, budget, world, PrintingObserver(), evaluates=False))


Steps = tuple[Callable[[Tensor], Any], int]
"""(one step on a float32 batch [B, C, H, W] in [−1, 1], number of parameters)."""


def steps(
    job: Job,
    config: Systems,
    world: World,
    turns: Turns,
    build: Callable[[Systems, World, Job], Steps],
) -> None:
    """A peer: so many steps per turn, the device awaited at both ends."""
    turns.wait()
    before_mib = 0.0 if world.device.type == "cuda" else _now_mib()
    memory.reset(world.device)
    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = job.tuned
    step, parameters = build(config, world, job)
    pixels = random_images(config).pixels.to(world.device)
    batches = pixels.float().div_(127.5).sub_(1.0).split(config.loader.batch_size)
    step(batches[0])  # compiles, and builds the optimizer's state
    going_on = True
    while going_on:
        world.synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        for number in range(job.steps):
            step(batches[number % BATCHES])
        world.synchronize()
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        turns.done(
            seconds,
            cpu_s,
            memory.peak_mib(world.device)["peak_memory_mib"] - before_mib,
            parameters,
        )
        going_on = turns.wait()


def random_images(config: Systems) -> Images:
    """Random pixels in the shape of the configuration's images, equal for all."""
    size = (BATCHES * config.loader.batch_size, config.data.channels, *[config.data.image_size] * 2)
    pixels = torch.randint(
        0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return Images("random", pixels, None, (), (), "random")


def diffusers_training(config: Systems, world: World, job: Job) -> Steps:
    """diffusers' example train_unconditional.py with --use_ema and its defaults."""
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    network, _, scheduler = _diffusers_parts(config, world, job)
    network.train()
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8
    )
    rates = get_scheduler("cosine", optimizer, num_warmup_steps=500, num_training_steps=100_000)
    ema = EMAModel(
        network.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=0.75,
        model_cls=type(network), model_config=network.config,
    )  # fmt: skip
    model = torch.compile(network) if job.tuned else network

    def step(x0: Tensor) -> float:
        noise = torch.randn(x0.shape, device=world.device)
        t = torch.randint(
            0, config.process.steps, (len(x0),), device=world.device, dtype=torch.int64
        )
        x_t = scheduler.add_noise(x0, noise, t)
        with _autocast(world, job):
            output = model(x_t, t).sample
        target = {"epsilon": noise, "x0": x0}.get(config.process.prediction)
        loss = F.mse_loss(
            output.float(), scheduler.get_velocity(x0, noise, t) if target is None else target
        )
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        ema.step(network.parameters())
        return loss.detach().item()

    return step, _count(network)


def lucidrains_training(config: Systems, world: World, job: Job) -> Steps:
    """The body of `Trainer.train` of denoising-diffusion-pytorch, with its defaults."""
    from ema_pytorch import EMA

    diffusion = _lucidrains_diffusion(config, world, job)
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-4, betas=(0.9, 0.99))
    ema = EMA(diffusion, beta=0.995, update_every=10).to(world.device)
    parameters = _count(diffusion)
    if job.tuned:
        diffusion.model = torch.compile(diffusion.model)
    diffusion.train()

    def step(x0: Tensor) -> float:
        with _autocast(world, job):
            loss = diffusion((x0 + 1) / 2)  # it takes [0, 1]
        total = loss.item()
        loss.backward()
        nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        return total

    return step, parameters


# ------------------------------------------------------------------------------------------------------------ sampling
def our_sampling(config: Systems, world: World, job: Job) -> Steps:
    """`generate` as `python -m tunediff.sample` calls it."""
    memory.keep_freed(config.memory.keep_freed, world.device)
    network = unet.network(config.knobs).to(world.device).eval()
    network.requires_grad_(False)
    if config.memory.channels_last:
        network.to(memory_format=torch.channels_last)
    amp, predict = (
        Amp(config.precision, world.device),
        Compilation(config.compile).apply(network, network, unet.ResidualBlock),
    )
    diffusion = Diffusion(config.process, world.device)
    precision = {None: "fp32", torch.bfloat16: "bf16"}[amp.dtype]
    how = {"batch_size": config.loader.batch_size, "sampler": "ddim", "precision": precision}
    evaluation = dataclasses.replace(config.evaluation, **how)
    shape = (config.data.channels, config.data.image_size, config.data.image_size)

    def step(x0: Tensor) -> list[Any]:
        return list(generate(predict, diffusion, evaluation, shape, len(x0), world.device))

    return step, _count(network)


def diffusers_sampling(config: Systems, world: World, job: Job) -> Steps:
    """What `DDIMPipeline` does up to the images' bytes."""
    network, scheduler, _ = _diffusers_parts(config, world, job)
    network.eval().requires_grad_(False)
    model = torch.compile(network) if job.tuned else network

    @torch.no_grad()
    def step(x0: Tensor) -> Tensor:
        x = torch.randn(x0.shape, device=world.device)
        scheduler.set_timesteps(config.evaluation.steps)
        for t in scheduler.timesteps:
            with _autocast(world, job):
                output = model(x, t).sample
            x = scheduler.step(output.float(), t, x, eta=config.evaluation.eta).prev_sample
        return to_uint8(x)

    return step, _count(network)


def lucidrains_sampling(config: Systems, world: World, job: Job) -> Steps:
    """`GaussianDiffusion.sample` with DDIM."""
    diffusion = _lucidrains_diffusion(config, world, job)
    parameters = _count(diffusion)
    if job.tuned:
        diffusion.model = torch.compile(diffusion.model)
    diffusion.eval()

    def step(x0: Tensor) -> Tensor:
        # It draws progress bars.
        with (
            _autocast(world, job),
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stderr(nowhere),
        ):
            return to_uint8(diffusion.sample(batch_size=len(x0)).float() * 2 - 1)

    return step, parameters


PEERS: dict[
    str,
    tuple[Callable[[Systems, World, Job], Steps] | None, Callable[[Systems, World, Job], Steps]],
] = {
    "ours": (None, our_sampling),
    "diffusers": (diffusers_training, diffusers_sampling),
    "denoising-diffusion-pytorch": (lucidrains_training, lucidrains_sampling),
}
"""(training, sampling)."""


# --------------------------------------------------------------------------------------------------------------- parts
def _diffusers_parts(config: Systems, world: World, job: Job) -> tuple[Any, Any, Any]:
    """(UNet2DModel with our architecture and weights, DDIM scheduler, DDPM scheduler)."""
    from diffusers import DDIMScheduler, DDPMScheduler, UNet2DModel

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "ours"
        commands.write_pipeline(folder, config, unet.network(config.knobs).state_dict)
        network = UNet2DModel.from_pretrained(folder / "unet")
        ddpm = DDPMScheduler.from_pretrained(folder / "scheduler")
    if job.channels_last:
        network.to(memory_format=torch.channels_last)
    return network.to(world.device), DDIMScheduler.from_config(ddpm.config), ddpm


def _lucidrains_diffusion(config: Systems, world: World, job: Job) -> Any:
    """GaussianDiffusion over the `Unet` whose size comes nearest to ours."""
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    def build(width: int) -> Any:
        return Unet(
            width, dim_mults=model.multipliers, channels=config.data.channels, dropout=model.dropout
        )

    model = config.model
    with torch.device("meta"):
        parameters = _count(unet.network(config.knobs))
        widths = range(8, 2 * model.channels + 1, 4)
        width = min(widths, key=lambda width: abs(_count(build(width)) - parameters))
    network = build(width)
    if job.channels_last:
        network.to(memory_format=torch.channels_last)
    objective = {"epsilon": "pred_noise", "x0": "pred_x0", "v": "pred_v"}[config.process.prediction]
    return GaussianDiffusion(
        network, image_size=config.data.image_size, timesteps=config.process.steps, objective=objective,
        beta_schedule=config.process.schedule, ddim_sampling_eta=config.evaluation.eta,
        sampling_timesteps=config.evaluation.steps if job.sampling else None,
    ).to(world.device)  # fmt: skip


def _autocast(world: World, job: Job) -> torch.autocast:
    return torch.autocast(world.device.type, torch.bfloat16, enabled=job.bf16)


def _count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _now_mib() -> float:
    """Resident set of this process: what its imports need is not counted."""
    return float(psutil.Process().memory_info().rss) / 2**20
