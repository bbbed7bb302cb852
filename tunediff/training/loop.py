"""One training: a `Config` and a `Budget` in, a curve of evaluations out."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor, nn

from tunediff import config as cfg
from tunediff.clock import Budget, Clock
from tunediff.config import Config
from tunediff.data.cache import write_atomically
from tunediff.data.images import Images
from tunediff.data.loader import Batches
from tunediff.data.loader import build as build_batches
from tunediff.diffusion import timesteps, weighting
from tunediff.diffusion.ema import Ema
from tunediff.diffusion.objective import Objective
from tunediff.diffusion.process import Diffusion
from tunediff.diffusion.unet import Block, UNet
from tunediff.training import checkpoint, hardware, memory
from tunediff.training.parallel import World, no_gradient_sync
from tunediff.training.phases import Phases
from tunediff.training.precision import Amp, NotFiniteError

Report = Callable[[dict[str, Any]], bool]
"""Takes one point of the curve on rank 0; returns whether to train on. Points of an interrupted run come again."""


class Evaluate(Protocol):
    """What judges a model: called on all ranks with `predict(x, t) -> output`, returns the same numbers on all.

    Raises TimeoutError on all ranks when `should_stop()` held on any; it is given only where a training may be stopped.
    """

    def __call__(
        self,
        predict: Callable[[Tensor, Tensor], Tensor],
        diffusion: Diffusion,
        *,
        should_stop: Callable[[], bool] | None = None,
    ) -> Mapping[str, Any]: ...


@dataclasses.dataclass
class Outcome:
    """A training that ended."""

    points: list[dict[str, Any]]
    finished: bool
    """False: asked to stop before the budget was spent, as an open-ended training always is."""
    seconds: dict[str, float]
    steps: int
    images: int
    peak: dict[str, float]
    ema: Ema


def train(
    config: Config,
    budget: Budget,
    images: Images,
    evaluate: Evaluate | None,
    world: World,
    folder: Path | None,
    report: Report,
    *,
    clock: Clock | None = None,
    checkpoint_every_s: float = 300.0,
    initial: dict[str, Tensor] | None = None,
    should_stop: Callable[[], bool] | None = None,
    trace: Callable[[dict[str, float]], None] | None = None,
    after_step: Callable[[], None] | None = None,
) -> Outcome:
    """Train until the budget is spent, evaluating at equal fractions of it; continue from a checkpoint in `folder`.

    All ranks of `world` call it with equal arguments; rank 0 writes and reports. Without `folder` nothing is written,
    without `evaluate` the points carry throughput only: for measurements. `initial` holds weights to start from. When
    `should_stop` holds on any rank, all write a checkpoint and return. `trace` gets loss and learning rate on rank 0
    whenever the clock is read; `after_step` is called after every optimizer step, as torch's profiler wants it.
    Raises `NotFiniteError` when the loss is NaN or infinite, on all ranks at the same step.
    """
    clock, phases = clock or Clock(budget, world.synchronize), Phases(world.device)
    device, local = world.device, config.loader.batch_size // (config.loader.accumulation * world.size)

    # ---- what is trained, and what goes with it
    graphs_before = compiled_graphs()
    with clock.part("setup"):
        memory.reset(device)
        memory.keep_freed(config.memory.keep_freed, device)
        torch.manual_seed(config.seed)  # equal initial weights on all ranks
        network = UNet(config.model, config.data.channels, config.data.image_size).to(device)
        if initial is not None:
            network.load_state_dict(initial)
        diffusion = Diffusion(config.process, device)
        sampler = timesteps.build(config.timesteps, diffusion, config.data.channels)
        weights = weighting.build(config.weighting, diffusion)
        objective = Objective(sampler, weights, diffusion)
        amp, ema = Amp(config.precision, device), Ema(config.ema, network)
        parameters = list(network.parameters())
        optimizer = build_optimizer(config, parameters, weights.parameters())
        model = compiled(world.wrap(network, config.parallel), network, config.compile)
        # Every rank draws t and noise of the whole batch from the same generator and uses its share, so that the
        # number of workers changes the speed and not what is learned.
        generator = torch.Generator(device).manual_seed(config.seed)
        torch.manual_seed(config.seed + 1 + world.rank)  # dropout differs between ranks

    def step(batches: Any) -> Tensor:
        """One optimizer step; returns the mean loss of this rank, on the device."""
        total = torch.zeros((), device=device)
        for micro in range(config.loader.accumulation):
            # ---- images, timesteps and noise
            with clock.part("data_wait", synchronize=False), phases("data_wait"):
                fetched = batches.fetch()
            with phases("host_to_device"):
                x0 = batches.move(fetched)
            with phases("sampler"):
                mine = slice(world.rank * local, (world.rank + 1) * local)
                t, factor = sampler.sample(x0, generator, batch=local * world.size, first=mine.start)
                noise = torch.randn((local * world.size, *x0.shape[1:]), generator=generator, device=device)[mine]
                x_t = diffusion.add_noise(x0, noise, t)
            if config.compile.mode != "none":
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

            # ---- forward and backward
            with no_gradient_sync(model, micro < config.loader.accumulation - 1):
                with phases("forward"):
                    with amp.autocast():
                        output = model(x_t, t)
                    errors = (output.float() - diffusion.target(x0, noise, t)).square().flatten(1).mean(1)
                    loss = (objective.factors(t, factor) * errors).mean() / config.loader.accumulation
                with phases("backward"):
                    amp.scaler.scale(loss).backward()
            with phases("sampler"):
                sampler.update(t, errors.detach(), weights.weights(t))
                if (own_loss := weights.own_loss(t, errors.detach())) is not None:
                    amp.scaler.scale(own_loss / config.loader.accumulation).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()

        # ---- update
        with phases("optimizer"):
            world.average_gradients(weights.parameters())  # those of the network are averaged by its wrapper
            amp.scaler.unscale_(optimizer)
        with phases("sampler"):
            sampler.before_step(errors_at, generator)
        with phases("optimizer"):
            nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm)
            amp.scaler.step(optimizer)
            amp.scaler.update()
            optimizer.zero_grad(set_to_none=True)
        with phases("sampler"):
            sampler.after_step(errors_at)
            objective.refresh()
        return total

    def errors_at(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """ε-errors [n] of the network as it is, for samplers that look ahead; dropout off.

        In passes of the training's own batch size; under torch.compile the last one is filled up, since another shape
        would be compiled anew.
        """
        found = []
        network.eval()
        with torch.no_grad(), amp.autocast():
            for start in range(0, len(t), local):
                size = min(local, len(t) - start) if config.compile.mode == "none" else local
                part = torch.arange(start, start + size, device=device).clamp_(max=len(t) - 1)
                if config.compile.mode != "none":
                    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                x_t = diffusion.add_noise(x0[part], noise[part], t[part])
                output = model(x_t, t[part]).float()
                errors = (diffusion.predict_noise(output, x_t, t[part]) - noise[part]).square().flatten(1).mean(1)
                found.append(errors[: len(t) - start])
        network.train()
        return torch.cat(found)

    # ---- warm up: kernels, autotuning, compilation and the optimizer's own imports, then everything as it was.
    # Without compilation this is setup: only the first trial of a process loads libraries and kernels.
    with clock.part("setup" if config.compile.mode == "none" else "compile"):
        began = time.monotonic()
        warm_up(step, config, network, optimizer, amp, sampler, generator, local, device)
        world.synchronize()
        first_step_s = time.monotonic() - began
        objective.refresh()

    # ---- continue where an earlier attempt stopped
    pace, points = Pace(budget, clock, world), list[dict[str, Any]]()
    pending: dict[str, Any] | None = None  # a point whose evaluation was interrupted
    with clock.part("setup"):
        if folder is not None and (state := checkpoint.load(folder)) is not None:
            restore(state, network, optimizer, amp, ema, sampler, weights, generator, world)
            objective.refresh()
            clock.load_state_dict(state["clock"])
            pace.load_state_dict(state["pace"])
            points, pending = state["points"], state.get("pending")
            del state  # it holds the model, the average and the optimizer once more
        batches = _Primed(build_batches(
            images, config, rank=world.rank, world=world.size, device=device, seed=config.seed,
            start=pace.steps * config.loader.accumulation,
        ))  # fmt: skip
        roofs = Roofs(config, amp, world) | {"first_step_s": first_step_s}

    def save(pending: dict[str, Any] | None = None) -> None:
        if folder is None:
            return
        with clock.part("checkpoint"):
            rng, sampled = world.gather(rng_state(device)), sampler.state_dict()
            if world.main:
                state = {
                    "config": cfg.to_dict(config), "network": network.state_dict(), "optimizer": optimizer.state_dict(),
                    "scaler": amp.scaler.state_dict(), "ema": ema.state_dict(), "sampler": sampled,
                    "weighting": weights.state_dict(),
                    "generator": generator.get_state(), "rng": rng, "points": points,
                    "pending": pending,
                    "clock": clock.state_dict(), "pace": pace.state_dict(),
                }  # fmt: skip
                checkpoint.save(state, folder)
            world.barrier()

    def tell(point: dict[str, Any]) -> bool:
        return bool(world.agree([float(report(point)) if world.main else 0.0])[0])

    try:
        going_on = all([tell(point) for point in points])  # noqa: C419 – every point is told
        (saved_s,), since = world.agree([clock.read()]), _Segment(clock, pace, phases, world)
        losses, peak = _MeanLoss(device), dict[str, float]()
        for index in itertools.count(len(points) + 1):
            if not going_on or (index > config.evaluation.points and not budget.open_ended):
                break
            # ---- train up to the next evaluation
            with clock.part("train"):
                pace.aim(index / config.evaluation.points)
                while not pace.reached:
                    set_learning_rate(optimizer, config, pace.schedule)
                    loss = step(batches)
                    amp.watch(loss)
                    losses.add(loss)
                    before = pace.schedule
                    pace.step(config.loader.batch_size)
                    with phases("ema"):
                        ema.update(network, pace.schedule, pace.schedule - before)
                    if after_step is not None:
                        after_step()
                    if pace.checked:
                        phases.read()  # the clock has just waited for the device
                    if pace.checked and world.largest(float(amp.diverged)) > 0:
                        raise NotFiniteError(f"the loss is not finite after {pace.steps} steps ({pace.train_s:.1f} s)")
                    if pace.checked and trace is not None and world.main:
                        rate = learning_rate(config, before)
                        trace({**pace.position(), "loss": float(loss), "learning_rate": rate})
                    if pace.checked and should_stop is not None and world.largest(float(should_stop())) > 0:
                        going_on = False
                        break
                    if pace.checked and pace.train_s - saved_s > checkpoint_every_s and not pace.reached:
                        save()
                        saved_s = pace.train_s
            if not going_on:
                save()
                break

            # ---- evaluate, save, report: the clock of the budget stands still
            point = since.measure(roofs) | {"index": index, "fraction": index / config.evaluation.points}
            point |= effective_weights(objective, diffusion)
            if config.compile.mode != "none":
                point["compiled_graphs"] = compiled_graphs() - graphs_before
            if world.main and folder is not None:
                write_timesteps(objective, folder)
            point["loss"] = world.mean(losses.take())
            if pending is not None and pending["steps"] == pace.steps:  # nothing was trained since
                point = pending
            if not math.isfinite(point["loss"]):
                raise NotFiniteError(f"no loss was finite up to step {pace.steps} ({pace.train_s:.1f} s)")
            used = memory.peak_mib(device)
            peak = {name: max(value, peak.get(name, 0.0)) for name, value in used.items()}
            point |= {name: world.largest(value) for name, value in peak.items()}
            if evaluate is not None:
                with clock.part("evaluation"):
                    try:
                        asked = {} if should_stop is None else {"should_stop": should_stop}
                        point |= evaluate(ema.model, diffusion, **asked)
                    except TimeoutError:  # asked to stop: it will be measured when the training goes on
                        going_on = False
                if not going_on:
                    save(pending=point)
                    break
                memory.restart_peak(device)  # what sampling needs is not what training needs
            point["seconds"] = dict(clock.seconds)
            points.append(point)
            save()
            saved_s = pace.train_s
            since = _Segment(clock, pace, phases, world)
            going_on = tell(point)
    finally:
        batches.close()
    return Outcome(
        points=points,
        finished=len(points) == config.evaluation.points and not budget.open_ended,
        seconds=dict(clock.seconds),
        steps=pace.steps,
        images=pace.images,
        peak={name: value for name, value in points[-1].items() if name.startswith("peak_")} if points else {},
        ema=ema,
    )


# ------------------------------------------------------------------------------------------------------ how far we are
class Pace:
    """How much of the budget is spent: the same number on every rank at every step.

    Each rank asking its own clock would stop at its own step and leave the others waiting in a collective. Rank 0's
    clock decides for all, at steps all know beforehand; between two of them progress is extrapolated. A reading waits
    for the device, so they are spaced to be rare (1 % of the budget or half a second) yet never to overshoot the stop.
    """

    def __init__(self, budget: Budget, clock: Clock, world: World) -> None:
        self._budget, self._clock, self._world = budget, clock, world
        self.steps = self.images = 0
        self.train_s = self._s_per_step = 0.0
        self.progress, self._per_step, self._stop = 0.0, 0.0, 1.0
        self.rates: list[float] = []
        """Images per second between one reading of the clock and the next."""
        self._start: float | None = None  # progress before the first step: what compilation took of the budget
        self._read_at = self._next_check = self._images_read = 0
        self._exact = self._exact_s = 0.0  # progress and seconds as of the last reading
        self.checked = True
        """Whether the clock was read after the last step."""

    def aim(self, stop: float) -> None:
        """Train until this fraction of the budget is spent; reads the clock."""
        self._stop = stop
        self._check()
        if self._start is None:
            self._start = self.progress

    @property
    def schedule(self) -> float:
        """Fraction of the training there is time for, 0 to 1: what learning rate and EMA follow.

        Charged compile seconds shorten the training; they must not skip its warm-up.
        """
        start = self._start or 0.0
        return (self.progress - start) / (1.0 - start) if start < 1.0 else 1.0

    @property
    def reached(self) -> bool:
        """Whether the stop is reached, by a reading of the clock and not by extrapolation."""
        return self.checked and self.progress >= self._stop - 1e-9

    def step(self, images: int) -> None:
        """One optimizer step over `images` images was queued."""
        self.steps, self.images = self.steps + 1, self.images + images
        self.checked = False
        if self.steps >= self._next_check:
            self._check()
        elif self._budget.seconds is None:
            self.progress = self._clock.progress(0.0, self.images)  # images are counted: nothing to extrapolate
        else:
            self.progress = min(self.progress + self._per_step, self._stop)

    def _check(self) -> None:
        train_s = self._clock.read() if self._world.main else 0.0
        (self.train_s,) = self._world.agree([train_s])
        progress = self._clock.progress(self.train_s, self.images)
        if self.steps > self._read_at:
            steps = self.steps - self._read_at
            self._per_step = max(0.0, (progress - self._exact)) / steps
            self._s_per_step = max(0.0, (self.train_s - self._exact_s)) / steps
            if self.train_s > self._exact_s:
                self.rates.append((self.images - self._images_read) / (self.train_s - self._exact_s))
        self._images_read = self.images
        self.progress = self._exact = progress
        self._exact_s, self._read_at, self.checked = self.train_s, self.steps, True
        self._next_check = self.steps + self._steps_ahead()

    def _steps_ahead(self) -> int:
        if self._per_step <= 0.0:
            return 1
        ahead = [0.01 / self._per_step, (self._stop - self.progress) / self._per_step]
        if self._s_per_step > 0.0:
            ahead.append(0.5 / self._s_per_step)
        return max(1, math.floor(min(ahead)))

    def position(self) -> dict[str, float]:
        """Training seconds, images and steps as of the last reading."""
        return {"train_s": self.train_s, "images": self.images, "steps": self.steps}

    def state_dict(self) -> dict[str, Any]:
        """Steps and images so far, and where the schedule began."""
        return {"steps": self.steps, "images": self.images, "start": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; seconds come from the clock."""
        self.steps, self.images, self._start = state["steps"], state["images"], state["start"]
        self._read_at = self._next_check = self.steps
        self._images_read = self.images


