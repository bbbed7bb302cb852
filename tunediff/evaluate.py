"""Measure a saved model at full protocol: `python -m tunediff.evaluate RUN`.

RUN is what `tunediff.sample` takes: a training folder, a search (its best trial), NAME/t0003 or an
exported best.yaml. Draws 10,000 images by ancestral sampling unless told otherwise; a model of
another workload than diffusion is judged as in its training, unless its file has `sample_images`
and our sections `data` and `evaluation`. Runs alone, or as `torchrun --nproc-per-node N -m
tunediff.evaluate …`. Compare only numbers of equal images, sampler, reference and extractor.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli, models
from tunediff import config as cfg
from tunediff.api.workload_evaluation import evaluate_as_trained
from tunediff.config import ConfigError
from tunediff.core import environment, remote, text
from tunediff.core.files import write_numbered
from tunediff.core.progress import EventLines, Progress
from tunediff.core.refusals import allow, check_writable, writing
from tunediff.data import sources
from tunediff.data.knobs import Data
from tunediff.evaluation import image_files, weights
from tunediff.evaluation.knobs import PRETRAINED, Evaluation
from tunediff.evaluation.names import KINDS, caution, name_of
from tunediff.models import Saved
from tunediff.workloads import drawing

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.data.images import Images
    from tunediff.distributed import World
    from tunediff.evaluation.extractor import Extractor
    from tunediff.evaluation.quality import Quality

IMAGES, STEPS = 10_000, 50
NUMBERS = "evaluation.json"
DEFAULTS = {"images": IMAGES, "metrics": ",".join(KINDS)}
PROTOCOL = (
    *DEFAULTS, *drawing.SAMPLER_OPTIONS, "split", "extractor", "weights_path", "data_path",
    "batch_size",
)  # fmt: skip
"""Options that a model's own evaluation does not follow."""


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; see `--help`."""
    args = _parser().parse_args(argv)
    asked = {name: value for name in PROTOCOL if (value := getattr(args, name)) is not None}
    vars(args).update(DEFAULTS | asked)
    drawing.check_sampler_options(args)
    image_files.check_output(args.out, ".json")
    allow(args.split in (None, "train", "test", "all"), "--split", args.split, "train, test, all")
    for name in (metrics := args.metrics.split(",")):
        allow(name in KINDS, "--metrics", name, ", ".join(KINDS))
    kinds = tuple(kind for kind in KINDS if kind in metrics)
    model = models.find(args.run, args.storage)
    if not _has_full_protocol(model.config):
        judged_by = f"{cfg.of(model.config).title} is judged as in its training"
        for name, value in asked.items():
            option = f"--{name.replace('_', '-')}"
            allow(False, option, value, f"--out and --json: {judged_by}")
        judged = evaluate_as_trained(model, args.out or model.folder / NUMBERS)
        if judged is not None:
            printed, typed = judged
            cli.result(printed, args.json, typed)
        return cli.OK
    config = _configured(model.config, args)
    sampler = drawing.describe_sampler(config)
    learned: Data = config.data
    # all images of another split, or the learned ones
    other = args.split not in (None, learned.split)
    real = dataclasses.replace(learned, split=args.split, max_images=None) if other else learned
    # ---- images and weights that are not there are missed now, before torch is imported
    sources.check(real)
    # they are made from what is learned, whatever is compared with
    if config.evaluation.extractor not in PRETRAINED:
        sources.check(config.data)
    weights.check(config.data, config.evaluation)
    numbers = model.folder / f"evaluation-{sampler['name']}-{args.images}.json"
    if args.out is not None:
        numbers = args.out if args.out.suffix else args.out / NUMBERS
    check_writable("--out", args.out or numbers)
    args.command = text.original_command("evaluate", argv)
    return _evaluate(model, config, real, kinds, numbers, args)


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("evaluate", __doc__ or "")
    add = parser.add_argument
    add("run", metavar="RUN", help="the model")
    cli.add_storage(parser)
    add("--images", type=int, metavar="N", help=f"images (default: {IMAGES})")
    drawing.add_sampler_options(parser, str(STEPS), "linear", "0")
    split = "real images to compare with: train, test or all (default: the learned ones)"
    add("--split", help=split)
    add("--metrics", help=f"of {DEFAULTS['metrics']}, separated by commas (default: all)")
    extractors = "inception, cifar10-resnet, classifier or random"
    add("--extractor", help=f"{extractors} (default: as in the model's evaluations)")
    trained = "(default: as for the training)"
    add("--weights-path", metavar="FILE", help=f"weights of a trained extractor {trained}")
    add("--data-path", metavar="PATH", help=f"where the real images lie {trained}")
    add("--batch-size", type=int, help=f"images at once on each process {trained}")
    places = f"a new folder: the images, and {NUMBERS}; PATH.json: numbers alone "
    add(
        "--out",
        type=Path,
        help=f"{places}(default: a new evaluation-….json in the folder of the model)",
    )
    cli.add_json(parser)
    return parser


def _has_full_protocol(config: Any) -> bool:
    """Return whether a model's images can be measured at full protocol.

    Its workload has `sample_images`, and its knobs our sections `data` and `evaluation`.
    """
    sections = isinstance(getattr(config, "data", None), Data) and isinstance(
        config.evaluation, Evaluation
    )
    return sections and cfg.of(config).get_hook("sample_images") is not None


def _configured(config: Any, args: argparse.Namespace) -> Any:
    """Return the model's configuration with the options. Raises `ConfigError` naming the option."""
    defaults = {"steps": STEPS, "skip": "linear", "eta": 0.0}
    values = drawing.sampler_knobs(args, defaults, config)
    values |= {
        name: getattr(args, name) for name in ("images", "batch_size", "extractor", "weights_path")
    }
    # the weights that are named are another network's
    if args.extractor not in (None, config.evaluation.extractor):
        config = cfg.override(config, {"evaluation.weights_path": None}, check=False)
    config = drawing.with_evaluation(config, values)
    if args.data_path is not None:
        if config.data.name == "digits":
            raise ConfigError(
                "--data-path: belongs to data in files; the digits come with scikit-learn"
            )
        config = cfg.override(config, {"data.path": args.data_path}, where="--data-path")
    if args.weights_path is not None and config.evaluation.extractor not in PRETRAINED:
        raise ConfigError(f"--weights-path: belongs to --extractor {' or '.join(PRETRAINED)}")
    return cfg.with_absolute_paths(config)


