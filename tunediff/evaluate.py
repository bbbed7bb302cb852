"""Measure a saved model at full protocol: `python -m tunediff.evaluate RUN`.

RUN is what `tunediff.sample` takes: a training folder, a search (its best trial), NAME/t0003, an exported best.yaml, a
.safetensors file with its configuration beside it, a checkpoint.pt, or a pipeline folder of diffusers. Draws 10,000
images by ancestral sampling unless told otherwise. Runs alone, or as
`torchrun --nproc-per-node N -m tunediff.evaluate …`. Compare only numbers of equal images, sampler, reference and
extractor.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli, environment, models
from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.data.knobs import Data
from tunediff.evaluation.names import KINDS, name_of
from tunediff.models import Saved

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.distributed import World
    from tunediff.evaluation.features import Extractor
    from tunediff.evaluation.progress import Progress
    from tunediff.evaluation.quality import Quality, Value
    from tunediff.workloads.diffusion.knobs import Evaluation
    from tunediff.workloads.diffusion.process import Diffusion
    from tunediff.workloads.diffusion.unet import UNet

IMAGES, DDIM_STEPS = 10_000, 50
MOST_SEEDS = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; see `--help`."""
    return cli.guarded(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = cli.parser("evaluate", __doc__ or "")
    parser.add_argument("run", metavar="RUN", help="the model")
    parser.add_argument("--storage", type=Path, default=cli.STORAGE, help="folder of names (default: %(default)s)")
    parser.add_argument("--images", type=int, default=IMAGES, metavar="N", help="images (default: %(default)s)")
    parser.add_argument("--ddim", action="store_true", help="DDIM (default: ancestral DDPM, all steps)")
    parser.add_argument("--steps", type=int, help=f"DDIM steps (default: {DDIM_STEPS})")
    parser.add_argument("--skip", help="spacing of the DDIM steps: linear (default) or quadratic")
    parser.add_argument("--eta", type=float, help="noise of DDIM, 0 to 1 (default: 0)")
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="K",
        help="sampling seeds: evaluation.seed and the next ones; mean and sd are over them (default: 1)",
    )  # fmt: skip
    parser.add_argument("--split", help="real images to compare with: train, test or all (default: the learned ones)")
    parser.add_argument("--metrics", default=",".join(KINDS), help="of %(default)s, separated by commas (default: all)")
    parser.add_argument("--extractor", help="inception or classifier (default: as in the model's evaluations)")
    parser.add_argument("--weights-path", metavar="FILE", help="Inception weights (default: as for a training)")
    parser.add_argument("--data-path", metavar="PATH", help="where the real images lie (default: as for the training)")
    parser.add_argument(
        "--data", help="for a pipeline of diffusers, which does not say what it learned: digits, cifar10 or images"
    )
    parser.add_argument("--batch-size", type=int, help="images at once on each process (default: as for the training)")
    parser.add_argument(
        "--keep", type=Path, metavar="PATH",
        help="keep the images of the first seed: PATH.npz (arr_0, uint8 [N, H, W, C]) or a new folder (0000.png …)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="PATH",
        help="all numbers (default: evaluation-….json in the folder of the model); a name that is taken gets a number",
    )  # fmt: skip
    args = parser.parse_args(argv)
    kinds = _check(args)
    model = models.find(args.run, args.storage)
    config = _configured(_with_data(model, args), args)
    real = _reference_data(model, config, args.split)
    if model.kind == "diffusers":  # nobody knows what it learned; the classifier learns what it is compared with
        config = dataclasses.replace(config, data=real)
    _check_data(config, real)
    path = args.json or model.folder / f"evaluation-{config.evaluation.sampler}-{args.images}.json"
    for option, target in (("--json", path), ("--keep", args.keep)):
        if target is not None:
            cli.check_writable(option, target)
    command = shlex.join(["python", "-m", "tunediff.evaluate", *(sys.argv[1:] if argv is None else argv)])
    task = _Task(model, config, real, kinds, args.seeds, args.keep, path, command)
    try:
        return _evaluate(task)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return cli.INTERRUPTED


@dataclasses.dataclass(frozen=True)
class _Task:
    model: Saved
    config: Any
    """The model's own, with the protocol that was asked for."""
    real: Data
    """The images to compare with."""
    kinds: tuple[str, ...]
    seeds: int
    keep: Path | None
    json: Path
    command: str