class _Primed:
    """Batches whose first one is there already: loader processes start in setup, not in the first step's wait."""

    def __init__(self, batches: Batches) -> None:
        self._batches, self._first = batches, [batches.fetch()]

    def fetch(self) -> Tensor:
        return self._first.pop() if self._first else self._batches.fetch()

    def move(self, fetched: Tensor) -> Tensor:
        return self._batches.move(fetched)

    def close(self) -> None:
        self._batches.close()


class _MeanLoss:
    """Mean of the finite losses since the last evaluation, kept on the device. Loss scaling passes over the others."""

    def __init__(self, device: torch.device) -> None:
        self._sum, self._steps = torch.zeros(2, device=device), 0

    def add(self, loss: Tensor) -> None:
        finite = torch.isfinite(loss)
        self._sum += torch.stack((torch.where(finite, loss, 0.0), finite.float()))
        self._steps += 1

    def take(self) -> float:
        """The mean, 0 after no step, NaN when no loss was finite; starts anew."""
        total, finite = self._sum.tolist()
        steps, self._steps = self._steps, 0
        self._sum.zero_()
        return (total / finite if finite else math.nan) if steps else 0.0


class Roofs(dict[str, float]):
    """`flops_per_image` of the model and `peak_flops_per_s` of all workers' devices together."""

    def __init__(self, config: Config, amp: Amp, world: World) -> None:
        peak = hardware.peak_flops_per_s(world.device, amp.dtype, config.precision.matmul)
        super().__init__(
            flops_per_image=hardware.flops_per_image(config.model, config.data.channels, config.data.image_size),
            peak_flops_per_s=world.mean(peak) * world.size,
        )


