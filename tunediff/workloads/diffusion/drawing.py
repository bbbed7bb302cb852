"""What the commands that draw images share: the sampler's options, and where images go. Imports torch late."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

from tunediff import cli
from tunediff.config import ConfigError, override
from tunediff.core import progress, text
from tunediff.workloads.diffusion.knobs import SAMPLERS

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.distributed import World


class Sampler(TypedDict):
    """How images are drawn."""

    name: str
    steps: int
    skip: NotRequired[str]
    """Of DDIM."""
    eta: NotRequired[float]
    """Of DDIM."""


def add_options(parser: argparse.ArgumentParser, steps: str, skip: str, eta: str) -> None:
    """How images are drawn; the words say what is taken where an option is not given."""
    add = parser.add_argument
    add("--sampler", default="ddpm", help=f"{', '.join(SAMPLERS)} (default: %(default)s, all steps of the process)")
    add("--steps", type=int, help=f"steps of {_followers('steps')} (default: {steps})")
    add("--skip", help=f"spacing of the DDIM steps: linear or quadratic (default: {skip})")
    add("--eta", type=float, help=f"noise of DDIM, 0 to 1 (default: {eta})")


def _followers(name: str) -> str:
    return " and ".join(sampler for sampler, (_, follows) in SAMPLERS.items() if name in follows)


def check(args: argparse.Namespace, option: str, path: Path | None, *suffixes: str) -> None:
    """Refuse options that the sampler does not follow, and a `path` that is taken or neither a folder nor of these
    `suffixes`."""
    cli.allow(args.sampler in SAMPLERS, "--sampler", args.sampler, ", ".join(SAMPLERS))
    for name in ("steps", "skip", "eta"):
        if getattr(args, name) is not None and name not in SAMPLERS[args.sampler][1]:
            raise ConfigError(f"--{name}: belongs to --sampler {_followers(name)}, not to {args.sampler}")
    if path is None:
        return
    ends = f"a name that ends in {' or '.join(suffixes)}, or a folder"
    cli.allow(path.suffix in ("", *suffixes), option, path, ends)
    if path.exists() and (path.suffix or not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{option}: {path} exists; allowed: a new file, or a new or empty folder")


def configured(config: Any, wanted: Mapping[str, Any]) -> Any:
    """With knobs of the evaluation as the options of their names say; None: left. Commands draw in float32, wherever
    the training was. Raises `ConfigError` naming one."""
    config = override(config, {"evaluation.precision": "fp32"}, check=False)
    for name, value in wanted.items():
        if value is not None:
            config = override(config, {f"evaluation.{name}": value}, where="--" + name.replace("_", "-"))
    return config


def sampler(config: Any) -> Sampler:
    """How a configuration draws, in JSON types."""
    evaluation, (_, follows) = config.evaluation, SAMPLERS[config.evaluation.sampler]
    how = {"name": evaluation.sampler, "steps": evaluation.passes(config.process.steps)}
    return cast("Sampler", how | {name: getattr(evaluation, name) for name in ("skip", "eta") if name in follows})


def said(how: Sampler) -> str:
    """`ddim, 50 steps, linear, eta 0`."""
    ddim = f", {how['skip']}, eta {how['eta']:g}" if "eta" in how else ""
    return f"{how['name']}, {how['steps']} step{'s' * (how['steps'] > 1)}{ddim}"


SECOND_THOUGHT_S = 4 * 3600
"""Sampling that takes longer is told how it could take less."""


def announce(network: Any, config: Any, n: int, world: World, device: Any = None) -> None:
    """Say on stderr how long `n` images will take, by passes of a moment. All ranks call it."""
    import torch

    from tunediff.training.judging import rate_s
    from tunediff.training.precision import evaluation_precision

    how, where, data = sampler(config), device or world.device, config.data
    here = dataclasses.replace(world, device=where)  # what is waited for when a pass is timed

    def run(count: int) -> object:
        with torch.no_grad(), evaluation_precision(where):
            x = torch.zeros(count, data.channels, data.image_size, data.image_size, device=where)
            return network(x, torch.zeros(count, dtype=torch.int64, device=where))

    most = min(config.evaluation.batch_size, -(-n // world.size))
    step_s = world.largest(rate_s(run, most, here, enough_s=0.05) * n / world.size)
    if not world.main or (spent := step_s * how["steps"]) < progress.FIRST_S:
        return
    print(f"sampling {n:,} images × {how['steps']:,} steps: about {text.seconds(spent)}", file=sys.stderr, flush=True)
    if spent > SECOND_THOUGHT_S:
        fewer = min(50, how["steps"] // 4 or 1)
        less = f"--sampler ddim --steps {fewer} takes about {text.seconds(step_s * fewer)}"
        print(f"WARNING: that is long: {less}; fewer images take in proportion less", file=sys.stderr, flush=True)


class Drawn:
    """Images put away as they are drawn: each into a file of its own, or all ranks' into one array."""

    def __init__(self, path: Path | None, n: int, shape: tuple[int, ...], world: World) -> None:
        """`n` of this `shape`, [C, H, W] or several of those; a `path` without suffix is a folder."""
        import torch

        self._path, self._count, self._world = path, n, world
        self._folder = path if path is not None and not path.suffix else None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._whole = torch.zeros(0 if self._folder is not None else n, *shape, dtype=torch.uint8)

    def add(self, start: int, images: Tensor) -> None:
        """Images start, start + 1, …, uint8 [b, *shape]."""
        from tunediff.workloads.diffusion.sampling import write_files

        if self._folder is not None:
            write_files(images, start, self._count, self._folder)
        else:
            self._whole[start : start + len(images)] = images.cpu()

    def whole(self) -> Tensor | None:
        """uint8 [n, *shape] on the CPU; None where there is a folder. All ranks call it."""
        if self._folder is not None:
            return None
        # Every rank filled in the rows of its own images; the sum is the whole.
        return self._world.sum(self._whole.to(self._world.device)).cpu()

    def write(self) -> None:
        """Write the file, if it is to be one. All ranks call it."""
        if (whole := self.whole()) is not None and self._world.main and self._path is not None:
            write(whole, self._path)


def write(images: Tensor, path: Path, columns: int = 8) -> None:
    """Write images uint8 [n, C, H, W] as a sheet, or as arr_0, uint8 [n, H, W, C], of a .npz. Raises `OSError`."""
    import numpy as np

    from tunediff.core.files import write_atomically
    from tunediff.training.observer import image_grid

    if path.suffix == ".npz":
        array = images.permute(0, 2, 3, 1).numpy()
        write_atomically(path, lambda file: np.savez(file, array))
    else:
        image_grid(images, path, columns)
