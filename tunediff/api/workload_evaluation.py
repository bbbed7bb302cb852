"""Judge a saved model by the evaluation of its workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.core import remote
from tunediff.core.files import write_numbered
from tunediff.core.progress import EventLines
from tunediff.core.refusals import allow, check_writable, writing
from tunediff.models import Saved


def evaluate_as_trained(model: Saved, path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Judge a model by its workload's evaluation, as its training did, and write the result.

    Returns what is printed as text and as JSON; None on other ranks than the first.
    """
    allow(path.suffix == ".json", "--out", path, "a name that ends in .json")
    check_writable("--out", path)

    from tunediff.distributed import from_environment
    from tunediff.training.judging import judged

    with from_environment() as world, EventLines().work(world.main):
        # Every process has the whole model and a part of the data, however it was trained.
        spread = {"parallel.workers": world.size, "parallel.strategy": "ddp"}
        values = judged(cfg.override(model.config, spread, check=False), model.state(), world)
        if world.main:
            about = {"model": model.name, "weights": str(model.weights.absolute())}
            with writing("--out", path):
                path = write_numbered(path, json.dumps({**about, **values}, indent=2))
            remote.push_or_warn(path)
            metrics = {
                name: {"name": name, "value": value}
                for name, value in values.items()
                if isinstance(value, int | float)
            }
            typed = {**about, "metrics": metrics, "json": path.absolute()}
            return {**about, **values, "json": path}, typed
    return None