class _Segment:
    """Throughput since the last evaluation."""

    def __init__(self, clock: Clock, pace: Pace, phases: Phases, world: World) -> None:
        self._clock, self._pace, self._phases, self._world = clock, pace, phases, world
        self._seconds, self._images, self._steps = dict(clock.seconds), pace.images, pace.steps
        self._phase_s = phases.read()
        pace.rates.clear()
        self._energy = hardware.EnergyMeter(world.device)
        self._joules = self._energy.joules()
        self._usage = hardware.Usage.now()

    def measure(self, roofs: dict[str, float]) -> dict[str, Any]:
        """Training seconds, images and rates as of now, and what they depend on. All ranks call it together."""
        waited = self._clock.seconds["data_wait"] - self._seconds["data_wait"]
        trained = self._clock.seconds["train"] - self._seconds["train"] + waited
        images, steps = self._pace.images - self._images, self._pace.steps - self._steps
        used, joules = hardware.Usage.now().since(self._usage), self._energy.joules()
        rate = images / trained if trained > 0 else 0.0
        point: dict[str, Any] = {
            "train_s": self._pace.train_s,
            "worker_s": self._pace.train_s * self._world.size,
            "images": self._pace.images,
            "steps": self._pace.steps,
            "images_per_s": rate,
            "images_per_s_sd": statistics.stdev(self._pace.rates) if len(self._pace.rates) > 1 else 0.0,
            "data_wait_share": waited / trained if trained > 0 else 0.0,
            **self._step(trained, steps),
            **roofs,
            "peak_share": rate * roofs["flops_per_image"] / roofs["peak_flops_per_s"],
            "cpu_share": used.own_s / max(1e-9, used.wall_s),
            "load_average": os.getloadavg()[0],
        }
        ranks = self._world.gather((platform.node(), used.own_s, joules and joules - (self._joules or 0.0)))
        if None not in (energy := [joule for _, _, joule in ranks]):
            point |= {"energy_j": sum(energy), "images_per_j": images / sum(energy) if sum(energy) > 0 else 0.0}
        here = sum(own_s for node, own_s, _ in ranks if node == platform.node())
        return point | hardware.disturbance(used, here, psutil.cpu_count() or 1)

    def _step(self, trained: float, steps: int) -> dict[str, float]:
        """Seconds of the mean optimizer step, and of its parts on this rank's device."""
        if not steps:
            return {}
        spent = {name: seconds - self._phase_s[name] for name, seconds in self._phases.read().items()}
        parts = {f"step_{name}_s": seconds / steps for name, seconds in spent.items()}
        return {"step_s": trained / steps, **parts, "step_other_s": max(0.0, trained - sum(spent.values())) / steps}


