"""Judge a saved model by the evaluation of its training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli
from tunediff import config as cfg
from tunediff.core import remote
from tunediff.core.files import write_numbered
from tunediff.core.progress import EventLines
from tunediff.models import Saved

if TYPE_CHECKING:
    from tunediff.distributed import World


def evaluate_as_trained(model: Saved, path: Path, as_json: bool) -> int:
    """Judge a model by its workload's own evaluation, as its training did; returns the exit
    code."""
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
            numbers = {
                name: value for name, value in values.items() if isinstance(value, int | float)
            }
            metrics = {name: {"name": name, "value": value} for name, value in numbers.items()}
            typed = {**about, "metrics": metrics, "json": path.absolute()}
            cli.result({**about, **values, "json": path}, as_json, typed)
    return cli.OK


def _divided(config: Any, world: World) -> Any:
    """Return the configuration for the processes of this evaluation, each with the whole model and
    some of the images.

    However it was trained: with `dp` each process would need all the GPUs.
    """
    return cfg.override(
        config, {"parallel.workers": world.size, "parallel.strategy": "ddp"}, check=False
    )
