"""Judge a saved model by the evaluation of its training, as it is or averaged with each of several half-lives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli
from tunediff import config as cfg
from tunediff.core import remote, text
from tunediff.core.files import write_numbered
from tunediff.core.progress import EventLines
from tunediff.models import Saved

if TYPE_CHECKING:
    from tunediff.distributed import World


def evaluate_as_trained(model: Saved, path: Path, as_json: bool) -> int:
    """Judge a model by its workload's own evaluation, as its training did; returns the exit code."""
    cli.allow(path.suffix == ".json", "--out", path, "a name that ends in .json")
    cli.check_writable("--out", path)

    from tunediff.distributed import from_environment
    from tunediff.training.judging import judged

    with from_environment() as world, EventLines().work(world.main):
        config = _divided(model.config, world)
        values = judged(config, model.state(), world)
        if world.main:
            about = {"model": model.name, "weights": str(model.weights.absolute())}
            with cli.writing("--out", path):
                path = write_numbered(path, json.dumps({**about, **values}, indent=2))
            remote.push_or_warn(path)
            numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
            metrics = {name: {"name": name, "value": value} for name, value in numbers.items()}
            typed = {**about, "metrics": metrics, "json": path.absolute()}
            cli.result({**about, **values, "json": path}, as_json, typed)
    return cli.OK


def _divided(config: Any, world: World) -> Any:
    """Return the configuration for the processes of this evaluation, each with the whole model and some of the images.

    However it was trained: with `dp` each process would need all the GPUs.
    """
    return cfg.override(config, {"parallel.workers": world.size, "parallel.strategy": "ddp"}, check=False)


def evaluate_curve(model: Saved, half_lives: Sequence[float], out: Path | None, as_json: bool) -> int:
    """Judge every average by the evaluation of the training, print the numbers and write them; return the exit code.

    `out`: a `.json` file or a folder; None: the model's folder.
    """
    # ---- refuse all that is refused before torch
    averaged = [model.averaged(half_life) for half_life in half_lives]
    path = out if out is not None and out.suffix else (out or model.folder) / "averages.json"
    cli.allow(path.suffix == ".json", "--out", path, "a name that ends in .json, or a folder")
    cli.check_writable("--out", path)

    from tunediff.distributed import from_environment
    from tunediff.training.judging import judged
    from tunediff.training.power_average import relative_std

    metric, rows = cfg.of(model.config).objective, []
    with from_environment() as world, EventLines().work(world.main):
        config = _divided(model.config, world)
        for one, half_life in zip(averaged, half_lives, strict=True):
            value = judged(config, one.state(), world)[metric.name]
            rows.append({"half_life": half_life, "relative_std": relative_std(half_life), metric.name: value})
        if not world.main:
            return cli.OK
        result = {"model": model.name, "weights": str(model.weights.absolute()), "curve": rows}
        with cli.writing("--out", path):
            path = write_numbered(path, json.dumps(result, indent=2))
        remote.push_or_warn(path)
        if as_json:
            cli.print_json(result | {"json": path.absolute()})
            return cli.OK
        table = [["ema.half_life", "σ_rel", metric.label]]
        table += [[f"{row['half_life']:g}", f"{row['relative_std']:.3f}", f"{row[metric.name]:.4g}"] for row in rows]
        print("\n".join([*text.table(table), f"json: {path}"]))
    return cli.OK