# ----------------------------------------------------------------------------------------------------------- the parts
def build_optimizer(
    config: Config, parameters: list[nn.Parameter], undecayed: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """AdamW as configured (Loshchilov & Hutter 2019); with no weight decay it is DDPM's Adam."""
    kind = config.optimizer.implementation
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if undecayed:
        groups.append({"params": undecayed, "weight_decay": 0.0})
    return torch.optim.AdamW(
        groups,
        lr=peak_learning_rate(config),
        betas=(0.9, config.optimizer.beta2),
        weight_decay=config.optimizer.weight_decay,
        foreach=kind == "foreach",
        fused=kind == "fused",
    )


def peak_learning_rate(config: Config) -> float:
    """The learning rate after warm-up: scaled by batch/128, by its root, or not."""
    ratio = config.loader.batch_size / 128
    return config.optimizer.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.optimizer.lr_scaling]


def learning_rate(config: Config, progress: float) -> float:
    """The learning rate at a fraction of the budget, 0 to 1: linear warm-up, then constant or falling to zero."""
    warmup = config.optimizer.warmup
    peak = peak_learning_rate(config)
    if progress < warmup:
        return peak * progress / warmup
    rest = (progress - warmup) / (1 - warmup) if warmup < 1 else 0.0
    return (
        peak
        * {
            "constant": 1.0,
            "linear": 1 - rest,
            "cosine": 0.5 * (1 + math.cos(math.pi * rest)),
        }[config.optimizer.decay]
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Config, progress: float) -> None:
    """Set the learning rate of the next step."""
    rate = learning_rate(config, progress)
    for group in optimizer.param_groups:
        group["lr"] = rate


