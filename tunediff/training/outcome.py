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


def of_run(engine: Engine) -> TrainingOutcome:
    """Return how a training ended. Raises `WorkloadError` if it did not run as a training does."""
    check_done(engine)
    last = engine.points[-1].flat if engine.points else {}
    name = checkpoints.changed_weight(engine)
    return TrainingOutcome(
        points=engine.points,
        finished=engine.complete,
        seconds=dict(engine.clock.seconds),
        steps=engine.pace.steps,
        samples=engine.pace.samples,
        peak={name: last[name] for name in last if re.fullmatch(r"peak_\w+_mib", name)},
        weights=engine.judged or {},
        reason=CHANGED.format(name) if name else "",
        unread=read_tracking.unread(
            engine.config, engine.read_knobs, engine.not_followed, engine.own_loader
        ),
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


def check_begun(engine: Engine) -> None:
    """Raise `WorkloadError` for what must have been called before the first batch."""
    if engine.feed is not None:
        raise engine.mistake(
            "train(trial) asked twice for batches; one loop lasts for the whole budget, over all"
            " epochs"
        )
    if engine.model is None:
        raise engine.mistake(
            "train(trial): net = trial.prepare(net) must come before the loop over its batches"
        )
    if not engine.state.names:
        raise engine.mistake(
            "train(trial): trial.keep(net=net, optimizer=optimizer) must come before the loop: a"
            " resumed training needs them"
        )
    if engine.evaluates and engine.evaluation is None:
        judge = f'trial.evaluate_with(lambda: {{"{of(engine.config).objective.name}": …}})'
        raise engine.mistake(
            f"train(trial): {judge} must come before the loop: nothing else judges the model"
        )


def check_done(engine: Engine) -> None:
    """Raise `WorkloadError` unless the training has run to its end, or was asked to stop."""
    if engine.model is None:
        raise engine.mistake("train(trial) never called trial.prepare(model)")
    if engine.feed is None and not engine.done:
        raise engine.mistake(
            "train(trial) never asked for a batch: for batch in trial.batches(data): …"
        )
    if not engine.done:
        steps = text.pluralize(engine.pace.steps, "step")
        raise engine.mistake(
            f"train(trial) left its loop after {steps}, before its budget was spent; trial.batches"
            " ends by itself"
        )
