"""What the commands that use saved models ask of a workload, besides the hooks of
`config.workload.OPTIONAL`.

`sample_images(network, config, request)` alone lets `tunediff.sample` draw from a model; with our
sections `data` and `evaluation` among its knobs, `tunediff.evaluate` judges it at full protocol.
The hooks `sampler_options` (`SamplerOptions`) and `foreign_format` (such as the module
`diffusers_export`) belong to packages of ours, in `PACKAGE.commands`: a command has its options
before it knows whose model it is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Values
from tunediff.config.code import WorkloadError
from tunediff.core.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.distributed import World
    from tunediff.evaluation.generation import SampleRequest

SAMPLER_OPTIONS = ("sampler", "steps", "skip", "eta")


class SamplerOptions:
    """The hook `sampler_options`: how a workload's images are drawn, as the commands' options say
    it.

    A workload whose sampler has options overrides the methods; as it is, the class refuses all of
    them.
    """

    def __init__(self, title: str) -> None:
        """`title`: the workload's, for messages."""
        self.title = title

    def add_options(self, parser: argparse.ArgumentParser, steps: str, skip: str, eta: str) -> None:
        """Add `SAMPLER_OPTIONS`; the words say what is taken where an option is not given."""

    def check(self, args: argparse.Namespace) -> None:
        """Refuse options that the sampler does not follow. Raises `ConfigError`."""
        for name in SAMPLER_OPTIONS:
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name}: {self.title} has no such option")

    def requested(
        self, args: argparse.Namespace, defaults: Mapping[str, Any], config: Any
    ) -> dict[str, Any]:
        """Return the knobs of `evaluation` that the options name, and `defaults` for those that
        they leave open.

        `config`: of the model. Raises `ConfigError`.
        """
        self.check(args)
        return {}

    def describe(self, config: Any) -> dict[str, Any]:
        """Return how a configuration draws, in JSON types: `name`, `steps` and what else the
        sampler follows."""
        return {"name": Path(self.title).stem}

    def format_sampler(self, sampler: Mapping[str, Any]) -> str:
        """Return what `describe` returned, as text."""
        return str(sampler["name"])

    def announce(self, network: Any, config: Any, n: int, world: World, device: Any = None) -> None:
        """Say on stderr how long `n` images will take, where that is known. All ranks call it."""


def shipped_sampler_options() -> list[SamplerOptions]:
    """Return the sampler options of our workloads, which every command that draws images has."""
    return list(cfg.shipped_hooks("sampler_options").values())


def sampler_options(config: Any) -> SamplerOptions:
    """Return the sampler options of a configuration's workload."""
    workload: cfg.Workload = cfg.of(config)
    options: SamplerOptions | None = workload.get_hook("sampler_options")
    return options or SamplerOptions(workload.title)


def draw(
    network: Any, config: Any, request: SampleRequest, world: World, progress: Progress,
    receivers: Sequence[Callable[[int, Tensor], object]],
) -> float:  # fmt: skip
    """Draw what `request` asks for, call all `receivers` with each batch; return the seconds of
    sampling alone.

    `progress` counts the sampler's steps, or batches where it has none. Raises on all ranks at
    once: `NonFiniteError`, and `WorkloadError` unless the workload generates as many images as
    `request` asks for.
    """
    from tunediff.evaluation.distance import NonFiniteError
    from tunediff.training.precision import evaluation_precision

    if "steps" in sampler_options(config).describe(config):
        request = dataclasses.replace(request, progress=progress.step)
    else:
        receivers = [*receivers, progress.step]
    batches = cfg.of(config).get_hook("sample_images")(network, config, request)
    here, seconds, failure = dataclasses.replace(world, device=request.device), 0.0, ""
    count = 0
    try:
        with evaluation_precision(request.device):
            while True:
                here.synchronize()  # what the receivers have queued is not sampling
                begin = time.monotonic()
                batch = next(batches, None)
                seconds += time.monotonic() - begin
                if batch is None:
                    break
                count += len(batch[1])
                for receive in receivers:
                    receive(*batch)
    except NonFiniteError as error:
        failure = str(error)
    if world.any(
        bool(failure)
    ):  # no rank may leave alone: the others would wait in the sums to come
        raise NonFiniteError(failure or "non-finite values in images generated by another rank")
    if (
        total := int(world.total(count))
    ) != request.images:  # metrics would be those of missing, black images
        title, write = cfg.of(config).title, "for start, stop in request.batches()"
        counts = f"{total} images instead of {request.images}"
        raise WorkloadError(f"{title}: sample_images yielded {counts}; write: {write}")
    return world.largest(seconds)


def with_evaluation(config: Any, values: Values | Mapping[str, Any]) -> Any:
    """Return a configuration with knobs of its section `evaluation`, as the options of their names
    say; None: left.

    Commands draw in float32, wherever the training was. Raises `ConfigError` naming the option.
    """
    if "evaluation.precision" in config.schema.knobs:
        config = cfg.override(config, {"evaluation.precision": "fp32"}, check=False)
    for name, value in values.items():
        if value is not None:
            config = cfg.override(
                config, {f"evaluation.{name}": value}, where="--" + name.replace("_", "-")
            )
    return config
