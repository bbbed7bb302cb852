"""Draw images from a saved model: `tunediff sample RUN`.

RUN is a training folder, a search (its best trial), NAME/t0003 or an exported best.yaml. Before a
sheet of more than 100 steps a first one of 16 images and 10 steps is written, in seconds. Image
number i is the same whatever the batch size and the number of processes: alone, or as `torchrun
--nproc-per-node N -m tunediff.sample …`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli, models
from tunediff.core import progress, remote
from tunediff.core.files import numbered
from tunediff.core.options import REQUIRED, JsonOptions, check_writable, option
from tunediff.evaluation import image_files
from tunediff.evaluation.knobs import Evaluation
from tunediff.models import Saved
from tunediff.workloads import drawing

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.distributed import World
    from tunediff.evaluation.generation import SampleRequest

BATCH_SIZE = 64
"""Images at once on each process, where a workload has no `evaluation.batch_size`."""
MANY_STEPS = 100
"""Of a sampler, above which a first sheet is drawn before."""
FIRST_IMAGES, FIRST_SHEET = 16, {"sampler": "ddim", "steps": 10, "skip": "linear", "eta": 0.0}
"""Images of the first sheet, and how they are drawn: seconds on a CPU."""


class SampleOptions(drawing.SamplerOptions, JsonOptions, remote.StorageOptions):
    """The options of the command."""

    run: str = option(REQUIRED, "the model", flag="RUN", metavar="RUN")
    images: int = option(64, "images (default: 64)", metavar="N", ge=1, le=1_000_000)
    out: Path | None = option(
        None,
        "PATH.png: one sheet; a new folder: 0000.png … (default: a new samples-….png in the folder"
        " of the model)",
    )
    seed: int | None = option(
        None, "seed of the noise (default: that of the model's evaluations)", ge=0
    )
    batch_size: int | None = option(
        None, "images at once on each process (default: as in the model's evaluations)", ge=1
    )


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Sample; see `--help`."""
    options = cli.parse("sample", __doc__, SampleOptions, argv)
    image_files.check_output(options.out, ".png")
    storage = Path(options.storage)
    model = models.find_with_hook("sample_images", "sample", options.run, storage)
    config, seed, batch_size = _configure(model.config, options)
    check_writable("--out", options.out or model.folder / "samples.png")
    _sample(model, config, seed, batch_size, options)
    return cli.OK


def _configure(config: Any, options: SampleOptions) -> tuple[Any, int, int]:
    """Return (the model's configuration with the options, seed of the noise, batch size).

    Raises `ConfigError` naming the option.
    """
    config = drawing.with_sampler(config, options, {})
    if isinstance(config.evaluation, Evaluation):
        values = {"seed": options.seed, "batch_size": options.batch_size}
        config = drawing.with_evaluation(config, values)
        return config, config.evaluation.seed, config.evaluation.batch_size
    return config, options.seed or 0, options.batch_size or BATCH_SIZE


def _sample(model: Saved, config: Any, seed: int, batch_size: int, options: SampleOptions) -> None:
    """Draw the images, write them into a folder or as one sheet, and print where they are.

    Before a sheet that takes many steps a first one of few images and steps is written, and said.
    """
    from tunediff.distributed import from_environment
    from tunediff.evaluation.generation import SampleRequest
    from tunediff.training import memory

    sampler, n, out = drawing.describe_sampler(config), options.images, options.out
    folder, stem = (out.parent, out.stem) if out else (model.folder, f"samples-{model.name}")

    def sheet(name: str) -> Path:
        names = numbered(folder, f"{stem}-{name}", ".png")
        return next(path for path in names if not path.exists())

    with from_environment() as world:
        memory.keep_freed(config.memory.keep_freed, world.device)
        request = SampleRequest(n, seed, batch_size, world.device, world.rank, world.size)
        network, path = model.network(world.device), out or sheet(sampler["name"])
        if path.suffix and sampler.get("steps", 0) > MANY_STEPS:
            first, quick = sheet("ddim"), drawing.with_evaluation(config, FIRST_SHEET)
            few = dataclasses.replace(request, images=min(n, FIRST_IMAGES))
            _draw(network, quick, few, world, first)
            how = drawing.format_sampler(drawing.describe_sampler(quick))
            progress.EventLines(on_stderr=True, quiet=not world.main).say(
                f"first sheet: {few.images} images by {how}: {first}", timed=False
            )
        seconds = _draw(network, config, request, world, path)
    if world.main:
        lines = {
            "images": n, "sampler": drawing.format_sampler(sampler), "seed": seed,
            "seconds": seconds, "images_per_s": n / seconds, "path": path,
        }  # fmt: skip
        cli.result(lines, options.as_json, lines | {"sampler": sampler, "path": path.absolute()})


def _draw(network: Any, config: Any, request: SampleRequest, world: World, path: Path) -> float:
    """Draw images into a folder, or as one sheet if `path` has a suffix; return the seconds."""
    import torch

    from tunediff.training.observer import image_grid

    parts, folder = list[Any](), None if path.suffix else path

    def receive(start: int, images: Tensor) -> None:
        if folder is None:
            parts.append((start, images.cpu()))

    seconds = drawing.draw(network, config, request, world, folder, receive)
    # uint8 [n, C, H, W] in the order of their numbers
    of_all = sorted(itertools.chain(*world.gather(parts)), key=lambda part: part[0])
    if world.main and folder is None:
        images = torch.cat([images for _, images in of_all])
        image_grid(images, path, max(8, math.isqrt(request.images - 1) + 1))
    return seconds


if __name__ == "__main__":
    sys.exit(main())
