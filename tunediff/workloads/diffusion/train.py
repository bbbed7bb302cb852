"""Train a DDPM (Ho et al. 2020, arXiv 2006.11239) on `Trial`."""

from __future__ import annotations

import torch
from torch import Tensor

from tunediff.data import images as data
from tunediff.training import ema as averages
from tunediff.training import optimizer as optimizers
from tunediff.training.trial import Trial
from tunediff.workloads.diffusion import timesteps
from tunediff.workloads.diffusion.evaluator import Evaluator
from tunediff.workloads.diffusion.knobs import Knobs
from tunediff.workloads.diffusion.objective import DiffusionLoss, build_weighting
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.base import ErrorsAt
from tunediff.workloads.diffusion.unet import ResidualBlock, flops_per_sample, network

__all__ = ["network", "train"]


def train(trial: Trial) -> None:
    """Learn to predict the noise in images; all ranks call it."""
    # ---- the model, and the state that is trained with it
    knobs: Knobs = trial.knobs
    unet, process = network(knobs), Diffusion(knobs.process, trial.device)
    flops = flops_per_sample(knobs.model, knobs.data)
    model = trial.prepare(unet, blocks=ResidualBlock, flops_per_sample=flops)
    sampler = timesteps.build(knobs.timesteps, process, knobs.data.channels, trial.replicas)
    weights = build_weighting(knobs.weighting, process)
    objective, batch_size = DiffusionLoss(sampler, weights, process), trial.config.loader.batch_size
    optimizer = optimizers.build(knobs.optimizer, batch_size, unet, list(weights.parameters()))
    ema = averages.ExponentialAverage(knobs.ema, unet)
    errors_at = look_ahead(trial, unet, model, process)
    trial.keep(network=unet, optimizer=optimizer, ema=ema, objective=objective)
    trial.export_model(ema.model)

    # ---- data, and the evaluation of the averaged weights
    images = data.load(knobs.data)
    trial.about(data=images.name, samples=len(images), digest=images.digest, summary=images.summary)
    add_evaluation(trial, images, ema.model, process, objective)

    # ---- train
    shard = trial.shard
    sampler.defer = trial.after_step

    def begin_step() -> None:
        optimizers.set_learning_rate(optimizer, knobs.optimizer, batch_size, trial.progress)
        with trial.phase("sampler"):
            sampler.advance(trial.progress)

    def end_step() -> None:
        with trial.phase("ema"):
            # Half-lives grow after the budget of an open-ended training too.
            ema.update(unet, trial.schedule, trial.stride)
        with trial.phase("sampler"):
            sampler.after_step(errors_at)
            objective.refresh()

    for x0 in trial.batches(images.pixels, data.in_unit_range(knobs.data.horizontal_flip)):
        trial.before_step(begin_step)

        # ---- timesteps and noise, drawn for the images of all workers
        with trial.phase("sampler"):
            t, factor = sampler.sample(x0, trial.rng, batch=shard.total, first=shard.first)
            noise = trial.randn_like(x0)
            x_t = process.add_noise(x0, noise, t)

        # ---- forward and backward
        targets, factors = process.target(x0, noise, t), objective.factors(t, factor)
        errors = trial.forward_backward((x_t, t), (targets,), squared_errors, factors)
        with trial.phase("sampler"):
            if (weighting_loss := objective.learn(t, errors)) is not None:
                trial.backward_beside(weighting_loss)
        if not trial.sync_gradients:
            continue

        # ---- update
        with trial.phase("sampler"):
            sampler.before_step(errors_at, trial.rng)
        trial.update(optimizer, clip_norm=knobs.optimizer.clip_norm, beside=weights.parameters())
        trial.after_step(end_step)


def add_evaluation(
    trial: Trial,
    images: data.Images,
    model: torch.nn.Module,
    process: Diffusion,
    objective: DiffusionLoss,
) -> None:
    """Judge `model` by samples at every point, and describe timesteps and weights."""
    if trial.evaluates:
        evaluator = Evaluator(trial.knobs.data, trial.knobs.evaluation, images, trial.world)
        predict = trial.captured(model)

        def judged() -> dict[str, object]:
            if (choice := evaluator.decide(predict, process)) is not None:
                trial.about(evaluation_format=choice)
            scores = evaluator(predict, process)
            trial.show("samples", evaluator.judge.last_images)
            return {**scores}

        trial.evaluate_with(judged)

    def described() -> dict[str, object]:
        trial.show("timesteps", objective.table())
        return {**objective.facts()}

    trial.describe_with(described)


def squared_errors(output: Tensor, target: Tensor) -> Tensor:
    """Return each image's mean squared error, float32 [b]."""
    return (output.float() - target).square().flatten(1).mean(1)


def look_ahead(
    trial: Trial, unet: torch.nn.Module, model: torch.nn.Module, process: Diffusion
) -> ErrorsAt:
    """Return ε-errors of the current network, without dropout, for look-ahead samplers.

    It runs in passes of the training's own batch size; under torch.compile the last one is filled
    up, since another shape would be compiled again.
    """
    count, compiled = trial.shard.count, trial.config.compile.active

    @torch.no_grad()
    def errors_at(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        errors = []
        unet.eval()
        for start in range(0, len(t), count):
            size = count if compiled else min(count, len(t) - start)
            part = torch.arange(start, start + size, device=t.device).clamp_(max=len(t) - 1)
            if compiled:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            x_t = process.add_noise(x0[part], noise[part], t[part])
            with trial.autocast():
                output = model(x_t, t[part]).float()
            predicted = process.predict_noise(output, x_t, t[part])
            errors.append(squared_errors(predicted, noise[part])[: len(t) - start])
        unet.train()
        return torch.cat(errors)

    return errors_at
