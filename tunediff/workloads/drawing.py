"""Draw images from saved models, as `tunediff.sample` and `tunediff.evaluate` do: the options of
the sampler, and the loop over a workload's `sample_images`. Imports torch late.

Any workload may have `sample_images(network, config, request)`. The options `--sampler`, `--steps`,
`--skip` and `--eta` are for models of the workload `diffusion`; the commands have them before they
know whose model they are given.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import config as cfg
from tunediff.config.code import WorkloadError
from tunediff.core import text
from tunediff.core.options import Options, allow, option
from tunediff.core.progress import EventLines, Progress
from tunediff.evaluation import image_files
from tunediff.workloads.diffusion.knobs import SAMPLERS

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.distributed import World
    from tunediff.evaluation.generation import SampleRequest

DEFAULT_SAMPLER = "ddpm"
"""Of the commands, whatever the model's evaluations use: all steps of the process."""


# ---- the sampler
def _samplers_with(option: str) -> str:
    return " or ".join(sampler for sampler, (_, follows) in SAMPLERS.items() if option in follows)


class SamplerOptions(Options):
    """How a command draws."""

    sampler: str | None = option(
        None,
        f"{', '.join(SAMPLERS)} (default: {DEFAULT_SAMPLER}, all steps of the process)",
    )
    steps: int | None = option(
        None,
        f"steps of {_samplers_with('steps')} (default: sample as in the model's evaluations,"
        " evaluate 50)",
    )
    skip: str | None = option(
        None,
        "spacing of the DDIM steps: linear or quadratic (default: sample as in the model's"
        " evaluations, evaluate linear)",
    )
    eta: float | None = option(
        None, "noise of DDIM, 0 to 1 (default: sample as in the model's evaluations, evaluate 0)"
    )


def with_sampler(config: Any, options: SamplerOptions, defaults: Mapping[str, Any]) -> Any:
    """Return a model's configuration with the sampler that the options name, and `defaults` for
    those that they leave open. Raises `ConfigError`, also for any of a workload without samplers.
    """
    has_sampler, sampler = _has_sampler(config), options.sampler or DEFAULT_SAMPLER
    allow(sampler in SAMPLERS, "--sampler", sampler, ", ".join(SAMPLERS))
    follows = SAMPLERS[sampler][1]
    for name in SamplerOptions.model_fields:
        value, fits = getattr(options, name), has_sampler and name in ("sampler", *follows)
        allowed = f"with --sampler {_samplers_with(name)}; none for {cfg.of(config).title}"
        allow(value is None or fits, f"--{name}", value, allowed)
    if not has_sampler:
        return config
    values = {name: defaults.get(name, getattr(config.evaluation, name)) for name in follows}
    if "steps" in values:
        values["steps"] = min(values["steps"], config.process.steps)
    given = {name: value for name in follows if (value := getattr(options, name)) is not None}
    return with_evaluation(config, {"sampler": sampler, **values, **given})


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


def with_evaluation(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a configuration with these knobs of its section `evaluation`; those that are None
    stay. Raises `ConfigError`."""
    knobs = {f"evaluation.{name}": value for name, value in values.items() if value is not None}
    return cfg.override(config, knobs, where="command line")


# ---- drawing
def draw(
    network: Any, config: Any, request: SampleRequest, world: World, folder: Path | None,
    receive: Callable[[int, Tensor], object],
) -> float:  # fmt: skip
    """Pass `request`'s batches to `receive`, and write them into `folder`; return the seconds of
    sampling.

    Raises on all ranks at once: `NonFiniteError`, and `WorkloadError` for another number of images
    than `request` asks for.
    """
    from tunediff.evaluation.distance import NonFiniteError, refuse_non_finite
    from tunediff.evaluation.generation import shares
    from tunediff.training.precision import evaluation_precision

    steps = describe_sampler(config).get("steps")
    total, _ = shares(request.images, world.size, request.batch_size)
    progress = Progress("sampling", total * (steps or 1), "batches" if steps is None else "steps")
    seconds, count, failure = 0.0, 0, ""
    with EventLines().work(world.main), progress as work:
        if steps is not None:
            request = dataclasses.replace(request, progress=work.step)
        batches = cfg.of(config).get_hook("sample_images")(network, config, request)
        try:
            with evaluation_precision(request.device):
                for start, batch, took_s in _timed(batches, world):
                    seconds += took_s
                    count += len(batch)
                    receive(start, batch)
                    if folder is not None:
                        image_files.write_files(batch, start, request.images, folder)
                    if steps is None:
                        work.step()
        except NonFiniteError as error:
            failure = str(error)
    refuse_non_finite(failure, world)
    # With fewer images the metrics would be those of black ones in their place.
    if (drawn := int(world.total(count))) != request.images:
        raise WorkloadError(
            f"{cfg.of(config).title}: sample_images yielded {drawn} images instead of"
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