# ---- measurement
def _evaluate(
    model: Saved,
    config: Any,
    real_data: Data,
    kinds: tuple[str, ...],
    numbers: Path,
    args: argparse.Namespace,
) -> int:
    """Compare generated images with `real_data`, write `numbers`; return the exit code."""
    from tunediff.data import images as data
    from tunediff.distributed import from_environment
    from tunediff.evaluation import features
    from tunediff.evaluation.quality import Quality, Real
    from tunediff.training import memory

    evaluation, n = config.evaluation, config.evaluation.images
    folder = args.out if args.out is not None and not args.out.suffix else None
    with from_environment() as world, EventLines().work(world.main):
        memory.keep_freed(config.memory.keep_freed, world.device)
        # ---- the model, the evaluation protocol, the real images
        digest = model.weights_digest()  # now: a training that goes on will replace them
        network, images = model.network(world.device), data.load(real_data)
        learned = data.load(config.data) if evaluation.extractor not in PRETRAINED else images
        extractor = features.build(evaluation, learned, world.device)
        real = Real.of(images, extractor, world.device, evaluation.batch_size, kinds)

        quality = Quality(extractor, n, world.device, kinds)
        seconds = _draw(network, config, quality, folder, world)

        # ---- result
        if world.main:
            result = {
                "model": model.name, "weights": str(model.weights.absolute()),
                "weights_sha256": digest,
                "fingerprint": cfg.fingerprint(model.config),
                **_protocol(config, real_data, images, extractor, world),
                "sampling_s": seconds, "images_per_s": n / seconds,
                "metrics": {
                    name: {"name": name_of(name, extractor.label), **value._asdict()}
                    for name, value in quality.values(real).items()
                },
                "kept": None if folder is None else str(folder.absolute()),
                "command": args.command, "time": time.time(),
                "environment": environment.describe(),
            }  # fmt: skip
            with writing("--out", numbers):
                path = write_numbered(numbers, json.dumps(result, indent=1, allow_nan=False) + "\n")
            remote.push_or_warn(path)
            if args.json:
                cli.print_json(result | {"json": str(path.absolute())})
            else:
                print(_table(result))
                if "fd" in kinds and (warning := caution(extractor.label, n, extractor.dim)):
                    print(f"note: {warning}")
                print(f"json: {path}")
    return cli.OK


def _draw(network: Any, config: Any, quality: Quality, folder: Path | None, world: World) -> float:
    """Add the images of all ranks to `quality`, write them to `folder`; return the seconds."""
    from tunediff.evaluation.generation import SampleRequest, shares

    evaluation, n = config.evaluation, config.evaluation.images
    steps = drawing.describe_sampler(config).get("steps")
    batches, _ = shares(n, world.size, evaluation.batch_size)
    request = SampleRequest(
        n, evaluation.seed, evaluation.batch_size, world.device, world.rank, world.size
    )

    def receive(start: int, batch: Tensor) -> None:
        quality.update(start, batch)
        if folder is not None:
            image_files.write_files(batch, start, n, folder)

    unit = "steps" if steps is not None else "batches"
    with Progress("sampling", batches * (steps or 1), unit) as progress:
        seconds = drawing.draw(network, config, request, world, progress, [receive])
    quality.merge(world)
    return seconds


# ---- result
def _protocol(
    config: Any, real_data: Data, images: Images, extractor: Extractor, world: World
) -> dict[str, Any]:
    """Return how the metrics are measured, in JSON types."""
    import torch

    evaluation, cuda = config.evaluation, world.device.type == "cuda"
    return {
        "images": evaluation.images, "sampler": drawing.describe_sampler(config),
        "seed": evaluation.seed, "batch_size": evaluation.batch_size, "processes": world.size,
        "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
        "reference": {
            "name": images.name, "split": real_data.split, "images": len(images),
            "digest": images.digest,
        },
        "extractor": {
            "name": extractor.name, "label": extractor.label, "digest": extractor.digest,
        },
    }  # fmt: skip


def _table(result: dict[str, Any]) -> str:
    """Return how it was measured, as `key: value`, then one line per metric."""
    reference = result["reference"]
    lines = {
        "model": f"{result['model']} ({result['weights']})",
        "images": result["images"],
        "sampler": drawing.format_sampler(result["sampler"]),
        "seed": result["seed"],
        "sampling_s": result["sampling_s"],
        "images_per_s": result["images_per_s"],
        "reference": f"{reference['name']}, {reference['split']}, {reference['images']} images",
        "extractor": result["extractor"]["name"],
        **({} if result["kept"] is None else {"kept": result["kept"]}),
    }
    rows = [["metric", "value", "N"]]
    for metric in result["metrics"].values():
        value = "–" if metric["value"] is None else f"{metric['value']:.4g}"
        rows.append([metric["name"], value, str(metric["images"])])
    return "\n".join([text.block(lines), *text.table(rows)])


if __name__ == "__main__":
    sys.exit(main())
