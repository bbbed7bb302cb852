"""Judge a saved model with many images: `tunediff evaluate RUN`.

RUN is what `tunediff.sample` takes: a training folder, a search (its best trial), NAME/t0003 or an
exported best.yaml. Draws 10,000 images by ancestral sampling unless told otherwise; a model of
another workload than diffusion is judged as in its training, unless its file has `sample_images`
and our sections `data` and `evaluation`. Runs alone, or as `torchrun --nproc-per-node N -m
tunediff.evaluate …`. Compare only numbers of equal images, sampler, reference and extractor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunediff import cli, models
from tunediff import config as cfg
from tunediff.core import environment, remote, text
from tunediff.core.files import write_numbered
from tunediff.core.options import REQUIRED, JsonOptions, allow, check_writable, option
from tunediff.core.progress import EventLines
from tunediff.data.knobs import Data
from tunediff.evaluation import image_files
from tunediff.evaluation.knobs import KINDS, PRETRAINED, Evaluation, caution, name_of
from tunediff.models import Saved
from tunediff.workloads import drawing

if TYPE_CHECKING:
    from tunediff.distributed import World

IMAGES, STEPS = 10_000, 50
NUMBERS = "evaluation.json"


class Protocol(drawing.SamplerOptions):
    """Options that a model's own evaluation does not follow."""

    images: int | None = option(None, f"images (default: {IMAGES})", metavar="N")
    split: Literal["train", "test", "all"] | None = option(
        None, "real images to compare with: train, test or all (default: the learned ones)"
    )
    metrics: str | None = option(None, f"of {','.join(KINDS)}, separated by commas (default: all)")
    extractor: str | None = option(
        None,
        "inception, cifar10-resnet, classifier or random (default: as in the model's evaluations)",
    )
    weights_path: str | None = option(
        None, "weights of a trained extractor (default: as for the training)", metavar="FILE"
    )
    data_path: str | None = option(
        None, "where the real images lie (default: as for the training)", metavar="PATH"
    )
    batch_size: int | None = option(
        None, "images at once on each process (default: as for the training)"
    )


