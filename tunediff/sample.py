"""Draw images from a saved model: `python -m tunediff.sample RUN`.

RUN is a training folder, a search (its best trial), NAME/t0003 or an exported best.yaml. Image
number i is the same whatever the batch size and the number of processes: alone, or as `torchrun
--nproc-per-node N -m tunediff.sample …`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli, models
from tunediff.config import ConfigError
from tunediff.core.files import numbered
from tunediff.core.progress import EventLines, Progress
from tunediff.core.refusals import allow, check_writable
from tunediff.evaluation import image_files
from tunediff.evaluation.knobs import Evaluation
from tunediff.models import Saved
from tunediff.workloads import drawing

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.distributed import World

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
    add("--device", help="cpu, cuda or cuda:1 (default: the GPU if there is one)")
    cli.add_json(parser)
    args = parser.parse_args(argv)
    within = 1 <= args.images <= 1_000_000
    allow(within, "--images", args.images, "a whole number of at least 1 and at most 1000000")
    is_device = args.device is None or bool(re.fullmatch(r"cpu|cuda(:\d+)?", args.device))
    allow(is_device, "--device", args.device, "cpu, cuda, cuda:N")
    drawing.check_sampler_options(args)
    image_files.check_output(args.out, ".png")
    model = models.find_with_hook("sample_images", "sample", args.run, args.storage)
    config, args.seed, args.batch_size = _configure(model.config, args)
    check_writable("--out", args.out or model.folder / "samples.png")
    return _sample(model, config, args)


def _configure(config: Any, args: argparse.Namespace) -> tuple[Any, int, int]:
    """Return (the model's configuration with the options, seed of the noise, batch size).

    Raises `ConfigError` naming the option.
    """
    values = drawing.sampler_knobs(args, {}, config)
    if isinstance(config.evaluation, Evaluation):
        values = {**values, "seed": args.seed, "batch_size": args.batch_size}
        config = drawing.with_evaluation(config, values)
        return config, config.evaluation.seed, config.evaluation.batch_size
    seed = args.seed if args.seed is not None else 0
    batch_size = args.batch_size if args.batch_size is not None else BATCH_SIZE
    allow(seed >= 0, "--seed", seed, "a whole number of at least 0")
    allow(batch_size >= 1, "--batch-size", batch_size, "a whole number of at least 1")
    return config, seed, batch_size


def _sample(model: Saved, config: Any, args: argparse.Namespace) -> int:
    """Draw the images, write them and print where they are; returns the exit code."""
    from tunediff.distributed import from_environment
    from tunediff.training import memory

    sampler = drawing.describe_sampler(config)
    try:
        with from_environment() as world:
            memory.keep_freed(config.memory.keep_freed, world.device)
            images, seconds = _draw(model, config, sampler.get("steps"), args, world)
            if world.main:
                path = args.out if images is None else _write(images, args, model, sampler["name"])
                lines = {
                    "images": args.images, "sampler": drawing.format_sampler(sampler),
                    "seed": args.seed,
                    "seconds": seconds, "images_per_s": args.images / seconds, "path": path,
                }  # fmt: skip
                cli.result(lines, args.json, lines | {"sampler": sampler, "path": path.absolute()})
    except OSError as error:
        print(f"error: {args.out or model.folder}: {error}", file=sys.stderr)
        return cli.FAILED
    return cli.OK


def _draw(
    model: Saved, config: Any, steps: int | None, args: argparse.Namespace, world: World
) -> tuple[Tensor | None, float]:
    """Return (images of all ranks, seconds); `steps`: the sampler's, None without steps.

    The images are uint8 [n, C, H, W] in the order of their numbers, None where they are in a
    folder.
    """
    import torch

    from tunediff.evaluation.generation import SampleRequest, shares

    n, device = args.images, device_of(args.device) if args.device is not None else world.device
    network = model.network(device)
    parts: list[tuple[int, Tensor]] = []
    is_folder = args.out is not None and not args.out.suffix

    def receive(start: int, images: Tensor) -> None:
        if is_folder:
            image_files.write_files(images, start, n, args.out)
        else:
            parts.append((start, images.cpu()))

    batches, _ = shares(n, world.size, args.batch_size)
    work = Progress("sampling", batches * (steps or 1), "steps" if steps is not None else "batches")
    request = SampleRequest(n, args.seed, args.batch_size, device, world.rank, world.size)
    with EventLines().work(world.main), work as progress:
        seconds = drawing.draw(network, config, request, world, progress, [receive])
    if is_folder:
        return None, seconds
    of_all = sorted(itertools.chain(*world.gather(parts)), key=lambda part: part[0])
    return torch.cat([images for _, images in of_all]), seconds


def device_of(name: str) -> Any:
    """Return the device of this name. Raises `ConfigError` for a GPU that is not there."""
    import torch

    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device: {name!r} is not there; GPUs: {torch.cuda.device_count()}")
    return device


def _write(images: Tensor, args: argparse.Namespace, model: Saved, sampler: str) -> Path:
    """Write what `_draw` returned as one sheet; returns its path."""
    from tunediff.training.observer import image_grid

    names = numbered(model.folder, f"samples-{model.name}-{sampler}", ".png")
    path: Path = args.out or next(path for path in names if not path.exists())
    image_grid(images, path, max(8, math.isqrt(len(images) - 1) + 1))
    return path


if __name__ == "__main__":
    sys.exit(main())