# ----------------------------------------------------------------------------------------------------- what is refused
def _check(args: argparse.Namespace) -> tuple[str, ...]:
    """Refuse what needs no model to be refused; returns the metrics that are wanted."""
    for option in ("steps", "skip", "eta"):
        if getattr(args, option) is not None and not args.ddim:
            raise ConfigError(f"--{option}: belongs to --ddim; without it all steps of the process are taken")
    if not 1 <= args.seeds <= MOST_SEEDS:
        raise ConfigError(f"--seeds: {args.seeds} is not allowed; allowed: a whole number from 1 to {MOST_SEEDS}")
    if args.split not in (None, "train", "test", "all"):
        raise ConfigError(f"--split: {args.split!r} is not allowed; allowed: train, test, all")
    wanted = args.metrics.split(",")
    if unknown := [name for name in wanted if name not in KINDS]:
        raise ConfigError(f"--metrics: {unknown[0]!r} is not allowed; allowed: {', '.join(KINDS)}")
    if args.json is not None and args.json.suffix != ".json":
        raise ConfigError(f"--json: {str(args.json)!r} is not allowed; allowed: a name that ends in .json")
    keep = args.keep
    if keep is not None and keep.suffix not in ("", ".npz"):
        raise ConfigError(f"--keep: {str(keep)!r} is not allowed; allowed: a name that ends in .npz, or a folder")
    if keep is not None and keep.exists() and (keep.suffix or not keep.is_dir() or any(keep.iterdir())):
        raise ConfigError(f"--keep: {keep} exists; allowed: a new file, or a new or empty folder")
    return tuple(kind for kind in KINDS if kind in wanted)


def _with_data(model: Saved, args: argparse.Namespace) -> Any:
    """The model's configuration, naming its images. Raises `ConfigError` where nobody knows what they are."""
    if model.kind != "diffusers":
        if args.data is not None:
            raise ConfigError("--data: belongs to pipelines of diffusers; this model knows what it learned")
        return model.config
    if args.data is None and args.data_path is None:
        raise ConfigError(
            f"{model.folder}: a pipeline does not say which images it learned; "
            "give --data digits, --data cifar10, or --data-path with a folder or .zip of images"
        )
    name = args.data or "images"
    if name not in cfg.baseline_names():
        raise ConfigError(f"--data: {name!r} is not allowed; allowed: {', '.join(cfg.baseline_names())}")
    values: dict[str, Any] = {"data.name": name, "data.path": args.data_path, "data.horizontal_flip": False}
    if name == "digits":
        values["data.split"] = "all"
    return cfg.override(model.config, values, where="--data")


def _configured(config: Any, args: argparse.Namespace) -> Any:
    """The model's configuration with what was asked for. Raises `ConfigError` naming the option."""
    options = {
        "--ddim": {"evaluation.sampler": "ddim" if args.ddim else "ddpm"},
        "--images": {"evaluation.images": args.images},
        "--batch-size": {"evaluation.batch_size": args.batch_size},
        "--extractor": {"evaluation.extractor": args.extractor},
        "--weights-path": {"evaluation.weights_path": args.weights_path},
        "--data-path": {"data.path": args.data_path},
    }
    if args.ddim:
        options["--steps"] = {"evaluation.steps": DDIM_STEPS if args.steps is None else args.steps}
        options["--skip"] = {"evaluation.skip": args.skip or "linear"}
        options["--eta"] = {"evaluation.eta": args.eta or 0.0}
    for option, values in options.items():
        if None not in values.values():
            config = cfg.override(config, values, where=option)
    if args.weights_path is not None and config.evaluation.extractor != "inception":
        raise ConfigError("--weights-path: belongs to --extractor inception; the classifier is trained on the images")
    return cfg.with_absolute_paths(config)


def _reference_data(model: Saved, config: Any, split: Any) -> Data:
    """The learned images, or all of another split."""
    if split in (None, config.data.split):
        return config.data
    return dataclasses.replace(config.data, split=split, max_images=None)


def _check_data(config: Any, real: Data) -> None:
    """Refuse images or weights that are not there, before torch is imported."""
    from tunediff.data import sources
    from tunediff.evaluation import weights

    sources.check(real)
    if config.evaluation.extractor == "classifier":  # it is trained on what is learned, whatever is compared with
        sources.check(config.data)
    weights.check(config.data, config.evaluation)


