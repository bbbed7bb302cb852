"""What a run begins with, trains on and is judged by, recorded: runs are compared by it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tunediff.distributed import World
from tunediff.training import evaluation
from tunediff.training.judging import JudgeWeights
from tunediff.training.training_run import Program, TrainingRun

BATCHES = 3
"""Batches that two seeds are compared by."""
GPU_TOLERANCE = 1e-3
"""Relative difference of two evaluations of a model on a GPU: sums have no fixed order."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run began with, trained on and was judged by. Digests stand for tensors."""

    initial: list[str]
    """Of the parameters that went into `prepare`."""
    batches: list[str]
    """Of the first batches, without those that are plain numbers."""
    findings: Mapping[str, Any]
    """Of the last evaluation."""
    called: list[str]
    """Of the parameters of the trial's modules at that evaluation, in the order of their calls."""
    makes_data: bool = False
    """Whether the loop draws or collects its data itself."""


class Record(Program):
    """Train; remember the beginning, the batches, and what the model is judged by."""

    def __init__(self) -> None:
        self.record = RunRecord([], [], {}, [])
        self.judging = set[int]()
        """Ids of the modules that the last evaluation called."""

    def before_prepare(self, run: TrainingRun, model: nn.Module) -> None:
        self.record.initial.extend(digests(model))

    def batch(self, run: TrainingRun, batch: Any) -> contextlib.AbstractContextManager[object]:
        counter = isinstance(batch, int)  # the loop draws its data itself
        if counter and not self.record.makes_data:
            self.record = dataclasses.replace(self.record, makes_data=True)
        if len(self.record.batches) < BATCHES and not run.warming_up and not counter:
            self.record.batches.append(digest(batch))
        return super().batch(run, batch)

    def judge(
        self, run: TrainingRun, evaluate: Callable[[], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Judge; remember the weights at its calls: an evaluation may swap others in."""
        called, covered, self.judging = list[str](), set[int](), set[int]()
        models = [model for model in (run.model, run.result) if model is not None]
        parts = {id(module) for model in models for module in model.modules()}

        def note(module: nn.Module, inputs: Any) -> None:
            self.judging.add(id(module))
            if id(module) in parts - covered:
                covered.update(map(id, module.modules()))
                called.extend(digests(module))

        hook = register_module_forward_pre_hook(note)
        random.seed(0)  # torch's generators are seeded for every evaluation
        numpy.random.seed(0)
        try:
            findings = super().judge(run, evaluate)
        finally:
            hook.remove()
        self.record = dataclasses.replace(self.record, findings=findings, called=called)
        return findings

    def object_to(self, run: TrainingRun, message: str) -> None:
        """Raise `WorkloadError`: before a search nothing has been spent."""
        raise run.mistake(message)


class Rejudged(Record):
    """Judge what a resumed training goes on with, before its `train` changes it."""

    def __init__(self, first: RunRecord) -> None:
        super().__init__()
        self._first, self.random_keys = first, set[str]()
        """Findings that differ from one evaluation to the next of one model."""

    def after_loop(self, run: TrainingRun) -> None:
        if run.restart_reason:
            return
        evaluate = functools.partial(evaluation.evaluate, run)
        self.judge(run, evaluate)
        resumed = self.record
        if differing(self._first.findings, resumed.findings, run.world):
            self.judge(run, evaluate)
            self.random_keys = differing(resumed.findings, self.record.findings, run.world)
        self.record = resumed


class RecordedJudge(Record, JudgeWeights):
    """What `tunediff.evaluate` does with a training, remembered."""

    fresh: set[str]
    """Digests of the exported model's parameters as it was made."""
    loaded: set[str]
    """With the saved weights."""

    def __init__(self, saved: Mapping[str, Tensor]) -> None:
        Record.__init__(self)
        JudgeWeights.__init__(self, saved)

    def load(self, run: TrainingRun) -> None:
        assert run.result is not None
        self.fresh = set(digests(run.result))
        super().load(run)
        self.loaded = set(digests(run.result))


def differing(first: Mapping[str, Any], second: Mapping[str, Any], world: World) -> set[str]:
    """Return the names of unequal findings (on a GPU, not nearly equal). All ranks call it."""
    tolerance = GPU_TOLERANCE if world.device.type == "cuda" else 0.0
    keys = first.keys() | second.keys()
    unequal = {key for key in keys if not _equal(first.get(key), second.get(key), tolerance)}
    return set().union(*world.gather(unequal))


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key], tolerance) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def digest(content: Any) -> str:
    """Return a digest of the tensors in a batch, and of what else is in it as it is printed."""
    if isinstance(content, Tensor):
        local = content.to_local() if hasattr(content, "to_local") else content
        flat = local.detach().cpu().contiguous().flatten().view(torch.uint8)
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    if isinstance(content, Mapping | tuple | list):
        parts = content.values() if isinstance(content, Mapping) else content
        return repr([digest(part) for part in parts])
    return repr(content)


def digests(module: nn.Module) -> list[str]:
    return [digest(parameter) for parameter in module.parameters()]
