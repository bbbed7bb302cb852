"""Draw images from a saved model: `python -m tunediff.sample RUN`.

RUN is a training folder, a search (its best trial), NAME/t0003, an exported best.yaml, a .safetensors file with its
configuration beside it, a checkpoint.pt, or a pipeline folder of diffusers. Image number i is the same whatever the
batch size and the number of processes: alone, or as `torchrun --nproc-per-node N -m tunediff.sample …`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli, models
from tunediff.config import ConfigError
from tunediff.core.files import numbered
from tunediff.core.progress import Progress, shown
from tunediff.models import Saved
from tunediff.workloads.diffusion import drawing

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.distributed import World

STRIP_IMAGES, STRIP_COLUMNS = 8, 10


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Sample; see `--help`."""
    parser = cli.parser("sample", __doc__ or "")
    add = parser.add_argument
    add("run", metavar="RUN", help="the model")
    cli.add_storage(parser, "names")
    add("--images", type=int, metavar="N", help="images (default: 64, with --strip 8)")
    kinds = "PATH.png: one sheet; PATH.npz: arr_0, uint8 [N, H, W, C]; a new folder: 0000.png … "
    add("--out", type=Path, help=f"{kinds}(default: a new samples-….png in the folder of the model)")
    add("--seed", type=int, help="seed of the noise (default: that of the model's evaluations)")
    drawing.add_options(parser, "as in the model's evaluations", "likewise", "likewise")
    add("--batch-size", type=int, help="images at once on each process (default: likewise)")
    add("--strip", action="store_true", help="a PNG of the denoising, one row per image")
    add("--device", help="cpu, cuda or cuda:1 (default: the GPU if there is one)")
    cli.add_printing(parser, quiet=False)
    args = parser.parse_args(argv)
    args.images = args.images if args.images is not None else STRIP_IMAGES if args.strip else 64
    _check(args)
    model = models.find_of("diffusion", "sample", args.run, args.storage)
    wanted = {name: getattr(args, name) for name in ("sampler", "seed", "steps", "skip", "eta", "batch_size")}
    config = drawing.configured(model.config, wanted)
    cli.check_writable("--out", args.out or model.folder / "samples.png")
    return _sample(model, config, args)


def _check(args: argparse.Namespace) -> None:
    """Refuse what needs no model to be refused."""
    most = STRIP_IMAGES if args.strip else 1_000_000
    cli.allow(1 <= args.images <= most, "--images", args.images, f"a whole number of at least 1 and at most {most}")
    known = args.device is None or bool(re.fullmatch(r"cpu|cuda(:\d+)?", args.device))
    cli.allow(known, "--device", args.device, "cpu, cuda, cuda:N")
    drawing.check(args, "--out", args.out, ".png", ".npz")
    if args.strip and args.out is not None and args.out.suffix != ".png":
        out = str(args.out)
        raise ConfigError(f"--out: {out!r} is not allowed with --strip; allowed: a name that ends in .png")


def _sample(model: Saved, config: Any, args: argparse.Namespace) -> int:
    from tunediff.distributed import from_environment
    from tunediff.training import memory

    how = drawing.sampler(config)
    try:
        with from_environment() as world:
            memory.keep_freed(config.memory.keep_freed, world.device)
            images, seconds = _draw(model, config, how["steps"], args, world)
            if world.main:
                path = args.out if images is None else _write(images, args, model, how["name"])
                lines = {
                    "images": args.images, "sampler": drawing.said(how), "seed": config.evaluation.seed,
                    "seconds": seconds, "images_per_s": args.images / seconds, "path": path,
                }  # fmt: skip
                cli.result(lines, args.json, lines | {"sampler": how})
    except OSError as error:
        print(f"error: {args.out or model.folder}: {error}", file=sys.stderr)
        return cli.FAILED
    return cli.OK


def _draw(model: Saved, config: Any, steps: int, args: argparse.Namespace, world: World) -> tuple[Tensor | None, float]:
    """(images uint8 of all ranks, [n, C, H, W] or of a strip [n, columns, C, H, W], None where they went to a folder;
    seconds of sampling).

    The columns of a strip: x_T, states evenly spaced over the steps, the image. A `NonFiniteError` may meet one rank
    alone: nothing waits for the others.
    """
    import torch

    from tunediff.training.precision import evaluation_precision
    from tunediff.workloads.diffusion.process import Diffusion
    from tunediff.workloads.diffusion.sampling import Noise, generate, shares, to_uint8

    n, evaluation = args.images, config.evaluation
    shape = (config.data.channels, config.data.image_size, config.data.image_size)
    device = _device(args.device) if args.device is not None else world.device
    network, diffusion = model.network(device), Diffusion(config.process, device)
    columns = min(STRIP_COLUMNS, steps + 1) if args.strip else 1
    kept = {round(i * steps / (columns - 1)) for i in range(1, columns)}
    drawn = drawing.Drawn(args.out, n, (columns, *shape) if args.strip else shape, world)
    noise = Noise(evaluation.seed, shape, device)
    states: list[Tensor] = []
    turns, _ = shares(n, world.size, evaluation.batch_size)

    def watch(k: int, _: int, x: Tensor) -> None:
        progress.step()
        if k + 1 in kept:
            states.append(to_uint8(x))

    drawing.announce(network, config, n, world, device)
    work = Progress("sampling", turns * steps, "steps")
    with shown() if world.main else contextlib.nullcontext(), work as progress, evaluation_precision(device):
        world.barrier()
        begin = time.monotonic()
        for start, batch in generate(
            network, diffusion, evaluation, shape, n, device, rank=world.rank, world=world.size, progress=watch
        ):
            if args.strip:
                count = len(batch)
                seen = [to_uint8(noise.initial(start, start + count)), *(x[:count] for x in states)]
                batch = torch.stack(seen, 1)
                states.clear()
            drawn.add(start, batch)
        seconds = world.largest(time.monotonic() - begin)
    return drawn.whole(), seconds


def _device(name: str) -> Any:
    import torch

    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device: {name!r} is not there; GPUs: {torch.cuda.device_count()}")
    return device


def _write(images: Tensor, args: argparse.Namespace, model: Saved, sampler: str) -> Path:
    """Write what `_draw` has returned as one file; returns its path."""
    names = numbered(model.folder, f"{'strip' if args.strip else 'samples'}-{model.name}-{sampler}", ".png")
    path: Path = args.out or next(path for path in names if not path.exists())
    if args.strip:
        drawing.write(images.flatten(0, 1), path, images.shape[1])
    else:
        drawing.write(images, path, max(8, math.isqrt(len(images) - 1) + 1))
    return path


if __name__ == "__main__":
    sys.exit(main())