# --------------------------------------------------------------------------------------------------------- measurement
def _evaluate(task: _Task) -> int:
    from tunediff.data import images as data
    from tunediff.distributed import from_environment
    from tunediff.evaluation import features
    from tunediff.evaluation.distance import NonFiniteError
    from tunediff.evaluation.progress import Progress
    from tunediff.evaluation.quality import Quality, Real
    from tunediff.training import memory
    from tunediff.workloads.diffusion.process import Diffusion
    from tunediff.workloads.diffusion.sampling import shares

    config, evaluation = task.config, task.config.evaluation
    steps = evaluation.steps if evaluation.sampler == "ddim" else config.process.steps
    try:
        with from_environment() as world:
            memory.keep_freed(config.memory.keep_freed, world.device)
            # ---- the model, the ruler, the real images
            with open(task.model.weights, "rb") as file:  # now: a training that goes on will replace it
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            network, diffusion = task.model.network(world.device), Diffusion(config.process, world.device)
            images = data.load(task.real)
            learned = data.load(config.data) if evaluation.extractor == "classifier" else images
            extractor = features.build(evaluation, learned, world.device)
            real = Real.of(images, extractor, world.device, evaluation.batch_size, task.kinds)

            # ---- sampling
            seconds, values = [], []
            batches, _ = shares(evaluation.images, world.size, evaluation.batch_size)
            with Progress(task.seeds * batches * steps, world.main) as progress:
                for index in range(task.seeds):
                    quality = Quality(extractor, evaluation.images, world.device, task.kinds)
                    keeper = _Keeper(task.keep, config, world) if task.keep is not None and index == 0 else None
                    seeded = dataclasses.replace(evaluation, seed=evaluation.seed + index)
                    spent = _draw(network, diffusion, config, seeded, quality, keeper, progress, world)
                    seconds.append(spent)
                    if world.main:
                        values.append(quality.values(real))

            # ---- result
            if world.main:
                found = _result(task, digest, steps, extractor, images, seconds, values, world)
                print(_table(found))
                print(f"json: {_write(found, task.json)}")
    except NonFiniteError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.FAILED
    return cli.OK


def _draw(
    network: UNet,
    diffusion: Diffusion,
    config: Any,
    evaluation: Evaluation,
    quality: Quality,
    keeper: _Keeper | None,
    progress: Progress,
    world: World,
) -> float:
    """Draw all images of one seed and collect them in `quality` on all ranks; returns the seconds of sampling alone.

    Raises `NonFiniteError` on all ranks at once.
    """
    from tunediff.evaluation.distance import NonFiniteError
    from tunediff.evaluation.features import one_ruler
    from tunediff.workloads.diffusion.sampling import generate

    data, seconds, failure = config.data, 0.0, ""
    shape = (data.channels, data.image_size, data.image_size)
    try:
        with one_ruler(world.device):
            batches = generate(
                network, diffusion, evaluation, shape, evaluation.images, world.device,
                rank=world.rank, world=world.size, progress=progress.step,
            )  # fmt: skip
            while True:
                world.synchronize()  # what the metrics have queued is not sampling
                begin = time.monotonic()
                drawn = next(batches, None)
                seconds += time.monotonic() - begin
                if drawn is None:
                    break
                quality.update(*drawn)
                if keeper is not None:
                    keeper.add(*drawn)
    except NonFiniteError as error:
        failure = str(error)
    if world.any(bool(failure)):  # no rank may leave alone: the others would wait in the sums below
        raise NonFiniteError(failure or "non-finite values in images generated by another rank")
    quality.merge(world)
    if keeper is not None:
        keeper.finish()
    return world.largest(seconds)


class _Keeper:
    """Puts images away as they are drawn: each into a file of its own, or all into one array."""

    def __init__(self, path: Path, config: Any, world: World) -> None:
        import torch

        data, self._count = config.data, config.evaluation.images
        self._path, self._world = path, world
        self._whole: Tensor | None = None
        if path.suffix:
            shape = (self._count, data.channels, data.image_size, data.image_size)
            self._whole = torch.zeros(shape, dtype=torch.uint8)
        else:
            path.mkdir(parents=True, exist_ok=True)

    def add(self, start: int, images: Tensor) -> None:
        """Images start, start + 1, …, uint8 [b, C, H, W]."""
        from tunediff.workloads.diffusion.sampling import write_files

        if self._whole is not None:
            self._whole[start : start + len(images)] = images.cpu()
        else:
            write_files(images, start, self._count, self._path)

    def finish(self) -> None:
        """Write the array; all ranks call it."""
        import numpy as np

        from tunediff.files import write_atomically

        if self._whole is None:
            return
        # Every rank filled in the rows of its own images; the sum is the whole.
        whole = self._world.sum(self._whole.to(self._world.device))
        if self._world.main:
            array = whole.permute(0, 2, 3, 1).cpu().numpy()
            write_atomically(self._path, lambda file: np.savez(file, array))