WEIGHT_BINS = 20


def effective_weights(objective: Objective, diffusion: Diffusion) -> dict[str, Any]:
    """W(t) as a point records it: its mean over each of 20 equal parts of the chain, from low to high noise."""
    parts = objective.effective_weight().tensor_split(min(WEIGHT_BINS, diffusion.steps))
    return {"effective_weight": [round(float(part.mean()), 6) for part in parts]}


def write_timesteps(objective: Objective, folder: Path) -> None:
    """What is minimised at every timestep as of now: `timesteps.csv`, one line per t."""
    columns = objective.table()
    lines = [",".join(["t", *columns])]
    for t, row in enumerate(zip(*columns.values(), strict=True)):
        lines.append(",".join([str(t), *(f"{value:.6g}" for value in row)]))
    write_atomically(folder / "timesteps.csv", lambda file: file.write("\n".join([*lines, ""]).encode()))


def compiled(model: nn.Module, network: nn.Module, options: cfg.Compile) -> nn.Module:
    """`model` under torch.compile as configured; `network` is the U-Net inside it."""
    if options.mode == "none":
        return model
    how: dict[str, Any] = {"mode": options.mode, "dynamic": options.dynamic or None}
    if options.scope == "model":
        return torch.compile(model, **how)  # type: ignore[return-value]
    for module in network.modules():
        if isinstance(module, Block):
            module.compile(**how)  # in place: names and state stay
    return model


