"""The sampler's options of the commands that draw images: `SamplerOptions` of `workloads.contract`.

Imports torch late.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

from tunediff import cli
from tunediff.config import ConfigError
from tunediff.core import progress, text
from tunediff.workloads.contract import SAMPLER_OPTIONS
from tunediff.workloads.diffusion.knobs import SAMPLERS

if TYPE_CHECKING:
    from tunediff.distributed import World

DEFAULT_SAMPLER = "ddpm"
"""Of the commands, whatever the model's evaluations use: all steps of the process."""


class Sampler(TypedDict):
    """How images are drawn."""

    name: str
    steps: int
    skip: NotRequired[str]
    """Of DDIM."""
    eta: NotRequired[float]
    """Of DDIM."""


def add_options(parser: argparse.ArgumentParser, steps: str, skip: str, eta: str) -> None:
    """Add the sampler's options; the words say what is taken where an option is not given."""
    add = parser.add_argument
    add("--sampler", help=f"{', '.join(SAMPLERS)} (default: {DEFAULT_SAMPLER}, all steps of the process)")
    add("--steps", type=int, help=f"steps of {_samplers_with('steps')} (default: {steps})")
    add("--skip", help=f"spacing of the DDIM steps: linear or quadratic (default: {skip})")
    add("--eta", type=float, help=f"noise of DDIM, 0 to 1 (default: {eta})")


def _samplers_with(option: str) -> str:
    """Return the samplers that follow an option, joined by «and»."""
    return " and ".join(sampler for sampler, (_, follows) in SAMPLERS.items() if option in follows)


def check(args: argparse.Namespace) -> None:
    """Refuse an unknown sampler, and options that the sampler does not follow. Raises `ConfigError`."""
    sampler = args.sampler if args.sampler is not None else DEFAULT_SAMPLER
    cli.allow(sampler in SAMPLERS, "--sampler", sampler, ", ".join(SAMPLERS))
    for name in ("steps", "skip", "eta"):
        if getattr(args, name) is not None and name not in SAMPLERS[sampler][1]:
            raise ConfigError(f"--{name}: belongs to --sampler {_samplers_with(name)}, not to {sampler}")


def requested(args: argparse.Namespace, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs of `evaluation` that the options name; `defaults`: for options that are not given, where the
    sampler has options."""
    values = {name: getattr(args, name) for name in SAMPLER_OPTIONS}
    values["sampler"] = values["sampler"] or DEFAULT_SAMPLER
    if values["sampler"] != DEFAULT_SAMPLER:
        values |= {name: default for name, default in defaults.items() if values[name] is None}
    return values


def describe(config: Any) -> Sampler:
    """Return how a configuration draws, in JSON types."""
    evaluation, (_, follows) = config.evaluation, SAMPLERS[config.evaluation.sampler]
    sampler = {"name": evaluation.sampler, "steps": evaluation.passes(config.process.steps)}
    return cast("Sampler", sampler | {name: getattr(evaluation, name) for name in ("skip", "eta") if name in follows})


def format_sampler(sampler: Sampler) -> str:
    """Return `ddim, 50 steps, linear, eta 0`."""
    ddim = f", {sampler['skip']}, eta {sampler['eta']:g}" if "eta" in sampler else ""
    return f"{sampler['name']}, {sampler['steps']} step{'s' * (sampler['steps'] > 1)}{ddim}"


SECOND_THOUGHT_S = 4 * 3600
"""Seconds above which `announce` also says how sampling takes less."""


def announce(network: Any, config: Any, n: int, world: World, device: Any = None) -> None:
    """Say on stderr how long `n` images will take, from a few timed passes. All ranks call it."""
    import torch

    from tunediff.training.judging import rate_s
    from tunediff.training.precision import evaluation_precision

    sampler, where, data = describe(config), device or world.device, config.data
    here = dataclasses.replace(world, device=where)  # what is waited for when a pass is timed

    def run(count: int) -> object:
        with torch.no_grad(), evaluation_precision(where):
            x = torch.zeros(count, data.channels, data.image_size, data.image_size, device=where)
            return network(x, torch.zeros(count, dtype=torch.int64, device=where))

    most = min(config.evaluation.batch_size, -(-n // world.size))
    step_s = world.largest(rate_s(run, most, here, enough_s=0.05) * n / world.size)
    if not world.main or (spent := step_s * sampler["steps"]) < progress.FIRST_S:
        return
    work = f"sampling {n:,} images × {sampler['steps']:,} steps"
    print(f"{work}: about {text.seconds(spent)}", file=sys.stderr, flush=True)
    if spent > SECOND_THOUGHT_S:
        fewer = min(50, sampler["steps"] // 4 or 1)
        less = f"--sampler ddim --steps {fewer} takes about {text.seconds(step_s * fewer)}"
        print(f"WARNING: that is long: {less}; fewer images take in proportion less", file=sys.stderr, flush=True)
