"""How a training ended, and what a workload did wrong if it did not run as one."""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from tunediff.config import ConfigError, Systems, code, flat, of
from tunediff.core import text
from tunediff.core.point import Point
from tunediff.training import checkpoints, read_tracking
from tunediff.training.engine import Engine

CHANGED = (
    "train(trial) changes weights ({}) after the last evaluation; the weights that were judged are"
    " exported, without this change"
)


@dataclasses.dataclass(frozen=True)
class TrainingOutcome:
    """A training that ended."""

    points: list[Point]
    finished: bool
    """False: asked to stop before the budget was spent, as an open-ended training always is."""
    seconds: dict[str, float]
    steps: int
    samples: int
    peak: dict[str, float]
    """Peak memory in MiB, by the names of `Point`."""
    weights: Mapping[str, torch.Tensor]
    """What is exported: the weights as the last point has judged them; complete on rank 0."""
    reason: str = ""
    """What its user should know of a training that is in order."""
    unread: tuple[str, ...] = ()
    """Knobs that a user's workload never looked at, by dotted name: they change nothing."""


class NotTrainedError(BaseException):
    """Leaves `train(trial)` where nothing is trained: what follows its loop is left out.

    No `Exception`, which workloads and frameworks may catch.
    """


def of_run(run: Engine) -> TrainingOutcome:
    """Return how a training ended. Raises `WorkloadError` if it did not run as a training does."""
    check_done(run)
    last = run.points[-1].flat if run.points else {}
    name = checkpoints.changed_weight(run)
    return TrainingOutcome(
        points=run.points,
        finished=run.complete,
        seconds=dict(run.clock.seconds),
        steps=run.pace.steps,
        samples=run.pace.samples,
        peak={name: last[name] for name in last if re.fullmatch(r"peak_\w+_mib", name)},
        weights=run.judged or {},
        reason=CHANGED.format(name) if name else "",
        unread=read_tracking.unread(run.config, run.read_knobs, run.not_followed, run.own_loader),
    )


def refusal_by_torch(error: ValueError, config: Systems) -> ConfigError | None:
    """Return the refusal of a value that a module or an optimizer of torch does not take, such as a
    negative learning rate; None for any other error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_torch = Path(frame.filename).is_relative_to(Path(torch.__file__).parent)
    if not (is_torch and frame.name == "__init__"):
        return None
    knobs = {str(value): name for name, value in flat(config).items()}
    words = re.findall(r"[-+.\w]+", str(error))
    refused = next((word for word in reversed(words) if word in knobs), None)  # its last number
    knob = f"{knobs[refused]}: {refused} is not allowed: " if refused is not None else ""
    return ConfigError(f"{knob}{code.described(error)}")


def check_begun(run: Engine) -> None:
    """Raise `WorkloadError` for what must have been called before the first batch."""
    if run.feed is not None:
        raise run.mistake(
            "train(trial) asked twice for batches; one loop lasts for the whole budget, over all"
            " epochs"
        )
    if run.model is None:
        raise run.mistake(
            "train(trial): net = trial.prepare(net) must come before the loop over its batches"
        )
    if not run.state.names:
        raise run.mistake(
            "train(trial): trial.keep(net=net, optimizer=optimizer) must come before the loop: a"
            " resumed training needs them"
        )
    if run.evaluates and run.evaluation is None:
        judge = f'trial.evaluate_with(lambda: {{"{of(run.config).objective.name}": …}})'
        raise run.mistake(
            f"train(trial): {judge} must come before the loop: nothing else judges the model"
        )


def check_done(run: Engine) -> None:
    """Raise `WorkloadError` unless the training has run to its end, or was asked to stop."""
    if run.model is None:
        raise run.mistake("train(trial) never called trial.prepare(model)")
    if run.feed is None and not run.done:
        raise run.mistake(
            "train(trial) never asked for a batch: for batch in trial.batches(data): …"
        )
    if not run.done:
        steps = text.pluralize(run.pace.steps, "step")
        raise run.mistake(
            f"train(trial) left its loop after {steps}, before its budget was spent; trial.batches"
            " ends by itself"
        )
