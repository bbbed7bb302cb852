"""Draw images from saved models, as `tunediff.sample` and `tunediff.evaluate` do: the options of
the sampler, and the loop over a workload's `sample_images`. Imports torch late.

Any workload may have `sample_images(network, config, request)`. The options `--sampler`, `--steps`,
`--skip` and `--eta` are for models of the workload `diffusion`; the commands have them before they
know whose model they are given.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Values
from tunediff.config.code import WorkloadError
from tunediff.config.knobs import refuse
from tunediff.core import progress, text
from tunediff.workloads.diffusion.knobs import SAMPLERS

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.distributed import World
    from tunediff.evaluation.generation import SampleRequest

SAMPLER_OPTIONS = ("sampler", "steps", "skip", "eta")
DEFAULT_SAMPLER = "ddpm"
"""Of the commands, whatever the model's evaluations use: all steps of the process."""


# ---- the sampler
def add_sampler_options(parser: argparse.ArgumentParser, steps: str, skip: str, eta: str) -> None:
    """Add `SAMPLER_OPTIONS`; the words say what is taken where an option is not given."""
    add, names = parser.add_argument, ", ".join(SAMPLERS)
    add("--sampler", help=f"{names} (default: {DEFAULT_SAMPLER}, all steps of the process)")
    add("--steps", type=int, help=f"steps of {_samplers_with('steps')} (default: {steps})")
    add("--skip", help=f"spacing of the DDIM steps: linear or quadratic (default: {skip})")
    add("--eta", type=float, help=f"noise of DDIM, 0 to 1 (default: {eta})")


def _samplers_with(option: str) -> str:
    *others, last = (sampler for sampler, (_, follows) in SAMPLERS.items() if option in follows)
    return f"{', '.join(others)} and {last}" if others else last


def check_sampler_options(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other, for any model. Raises `ConfigError`."""
    sampler = args.sampler if args.sampler is not None else DEFAULT_SAMPLER
    names = ", ".join(SAMPLERS)
    refuse(sampler not in SAMPLERS, f"--sampler: {sampler!r} is not allowed; allowed: {names}")
    for name in ("steps", "skip", "eta"):
        if getattr(args, name) is not None and name not in SAMPLERS[sampler][1]:
            owners = _samplers_with(name)
            raise ConfigError(f"--{name}: belongs to --sampler {owners}, not to {sampler}")


def sampler_knobs(
    args: argparse.Namespace, defaults: Mapping[str, Any], config: Any
) -> dict[str, Any]:
    """Return the knobs of `evaluation` that the options name, and `defaults` for those that they
    leave open; {} for a model of another workload than diffusion. Raises `ConfigError`."""
    if not _has_sampler(config):
        for name in SAMPLER_OPTIONS:
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name}: {cfg.of(config).title} has no such option")
        return {}
    sampler, chain = args.sampler or DEFAULT_SAMPLER, config.process.steps
    refuse(
        args.steps is not None and args.steps > chain,
        f"--steps: {args.steps} is not allowed; allowed: at most process.steps = {chain}",
    )
    values = {name: getattr(args, name) for name in ("steps", "skip", "eta")}
    if sampler != DEFAULT_SAMPLER:
        values |= {name: default for name, default in defaults.items() if values[name] is None}
    if "steps" in SAMPLERS[sampler][1] and args.steps is None:
        values["steps"] = min(values["steps"] or config.evaluation.steps, chain)
    # The sampler comes last: the training's may not follow these steps, or allow fewer.
    return {**values, "sampler": sampler}


def _has_sampler(config: Any) -> bool:
    return bool(cfg.of(config).name == "diffusion")


def describe_sampler(config: Any) -> dict[str, Any]:
    """Return how a configuration draws, in JSON types: `name`, and what its sampler follows."""
    if not _has_sampler(config):
        return {"name": Path(cfg.of(config).title).stem}
    evaluation = config.evaluation
    sampler = {"name": evaluation.sampler, "steps": evaluation.sampling_steps(config.process.steps)}
    _, follows = SAMPLERS[evaluation.sampler]
    options = {name: getattr(evaluation, name) for name in ("skip", "eta") if name in follows}
    return sampler | options


def format_sampler(sampler: Mapping[str, Any]) -> str:
    """Return what `describe_sampler` returned, as text."""
    steps = f", {text.pluralize(sampler['steps'], 'step')}" if "steps" in sampler else ""
    ddim = f", {sampler['skip']}, eta {sampler['eta']:g}" if "eta" in sampler else ""
    return f"{sampler['name']}{steps}{ddim}"


def with_evaluation(config: Any, values: Values | Mapping[str, Any]) -> Any:
    """Return a configuration with knobs of its section `evaluation`, as the options of their names
    say; those that are None stay.

    Raises `ConfigError` naming the option.
    """
    for name, value in values.items():
        if value is not None:
            option = "--" + name.replace("_", "-")
            config = cfg.override(config, {f"evaluation.{name}": value}, where=option)
    return config


# ---- drawing
def draw(
    network: Any,
    config: Any,
    request: SampleRequest,
    world: World,
    work: progress.Progress,
    receivers: Sequence[Callable[[int, Tensor], object]],
) -> float:
    """Draw `request`'s batches for all `receivers`; return the seconds of sampling.

    `work` counts the sampler's steps, or batches where it has none. Raises on all ranks at once:
    `NonFiniteError`, and `WorkloadError` for another number of images than `request` asks for.
    """
    from tunediff.evaluation.distance import NonFiniteError, refuse_non_finite
    from tunediff.training.precision import evaluation_precision

    if _has_sampler(config):
        request = dataclasses.replace(request, progress=work.step)
    else:
        receivers = [*receivers, work.step]
    batches = cfg.of(config).get_hook("sample_images")(network, config, request)
    on_device = dataclasses.replace(world, device=request.device)
    seconds, count, failure = 0.0, 0, ""
    try:
        with evaluation_precision(request.device):
            for start, batch, took_s in _timed(batches, on_device):
                seconds += took_s
                count += len(batch)
                for receive in receivers:
                    receive(start, batch)
    except NonFiniteError as error:
        failure = str(error)
    refuse_non_finite(failure, world)
    # With fewer images the metrics would be those of black ones in their place.
    if (total := int(world.total(count))) != request.images:
        raise WorkloadError(
            f"{cfg.of(config).title}: sample_images yielded {total} images instead of"
            f" {request.images}; write: for start, stop in request.batches()"
        )
    return world.largest(seconds)


def _timed(
    batches: Iterator[tuple[int, Tensor]], world: World
) -> Iterator[tuple[int, Tensor, float]]:
    """Yield batches with the seconds that each took; what was queued before is not sampling."""
    while True:
        world.synchronize()
        begin = time.monotonic()
        if (item := next(batches, None)) is None:
            return
        yield *item, time.monotonic() - begin