class EvaluateOptions(Protocol, JsonOptions, remote.StorageOptions):
    """The options of the command."""

    run: str = option(REQUIRED, "the model", flag="RUN", metavar="RUN")
    out: Path | None = option(
        None,
        f"a new folder: the images, and {NUMBERS}; PATH.json: numbers alone (default: a new"
        " evaluation-….json in the folder of the model)",
    )


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; see `--help`."""
    options = cli.parse("evaluate", __doc__, EvaluateOptions, argv)
    image_files.check_output(options.out, ".json")
    model = models.find(options.run, Path(options.storage))
    # At full protocol: its workload generates images, and its knobs have our sections
    if (
        isinstance(getattr(model.config, "data", None), Data)
        and isinstance(model.config.evaluation, Evaluation)
        and cfg.of(model.config).get_hook("sample_images") is not None
    ):
        _evaluate(model, options, text.original_command("evaluate", argv))
    else:
        _evaluate_as_trained(model, options)
    return cli.OK


# ---- by the workload's own evaluation
def _evaluate_as_trained(model: Saved, options: EvaluateOptions) -> None:
    """Judge a model by its workload's evaluation, as its training did, and write the result."""
    judged_by = f"{cfg.of(model.config).title} is judged as in its training"
    for name, value in options.given(Protocol).items():
        allow(False, f"--{name.replace('_', '-')}", value, f"--out and --json: {judged_by}")
    path = options.out or model.folder / NUMBERS
    allow(path.suffix == ".json", "--out", path, "a name that ends in .json")
    check_writable("--out", path)

    from tunediff.distributed import from_environment
    from tunediff.training.judging import judged

    with from_environment() as world, EventLines().work(world.main):
        # Every process has the whole model and a part of the data, however it was trained.
        spread = {"parallel.workers": world.size, "parallel.strategy": "ddp"}
        values = judged(cfg.override(model.config, spread, check=False), model.state(), world)
        if not world.main:
            return
        about = {"model": model.name, "weights": str(model.weights.absolute())}
        path = write_numbered(path, json.dumps({**about, **values}, indent=2))
        remote.push_or_warn(path)
        metrics = {
            name: {"name": name, "value": value}
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        typed = {**about, "metrics": metrics, "json": path.absolute()}
        cli.result({**about, **values, "json": path}, options.as_json, typed)


# ---- at full protocol
def _configured(config: Any, options: EvaluateOptions) -> Any:
    """Return the model's configuration with the options. Raises `ConfigError` naming the option."""
    config = drawing.with_sampler(config, options, {"steps": STEPS, "skip": "linear", "eta": 0.0})
    # the weights that are named are another network's
    if options.extractor not in (None, config.evaluation.extractor):
        config = cfg.override(config, {"evaluation.weights_path": None}, check=False)
    names = ("images", "batch_size", "extractor", "weights_path")
    config = drawing.with_evaluation(config, {name: getattr(options, name) for name in names})
    if options.data_path is not None:
        allow(config.data.name != "digits", "--data-path", options.data_path, "with data in files")
        config = cfg.override(config, {"data.path": options.data_path}, where="--data-path")
    trained = config.evaluation.extractor in PRETRAINED
    owners = f"with --extractor {' or '.join(PRETRAINED)}"
    allow(options.weights_path is None or trained, "--weights-path", options.weights_path, owners)
    return cfg.with_absolute_paths(config)


def _evaluate(model: Saved, options: EvaluateOptions, command: str) -> None:
    """Compare generated with real images, write and print the numbers."""
    options.images = options.images or IMAGES
    for name in (metrics := (options.metrics or ",".join(KINDS)).split(",")):
        allow(name in KINDS, "--metrics", name, ", ".join(KINDS))
    kinds = tuple(kind for kind in KINDS if kind in metrics)
    config = _configured(model.config, options)
    folder = options.out if options.out is not None and not options.out.suffix else None
    drawn = drawing.describe_sampler(config)["name"]
    path = options.out or model.folder / f"evaluation-{drawn}-{options.images}.json"
    path = path if folder is None else folder / NUMBERS
    check_writable("--out", options.out or path)
    real_data = config.data
    if options.split not in (None, real_data.split):  # all images of another split
        real_data = dataclasses.replace(real_data, split=options.split, max_images=None)

    from tunediff.distributed import from_environment

    with from_environment() as world:
        facts, note = _measured(model, config, real_data, kinds, folder, world)
        if not world.main:
            return
    result = facts | {
        "kept": None if folder is None else str(folder.absolute()),
        "command": command, "time": time.time(), "environment": environment.describe(),
    }  # fmt: skip
    path = write_numbered(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    remote.push_or_warn(path)
    if options.as_json:
        cli.print_json(result | {"json": str(path.absolute())})
        return
    print("\n".join([_table(result), *([f"note: {note}"] if note else []), f"json: {path}"]))


def _measured(
    model: Saved, config: Any, real_data: Data, kinds: Sequence[str], folder: Path | None,
    world: World,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """Draw images, also into `folder`; return how they compare with `real_data`, in JSON types,
    and what a reader of the Fréchet distance is to know, or ''."""
    import torch

    from tunediff.data import images as data
    from tunediff.evaluation import features
    from tunediff.evaluation.generation import SampleRequest
    from tunediff.evaluation.judge import Quality, Real
    from tunediff.training import memory

    evaluation, device = config.evaluation, world.device
    n, batch_size = evaluation.images, evaluation.batch_size
    memory.keep_freed(config.memory.keep_freed, device)
    with EventLines().work(world.main):
        # now: a training that goes on will replace them
        digest = hashlib.sha256(model.weights.read_bytes()).hexdigest()
        network, images = model.network(device), data.load(real_data)
        # The classifier is made from what is learned, whatever is compared with
        learned = images if evaluation.extractor in PRETRAINED else data.load(config.data)
        extractor = features.build(evaluation, learned, device)
        real = Real.of(images, extractor, device, batch_size, kinds)
    quality = Quality(extractor, n, device, kinds)
    request = SampleRequest(n, evaluation.seed, batch_size, device, world.rank, world.size)
    seconds = drawing.draw(network, config, request, world, folder, quality.update)
    quality.merge(world)
    values = quality.values(real) if world.main else {}
    note = caution(extractor.label, n, extractor.dim) if "frechet" in values else ""
    return {
        "model": model.name, "weights": str(model.weights.absolute()), "weights_sha256": digest,
        "fingerprint": cfg.fingerprint(model.config),
        "images": n, "sampler": drawing.describe_sampler(config), "seed": evaluation.seed,
        "batch_size": batch_size, "processes": world.size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "reference": {
            "name": images.name, "split": real_data.split, "images": len(images),
            "digest": images.digest,
        },
        "extractor": {
            "name": extractor.name, "label": extractor.label, "digest": extractor.digest,
        },
        "sampling_s": seconds, "images_per_s": n / seconds,
        "metrics": {
            name: {"name": name_of(name, extractor.label), **value._asdict()}
            for name, value in values.items()
        },
    }, note  # fmt: skip


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