def compiled_graphs() -> int:
    """Graphs that torch.compile has compiled in this process: more than expected means that it compiles again."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


class _Noise:
    """Batches of noise, for the warm-up."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._shape, self._device = shape, device

    def fetch(self) -> None:
        pass

    def move(self, fetched: None) -> Tensor:
        return torch.zeros(self._shape, device=self._device).uniform_(-1, 1)


def warm_up(
    step: Callable[[Any], Tensor],
    config: Config,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    amp: Amp,
    sampler: timesteps.TimestepSampler,
    generator: torch.Generator,
    local: int,
    device: torch.device,
) -> None:
    """One step at learning rate 0 on noise, after which weights, optimizer, scaler, sampler and RNG are as before."""
    rng, drawn, scale = rng_state(device), generator.get_state(), amp.scaler.state_dict()
    learned = sampler.state_dict()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(_Noise((local, config.data.channels, config.data.image_size, config.data.image_size), device))
    optimizer.state.clear()
    sampler.load_state_dict(learned)
    amp.scaler.load_state_dict(scale)
    generator.set_state(drawn)
    set_rng_state(rng, device)
    if not all(bool(parameter.isfinite().all()) for parameter in network.parameters()):
        raise NotFiniteError("the weights are not finite after a step at learning rate 0")


def rng_state(device: torch.device) -> list[Tensor]:
    """The global generators' states, as dropout uses them."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_rng_state(states: list[Tensor], device: torch.device) -> None:
    """Set the global generators."""
    torch.set_rng_state(states[0].cpu())
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1].cpu(), device)


def restore(
    state: dict[str, Any],
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    amp: Amp,
    ema: Ema,
    sampler: timesteps.TimestepSampler,
    weights: weighting.Weighting,
    generator: torch.Generator,
    world: World,
) -> None:
    """Put everything that learns back to where the checkpoint was written."""
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    amp.scaler.load_state_dict(state["scaler"])
    ema.load_state_dict(state["ema"])
    sampler.load_state_dict(state["sampler"])
    weights.load_state_dict(state["weighting"])
    generator.set_state(state["generator"].cpu())
    set_rng_state(state["rng"][world.rank], world.device)
