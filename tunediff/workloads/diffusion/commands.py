"""What the commands that use saved models ask of this workload; see `workloads.contract`. Imports
torch late."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tunediff import cli
from tunediff.config import ConfigError
from tunediff.core import progress, text
from tunediff.workloads.contract import SAMPLER_OPTIONS, SamplerOptions
from tunediff.workloads.diffusion import diffusers_export
from tunediff.workloads.diffusion.knobs import SAMPLERS

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.distributed import World
    from tunediff.evaluation.generation import SampleRequest

DEFAULT_SAMPLER = "ddpm"
"""Of the commands, whatever the model's evaluations use: all steps of the process."""
SLOW_S = 4 * 3600
"""Seconds of sampling above which `announce` also says how it takes less."""


class DiffusionSampler(SamplerOptions):
    """The sampler of a diffusion model, by the knobs of `evaluation`."""

    def add_options(self, parser: argparse.ArgumentParser, steps: str, skip: str, eta: str) -> None:
        add = parser.add_argument
        add(
            "--sampler",
            help=f"{', '.join(SAMPLERS)} (default: {DEFAULT_SAMPLER}, all steps of the process)",
        )
        add("--steps", type=int, help=f"steps of {_samplers_with('steps')} (default: {steps})")
        add("--skip", help=f"spacing of the DDIM steps: linear or quadratic (default: {skip})")
        add("--eta", type=float, help=f"noise of DDIM, 0 to 1 (default: {eta})")

    def check(self, args: argparse.Namespace) -> None:
        sampler = args.sampler if args.sampler is not None else DEFAULT_SAMPLER
        cli.allow(sampler in SAMPLERS, "--sampler", sampler, ", ".join(SAMPLERS))
        for name in ("steps", "skip", "eta"):
            if getattr(args, name) is not None and name not in SAMPLERS[sampler][1]:
                raise ConfigError(
                    f"--{name}: belongs to --sampler {_samplers_with(name)}, not to {sampler}"
                )

    def requested(
        self, args: argparse.Namespace, defaults: Mapping[str, Any], config: Any
    ) -> dict[str, Any]:
        sampler, chain = args.sampler or DEFAULT_SAMPLER, config.process.steps
        values = {name: getattr(args, name) for name in SAMPLER_OPTIONS if name != "sampler"}
        allowed = f"at most process.steps = {chain}"
        cli.allow(args.steps is None or args.steps <= chain, "--steps", args.steps, allowed)
        if sampler != DEFAULT_SAMPLER:
            values |= {name: default for name, default in defaults.items() if values[name] is None}
        if "steps" in SAMPLERS[sampler][1] and args.steps is None:
            values["steps"] = min(values["steps"] or config.evaluation.steps, chain)
        # The sampler comes last: steps that the one of the training does not follow may be too many
        # for it.
        return {**values, "sampler": sampler}

    def describe(self, config: Any) -> dict[str, Any]:
        evaluation, (_, follows) = config.evaluation, SAMPLERS[config.evaluation.sampler]
        sampler = {
            "name": evaluation.sampler,
            "steps": evaluation.sampling_steps(config.process.steps),
        }
        return sampler | {
            name: getattr(evaluation, name) for name in ("skip", "eta") if name in follows
        }

    def format_sampler(self, sampler: Mapping[str, Any]) -> str:
        ddim = f", {sampler['skip']}, eta {sampler['eta']:g}" if "eta" in sampler else ""
        return f"{sampler['name']}, {text.pluralize(sampler['steps'], 'step')}{ddim}"

    def announce(self, network: Any, config: Any, n: int, world: World, device: Any = None) -> None:
        import torch

        from tunediff.training.precision import evaluation_precision

        where, data = device or world.device, config.data
        here, taken = dataclasses.replace(world, device=where), []
        count = min(config.evaluation.batch_size, -(-n // world.size))
        steps = config.evaluation.passes(config.process.steps)
        with torch.no_grad(), evaluation_precision(where):
            x = torch.zeros(count, data.channels, data.image_size, data.image_size, device=where)
            t = torch.zeros(count, dtype=torch.int64, device=where)
            for _ in range(2):  # the first pass loads kernels
                here.synchronize()
                begin = time.perf_counter()
                network(x, t)
                here.synchronize()
                taken.append(time.perf_counter() - begin)
        step_s = world.largest(min(taken) / count * n / world.size)
        if not world.main or (spent := step_s * steps) < progress.FIRST_S:
            return
        print(
            f"sampling {n:,} images × {steps:,} steps: about {text.seconds(spent)}",
            file=sys.stderr,
            flush=True,
        )
        if spent > SLOW_S:
            fewer = min(50, steps // 4 or 1)
            less = f"--sampler ddim --steps {fewer} takes about {text.seconds(step_s * fewer)}"
            print(
                f"WARNING: that is long: {less}; fewer images take in proportion less",
                file=sys.stderr,
                flush=True,
            )


def _samplers_with(option: str) -> str:
    """Return the samplers that follow an option, the last joined by «and»."""
    *others, last = (sampler for sampler, (_, follows) in SAMPLERS.items() if option in follows)
    return f"{', '.join(others)} and {last}" if others else last


sampler_options = DiffusionSampler("diffusion")
foreign_format = diffusers_export


def sample_images(
    network: Any, config: Any, request: SampleRequest
) -> Iterator[tuple[int, Tensor]]:
    """Return an iterator over this rank's batches: (number of the first, uint8 [b, C, H, W] or [b,
    columns, C, H, W]).

    It raises `NonFiniteError`, which may happen on one rank alone.
    """
    import torch

    from tunediff.workloads.diffusion.process import Diffusion
    from tunediff.workloads.diffusion.sampling import generate, to_uint8

    # ---- what does not depend on the batch is made before the first one is asked for: sampling
    # alone is timed
    process = Diffusion(config.process, request.device)
    protocol = dataclasses.replace(
        config.evaluation, seed=request.seed, batch_size=request.batch_size
    )
    shape = (config.data.channels, config.data.image_size, config.data.image_size)
    steps, columns = protocol.sampling_steps(config.process.steps), request.columns
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
