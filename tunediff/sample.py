"""Draw images from a saved model: `python -m tunediff.sample RUN`.

RUN is a training folder, a search (its best trial), NAME/t0003 or an exported best.yaml. Image
number i is the same whatever the batch size and the number of processes: alone, or as `torchrun
--nproc-per-node N -m tunediff.sample …`.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli, models
from tunediff.core.files import numbered
from tunediff.core.options import REQUIRED, JsonOptions, StorageOptions, option
from tunediff.core.refusals import check_writable
from tunediff.evaluation import image_files
from tunediff.evaluation.knobs import Evaluation
from tunediff.models import Saved
from tunediff.workloads import drawing

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = 64
"""Images at once on each process, where a workload has no `evaluation.batch_size`."""


class SampleOptions(drawing.SamplerOptions, JsonOptions, StorageOptions):
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
        None, "images at once on each process (default: likewise)", ge=1
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
    """Draw the images, write them into a folder or as one sheet, and print where they are."""
    import torch

    from tunediff.distributed import from_environment
    from tunediff.evaluation.generation import SampleRequest
    from tunediff.training import memory
    from tunediff.training.observer import image_grid

    sampler, n, out = drawing.describe_sampler(config), options.images, options.out
    folder = out if out is not None and not out.suffix else None
    parts: list[tuple[int, Tensor]] = []
    with from_environment() as world:
        memory.keep_freed(config.memory.keep_freed, world.device)
        request = SampleRequest(n, seed, batch_size, world.device, world.rank, world.size)

        def receive(start: int, images: Tensor) -> None:
            if folder is None:
                parts.append((start, images.cpu()))

        network = model.network(world.device)
        seconds = drawing.draw(network, config, request, world, folder, receive)
        # uint8 [n, C, H, W] in the order of their numbers
        of_all = sorted(itertools.chain(*world.gather(parts)), key=lambda part: part[0])
        if not world.main:
            return
        names = numbered(model.folder, f"samples-{model.name}-{sampler['name']}", ".png")
        path = out or next(path for path in names if not path.exists())
        if folder is None:
            images = torch.cat([images for _, images in of_all])
            image_grid(images, path, max(8, math.isqrt(n - 1) + 1))
        lines = {
            "images": n, "sampler": drawing.format_sampler(sampler), "seed": seed,
            "seconds": seconds, "images_per_s": n / seconds, "path": path,
        }  # fmt: skip
        cli.result(lines, options.as_json, lines | {"sampler": sampler, "path": path.absolute()})


if __name__ == "__main__":
    sys.exit(main())
