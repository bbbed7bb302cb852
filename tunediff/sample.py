"""Draw images from a saved model: `python -m tunediff.sample RUN`.

RUN is a training folder, a search (its best trial), NAME/t0003 or an exported best.yaml. Image
number i is the same whatever the batch size and the number of processes: alone, or as `torchrun
--nproc-per-node N -m tunediff.sample …`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli, models
from tunediff.core.files import numbered
from tunediff.core.refusals import allow, check_writable
from tunediff.evaluation import image_files
from tunediff.evaluation.knobs import Evaluation
from tunediff.models import Saved
from tunediff.workloads import drawing

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = 64
"""Images at once on each process, where a workload has no `evaluation.batch_size`."""


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Sample; see `--help`."""
    parser = cli.parser("sample", __doc__ or "")
    add = parser.add_argument
    add("run", metavar="RUN", help="the model")
    cli.add_storage(parser)
    add("--images", type=int, metavar="N", default=64, help="images (default: 64)")
    outputs = "PATH.png: one sheet; a new folder: 0000.png … "
    add(
        "--out",
        type=Path,
        help=f"{outputs}(default: a new samples-….png in the folder of the model)",
    )
    add("--seed", type=int, help="seed of the noise (default: that of the model's evaluations)")
    drawing.add_sampler_options(parser, "as in the model's evaluations", "likewise", "likewise")
    add("--batch-size", type=int, help="images at once on each process (default: likewise)")
    cli.add_json(parser)
    args = parser.parse_args(argv)
    within = 1 <= args.images <= 1_000_000
    allow(within, "--images", args.images, "a whole number of at least 1 and at most 1000000")
    image_files.check_output(args.out, ".png")
    model = models.find_with_hook("sample_images", "sample", args.run, args.storage)
    config, args.seed, args.batch_size = _configure(model.config, args)
    check_writable("--out", args.out or model.folder / "samples.png")
    _sample(model, config, args)
    return cli.OK


def _configure(config: Any, args: argparse.Namespace) -> tuple[Any, int, int]:
    """Return (the model's configuration with the options, seed of the noise, batch size).

    Raises `ConfigError` naming the option.
    """
    config = drawing.with_sampler(config, args, {})
    if isinstance(config.evaluation, Evaluation):
        values = {"seed": args.seed, "batch_size": args.batch_size}
        config = drawing.with_evaluation(config, values)
        return config, config.evaluation.seed, config.evaluation.batch_size
    seed = args.seed if args.seed is not None else 0
    batch_size = args.batch_size if args.batch_size is not None else BATCH_SIZE
    allow(seed >= 0, "--seed", seed, "a whole number of at least 0")
    allow(batch_size >= 1, "--batch-size", batch_size, "a whole number of at least 1")
    return config, seed, batch_size


def _sample(model: Saved, config: Any, args: argparse.Namespace) -> None:
    """Draw the images, write them into a folder or as one sheet, and print where they are."""
    import torch

    from tunediff.distributed import from_environment
    from tunediff.evaluation.generation import SampleRequest
    from tunediff.training import memory
    from tunediff.training.observer import image_grid

    sampler, n, path = drawing.describe_sampler(config), args.images, args.out
    folder = path if path is not None and not path.suffix else None
    parts: list[tuple[int, Tensor]] = []
    with from_environment() as world:
        memory.keep_freed(config.memory.keep_freed, world.device)
        request = SampleRequest(n, args.seed, args.batch_size, world.device, world.rank, world.size)

        def receive(start: int, images: Tensor) -> None:
            if folder is None:
                parts.append((start, images.cpu()))

        network = model.network(world.device)
        seconds = drawing.draw(network, config, request, world, folder, receive)
        # uint8 [n, C, H, W] in the order of their numbers
        of_all = sorted(itertools.chain(*world.gather(parts)), key=lambda part: part[0])
        if not world.main:
            return
        if folder is None:
            names = numbered(model.folder, f"samples-{model.name}-{sampler['name']}", ".png")
            path = path or next(path for path in names if not path.exists())
            images = torch.cat([images for _, images in of_all])
            image_grid(images, path, max(8, math.isqrt(n - 1) + 1))
        lines = {
            "images": n, "sampler": drawing.format_sampler(sampler), "seed": args.seed,
            "seconds": seconds, "images_per_s": n / seconds, "path": path,
        }  # fmt: skip
        cli.result(lines, args.json, lines | {"sampler": sampler, "path": path.absolute()})


if __name__ == "__main__":
    sys.exit(main())
