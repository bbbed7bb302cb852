"""Evaluate a training's model under conditions that are equal for all trials."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tunediff.config import of
from tunediff.config.code import WorkloadError
from tunediff.core import text
from tunediff.core.journal import to_json
from tunediff.core.trial_record import RESERVED, NotFiniteError
from tunediff.data import randomness
from tunediff.training import state
from tunediff.training.engine import Engine
from tunediff.training.precision import evaluation_precision

_PHASE = re.compile(r"step_\w+_s")
"""Names under which a point has the parts of its mean step."""


def evaluate(engine: Engine) -> Mapping[str, Any]:
    """Return the workload's evaluation of its model, in plain values. All ranks call it.

    Raises `WorkloadError` without the objective among it, `NotFiniteError` if it is not finite.
    """
    assert engine.evaluation is not None
    assert engine.model is not None
    models = [model for model in (engine.model, engine.result) if model is not None]
    # Buffers may differ between ranks: all judge the model that rank 0 saves.
    if engine.strategy.replicas.size > 1:
        for buffer in dict.fromkeys(buffer for model in models for buffer in model.buffers()):
            engine.world.first(buffer)
    plain = dict.fromkeys(state.plain(model) for model in models)
    with (
        _evaluation_mode(models),
        engine.strategy.callable_alone(*plain),
        torch.no_grad(),
        _fixed_conditions(engine),
    ):
        values = engine.evaluation()
    findings = plain_findings(values, "evaluate_with", engine.config.schema.title)
    _check_objective(engine, findings)
    return finite_findings(findings)


def _check_objective(engine: Engine, findings: Mapping[str, Any]) -> None:
    metric = of(engine.config).objective.name
    if metric not in findings:
        found = ", ".join(findings) or "nothing"
        raise engine.mistake(f'evaluate_with: found {found}, and not OBJECTIVE "{metric}"')
    value = findings[metric]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise engine.mistake(f'evaluate_with: "{metric}" is {value!r}; it must be one number')
    if engine.world.any(not math.isfinite(value)):
        steps = text.pluralize(engine.pace.steps, "step")
        raise NotFiniteError(f"{metric} is {value} after {steps}")


@contextlib.contextmanager
def _evaluation_mode(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put models into evaluation mode, and later their modules back into theirs."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def _fixed_conditions(engine: Engine) -> Iterator[None]:
    """Use one number format and equal random numbers inside; then restore the training's."""
    engine.evaluating = True
    devices = [engine.device] if engine.device.type == "cuda" else []
    try:
        with (
            evaluation_precision(engine.device),
            torch.random.fork_rng(devices),
            randomness.forked(),
        ):
            torch.manual_seed(0)
            randomness.seed_libraries(0)
            yield
    finally:
        engine.evaluating = False


# ---- what it returned
def plain_findings(findings: Any, hook: str, title: str) -> dict[str, Any]:
    """Return an evaluation's findings in JSON's types; NaN and infinities may remain.

    `hook`: the method that got the function. Raises `WorkloadError` for a key that is no value.
    """
    where = f"{title}: {hook}"
    if not isinstance(findings, Mapping):
        needs = "it needs a dictionary of numbers"
        raise WorkloadError(f"{where}: its function returned {findings!r}; {needs}")
    for name in findings:
        if not isinstance(name, str):
            raise WorkloadError(f"{where}: the key {name!r} is not allowed; allowed: a name")
        if name in RESERVED or _PHASE.fullmatch(name):
            raise WorkloadError(
                f'{where}: "{name}" has a meaning of its own; choose another name,'
                f' "validation_{name}"'
            )
    return {name: _plain(value, f'{where}: "{name}"') for name, value in findings.items()}


def finite_findings(findings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the numbers that are NaN or infinite."""
    return {
        name: value
        for name, value in findings.items()
        if not isinstance(value, float) or math.isfinite(value)
    }


def _plain(value: Any, where: str) -> Any:
    """Return a value in JSON's types; tensors and arrays of one number become it."""
    numel = getattr(value, "numel", None) or (lambda: getattr(value, "size", 0))
    number = value.item() if hasattr(value, "item") and numel() == 1 else value
    if isinstance(number, float) and not math.isfinite(number):
        return float(number)
    try:
        return json.loads(to_json(number))
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises the last
        shown = text.truncate(" ".join(repr(number).split()), 60)
        raise WorkloadError(
            f"{where} is {shown}; allowed: a number, a word, None, or finite ones in lists and"
            " dictionaries"
        ) from None