# -------------------------------------------------------------------------------------------------------------- result
def _result(
    task: _Task,
    digest: str,
    steps: int,
    extractor: Extractor,
    images: Any,
    seconds: list[float],
    values: list[dict[str, Value]],
    world: World,
) -> dict[str, Any]:
    """Everything that was found and how, in JSON types."""
    evaluation = task.config.evaluation
    sampler: dict[str, Any] = {"name": evaluation.sampler, "steps": steps}
    if evaluation.sampler == "ddim":
        sampler |= {"skip": evaluation.skip, "eta": evaluation.eta}
    metrics = {}
    for name, first in values[0].items():
        per_seed = [found[name].value for found in values]
        known = [value for value in per_seed if value is not None]
        metrics[name] = {
            "name": name_of(name, extractor.label),
            "value": statistics.fmean(known) if known else None,
            "sd": statistics.stdev(known) if len(known) > 1 else None,
            "images": first.images,
            "per_seed": per_seed,
        }
        if first.within_sd is not None:
            metrics[name]["within_sd"] = [found[name].within_sd for found in values]
    return {
        "model": task.model.name,
        "weights": str(task.model.weights.absolute()),
        "weights_sha256": digest,
        "fingerprint": cfg.fingerprint(task.model.config),
        "images": evaluation.images,
        "sampler": sampler,
        "seeds": [evaluation.seed + index for index in range(task.seeds)],
        "sampling_s": sum(seconds),
        "sampling_s_per_seed": seconds,
        "images_per_s": task.seeds * evaluation.images / sum(seconds),
        "batch_size": evaluation.batch_size,
        "processes": world.size,
        "device": _device_name(world),
        "reference": {
            "name": images.name, "split": task.real.split, "images": len(images), "digest": images.digest,
        },
        "extractor": {"name": extractor.name, "label": extractor.label, "digest": extractor.digest},
        "metrics": metrics,
        "kept": None if task.keep is None else str(task.keep.absolute()),
        "command": task.command,
        "time": time.time(),
        "environment": environment.describe(),
    }  # fmt: skip


def _device_name(world: World) -> str:
    import torch

    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"


def _table(found: dict[str, Any]) -> str:
    """How it was measured, as `key: value`, then one line per metric."""
    sampler, reference = found["sampler"], found["reference"]
    how = f", {sampler['skip']}, eta {sampler['eta']:g}" if sampler["name"] == "ddim" else ""
    lines = {
        "model": f"{found['model']} ({found['weights']})",
        "images": found["images"],
        "sampler": f"{sampler['name']}, {sampler['steps']} steps{how}",
        "seeds": ", ".join(map(str, found["seeds"])),
        "sampling_s": found["sampling_s"],
        "images_per_s": found["images_per_s"],
        "reference": f"{reference['name']}, {reference['split']}, {reference['images']} images",
        "extractor": found["extractor"]["name"],
    }
    if found["kept"] is not None:
        lines["kept"] = found["kept"]
    head = [f"{key}: {cli.number(value)}" for key, value in lines.items()]
    several = len(found["seeds"]) > 1
    rows = [("metric", "value", "± sd", "N")]
    for metric in found["metrics"].values():
        value, sd, count = metric["value"], metric["sd"], metric["images"]
        rows.append((
            metric["name"],
            "–" if value is None else f"{value:.4g}",
            "–" if sd is None else f"{sd:.2g}",
            "∞" if count is None else str(count),
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, shown, sd, count in rows:
        spread = f"  {sd:>{widths[2]}}" if several else ""
        head.append(f"{name:<{widths[0]}}  {shown:>{widths[1]}}{spread}  {count:>{widths[3]}}")
    return "\n".join(head)


def _write(found: dict[str, Any], path: Path) -> Path:
    """Write as JSON under this name, or with -2, -3, … where it is taken; returns the name."""
    text, wanted, number = json.dumps(found, indent=1, allow_nan=False) + "\n", path, 1
    while True:
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:
            number += 1
            path = wanted.with_stem(f"{wanted.stem}-{number}")
        except OSError as error:
            raise ConfigError(f"--json: {path} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
