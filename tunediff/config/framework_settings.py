"""Find a file's literal settings of Lightning, Trainer and trl: its baseline's knobs."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from tunediff.config.knobs import Values

CLASSES = ("TrainingArguments", "SFTConfig", "DPOConfig", "RewardConfig", "GRPOConfig", "KTOConfig")
"""Classes of settings, and those that a user derives from the first."""
CALLS = ("fit", "Trainer")
KNOBS = {
    "per_device_train_batch_size": "loader.batch_size",
    "gradient_accumulation_steps": "loader.accumulation",
    "accumulate_grad_batches": "loader.accumulation",
    "dataloader_num_workers": "loader.workers",
    "bf16": "precision.amp",
    "fp16": "precision.amp",
    "precision": "precision.amp",
    "seed": "seed",
}
"""Settings that are a knob's value in the baseline; a batch size per device is a part of it."""
_PRECISIONS = {"bf16-mixed": "bf16", "bf16": "bf16", "16-mixed": "fp16", "32-true": "none"}


def settings_in(source: bytes) -> Values:
    """Return the settings that calls in a file give as literals, by name.

    Empty without our integrations; a setting that two calls give differently is left out.
    """
    if b"tunediff.integrations" not in source:
        return {}
    found, several = dict[str, Any](), set[str]()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name not in CALLS and not name.endswith(CLASSES):
            continue
        for word in node.keywords:
            if word.arg in KNOBS and isinstance(word.value, ast.Constant):
                value = word.value.value
                several |= {word.arg} if found.get(word.arg, value) != value else set()
                found[word.arg] = value
    return {name: value for name, value in found.items() if name not in several}


def baseline_of(settings: Mapping[str, Any], workers: int = 1) -> Values:
    """Return the knobs that settings of a framework mean; `workers`: processes of the baseline."""
    knobs: Values = {}
    for name, value in settings.items():
        if name in ("bf16", "fp16"):
            knobs |= {KNOBS[name]: name} if value is True else {}
        elif name == "precision":
            knobs |= {KNOBS[name]: _PRECISIONS[value]} if value in _PRECISIONS else {}
        elif type(value) is int:
            knobs[KNOBS[name]] = value
    if "loader.batch_size" in knobs:
        knobs["loader.batch_size"] *= knobs.get("loader.accumulation", 1) * workers
    return knobs
