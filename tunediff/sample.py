"""Draw images from a saved model: `python -m tunediff.sample RUN`.

RUN is a training folder, a search (its best trial), NAME/t0003, an exported best.yaml, a .safetensors file with its
configuration beside it, a checkpoint.pt, or a pipeline folder of diffusers. Image number i is the same whatever the
batch size and the number of processes: alone, or as `torchrun --nproc-per-node N -m tunediff.sample …`.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli, models
from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.models import Saved

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.distributed import World

STRIP_IMAGES, STRIP_COLUMNS = 8, 10


def main(argv: Sequence[str] | None = None) -> int:
    """Sample; see `--help`."""
    return cli.guarded(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = cli.parser("sample", __doc__ or "")
    parser.add_argument("run", metavar="RUN", help="the model")
    parser.add_argument("--storage", type=Path, default=cli.STORAGE, help="folder of names (default: %(default)s)")
    parser.add_argument("-n", type=int, metavar="N", help="images (default: 64, with --strip 8)")
    parser.add_argument(
        "--out", type=Path,
        help="PATH.png: one sheet; PATH.npz: arr_0, uint8 [N, H, W, C]; a new folder: 0000.png … "
        "(default: a new samples-….png in the folder of the model)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, help="seed of the noise (default: that of the model's evaluations)")
    parser.add_argument("--ddim", action="store_true", help="DDIM (default: ancestral DDPM, all steps)")
    parser.add_argument("--steps", type=int, help="DDIM steps (default: as in the model's evaluations)")
    parser.add_argument("--skip", help="spacing of the DDIM steps: linear or quadratic (default: likewise)")
    parser.add_argument("--eta", type=float, help="noise of DDIM, 0 to 1 (default: likewise)")
    parser.add_argument("--batch-size", type=int, help="images at once on each process (default: likewise)")
    parser.add_argument("--strip", action="store_true", help="a PNG of the denoising, one row per image")
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: the GPU if there is one)")
    args = parser.parse_args(argv)
    args.n = args.n if args.n is not None else STRIP_IMAGES if args.strip else 64
    _check(args)
    model = models.find(args.run, args.storage)
    config = _configured(model.config, args)
    cli.check_writable("--out", args.out or model.folder / "samples.png")
    return _sample(model, config, args)


def _check(args: argparse.Namespace) -> None:
    """Refuse what needs no model to be refused."""
    most = STRIP_IMAGES if args.strip else 1_000_000
    if not 1 <= args.n <= most:
        raise ConfigError(f"-n: {args.n} is not allowed; allowed: a whole number of at least 1 and at most {most}")
    for option in ("steps", "skip", "eta"):
        if getattr(args, option) is not None and not args.ddim:
            raise ConfigError(f"--{option}: belongs to --ddim; without it all steps of the process are taken")
    if args.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        raise ConfigError(f"--device: {args.device!r} is not allowed; allowed: cpu, cuda, cuda:N")
    out = args.out
    if out is None:
        return
    if out.suffix not in ("", ".png", ".npz"):
        raise ConfigError(f"--out: {str(out)!r} is not allowed; allowed: a name that ends in .png or .npz, or a folder")
    if args.strip and out.suffix != ".png":
        raise ConfigError(f"--out: {str(out)!r} is not allowed with --strip; allowed: a name that ends in .png")
    if out.exists() and (out.suffix or not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: {out} exists; allowed: a new file, or a new or empty folder")


def _configured(config: Any, args: argparse.Namespace) -> Any:
    """The configuration with the sampler that was asked for. Raises `ConfigError` naming the option."""
    config = cfg.override(config, {"evaluation.sampler": "ddim" if args.ddim else "ddpm"}, where="--ddim")
    for option in ("seed", "steps", "skip", "eta", "batch_size"):
        if (value := getattr(args, option)) is not None:
            where = "--" + option.replace("_", "-")
            config = cfg.override(config, {f"evaluation.{option}": value}, where=where)
    return config


def _sample(model: Saved, config: Any, args: argparse.Namespace) -> int:
    from tunediff.distributed import from_environment
    from tunediff.evaluation.distance import NonFiniteError
    from tunediff.training import memory

    try:
        with from_environment() as world:
            memory.keep_freed(config.memory.keep_freed, world.device)
            images, seconds = _draw(model, config, args, world)
            if world.main:
                path = args.out if images is None else _write(images, args, model, config.evaluation.sampler)
                _conclude(config, args.n, seconds, path)
    except NonFiniteError as error:  # it may have met one rank alone: nothing waits for the others
        print(f"error: {error}", file=sys.stderr)
        return cli.FAILED
    except OSError as error:
        print(f"error: {args.out or model.folder}: {error}", file=sys.stderr)
        return cli.FAILED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return cli.INTERRUPTED
    return cli.OK


def _draw(model: Saved, config: Any, args: argparse.Namespace, world: World) -> tuple[Tensor | None, float]:
    """(images uint8 [n, columns, C, H, W] of all ranks, None where they went to a folder; seconds of sampling).

    The columns of a strip: x_T, states evenly spaced over the steps, the image. Elsewhere there is one.
    """
    import torch

    from tunediff.evaluation.features import one_ruler
    from tunediff.evaluation.progress import Progress
    from tunediff.workloads.diffusion.process import Diffusion
    from tunediff.workloads.diffusion.sampling import Noise, generate, shares, to_uint8, write_files

    n, evaluation, steps = args.n, config.evaluation, _steps(config)
    shape = (config.data.channels, config.data.image_size, config.data.image_size)
    device = _device(args.device) if args.device is not None else world.device
    network, diffusion = model.network(device), Diffusion(config.process, device)

    folder = args.out if args.out is not None and not args.out.suffix else None
    if folder is not None:
        folder.mkdir(exist_ok=True)
    columns = min(STRIP_COLUMNS, steps + 1) if args.strip else 1
    kept = {round(i * steps / (columns - 1)) for i in range(1, columns)}
    whole = torch.zeros(0 if folder is not None else n, columns, *shape, dtype=torch.uint8)
    noise = Noise(evaluation.seed, shape, device)
    states: list[Tensor] = []
    turns, _ = shares(n, world.size, evaluation.batch_size)

    def watch(k: int, _: int, x: Tensor) -> None:
        progress.step()
        if k + 1 in kept:
            states.append(to_uint8(x))

    with Progress(turns * steps, world.main) as progress, one_ruler(device):
        world.barrier()
        begin = time.monotonic()
        for start, batch in generate(
            network, diffusion, evaluation, shape, n, device, rank=world.rank, world=world.size, progress=watch
        ):
            rows = slice(start, start + len(batch))
            if folder is not None:
                write_files(batch, start, n, folder)
            elif args.strip:
                seen = [to_uint8(noise.initial(rows.start, rows.stop)), *(x[: len(batch)] for x in states)]
                whole[rows] = torch.stack(seen, 1).cpu()
                states.clear()
            else:
                whole[rows] = batch[:, None].cpu()
        seconds = world.largest(time.monotonic() - begin)
    if folder is not None:
        return None, seconds
    # Every rank filled in the rows of its own images; the sum is the whole.
    return world.sum(whole.to(world.device)).cpu(), seconds


def _steps(config: Any) -> int:
    return config.evaluation.steps if config.evaluation.sampler == "ddim" else config.process.steps


def _device(name: str) -> Any:
    import torch

    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device: {name!r} is not there; GPUs: {torch.cuda.device_count()}")
    return device


def _write(images: Tensor, args: argparse.Namespace, model: Saved, sampler: str) -> Path:
    """Write images uint8 [n, columns, C, H, W] as one file."""
    import numpy as np

    from tunediff.files import write_atomically
    from tunediff.training.observer import image_grid

    kind = "strip" if args.strip else "samples"
    path: Path = args.out or _unused(model.folder, f"{kind}-{model.name}-{sampler}")
    if path.suffix == ".npz":
        array = images[:, 0].permute(0, 2, 3, 1).numpy()
        write_atomically(path, lambda file: np.savez(file, array))
    else:
        columns = images.shape[1] if args.strip else max(8, math.isqrt(len(images) - 1) + 1)
        image_grid(images.flatten(0, 1), path, columns)
    return path


def _unused(folder: Path, stem: str) -> Path:
    """stem.png, or stem-2.png, … : the first that is not there."""
    path, number = folder / f"{stem}.png", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.png"
    return path


def _conclude(config: Any, n: int, seconds: float, path: Path) -> None:
    """The result, as `key: value`."""
    evaluation = config.evaluation
    how = f", {evaluation.skip}, eta {evaluation.eta:g}" if evaluation.sampler == "ddim" else ""
    lines = {
        "images": n,
        "sampler": f"{evaluation.sampler}, {_steps(config)} steps{how}",
        "seed": evaluation.seed,
        "seconds": seconds,
        "images_per_s": n / seconds,
        "path": path,
    }
    print("\n".join(f"{key}: {cli.number(value)}" for key, value in lines.items()))


if __name__ == "__main__":
    sys.exit(main())
