"""How a training ended: what it leaves, what its workload did wrong, the `Status` of its trial.

The workers of a search, `tunediff.train`, `tunediff.profile` and the check of a workload all use
`run_trial`, so that they agree on what an exception means. What each of them then does (write a
journal, print a line, end the process) is its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tunediff.config import code, of
from tunediff.core import disk, text
from tunediff.core.errors import CaptureFailedError
from tunediff.core.outcomes import Status
from tunediff.core.point import Point
from tunediff.core.target import TIME_TO_TARGET, Target
from tunediff.core.trial_record import End, NotFiniteError
from tunediff.distributed import World
from tunediff.training import memory, read_tracking, weights
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


def of_run(engine: Engine, finished: bool) -> TrainingOutcome:
    """Return how a training ended. Raises `WorkloadError` if it did not run as a training does."""
    check_done(engine)
    last = engine.points[-1].flat if engine.points else {}
    name = changed_weight(engine)
    return TrainingOutcome(
        points=engine.points,
        finished=finished,
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


def changed_weight(engine: Engine) -> str:
    """Return the first weight that has changed since the last point has judged it; "" if none has.

    All ranks call it; rank 0 knows. Frozen weights beside weights that learn, such as a target
    network, may change, and names may go, as those of a parametrization that is merged.
    """
    judged, result = engine.judged, engine.result
    if judged is None or result is None:
        return ""
    with engine.exported() as now:
        if not engine.world.main or weights.digest(now) == engine.judged_digest:
            return ""
        # Buffers learn with the parameters of their module. Averaged weights do not learn at all.
        learns: dict[str, bool] = {}
        for name, parameter in result.named_parameters():
            module = name.rpartition(".")[0]
            learns[module] = learns.get(module, False) or parameter.requires_grad
        for name in sorted(judged.keys() & now.keys()):
            may_change = any(learns.values()) and not learns.get(name.rpartition(".")[0], True)
            before, after = (weights.digest({"": one[name]}) for one in (judged, now))
            if before != after and not may_change:
                return name
    return ""


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


# ---- the status of a trial
LOST_PEER_SIGNS = (
    # gloo
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe",
    "no route to host",
    # NCCL: ncclGetErrorString of a lost peer, its log in torch's message, torch's watchdog
    "ncclremoteerror", "remote process exit", "connection closed by remote peer", "ncclsystemerror",
    "nccl communicator was aborted", "collective operation timeout",
)  # fmt: skip
"""Parts of the message of a collective whose peer is gone, in lower case."""


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """How `run_trial` ended."""

    end: End | None
    """None: `error` says nothing about the configuration."""
    outcome: TrainingOutcome | None = None
    """Of a training that ran to its end or was asked to stop."""
    error: Exception | None = None
    """What broke the training, or a profile after it, and may have harmed its process. It keeps the
    tensors of the training alive. None where nothing was harmed: status `ok`, `pruned`, `nan`."""


def run_trial(
    train: Callable[[], TrainingOutcome], world: World, folder: Path,
    not_of_trial: tuple[type[Exception], ...] = (), target: Target | None = None,
) -> TrialResult:  # fmt: skip
    """Call `train` and return how it ended. Raises no `Exception`; a `KeyboardInterrupt` passes.

    `folder`: of the trial; a failure of its disk has no end, and `error` is then an `OSError`.
    `not_of_trial`: classes of exceptions of the caller that say nothing about the configuration.
    `target`: what it fails without.
    """
    try:
        outcome = train()
    except NotFiniteError as error:  # raised on all ranks alike
        return TrialResult(end_of(error, world))
    except Exception as error:
        if isinstance(error, (CaptureFailedError, *not_of_trial)) or lost_a_process(
            error, world.size
        ):
            return TrialResult(None, error=error)
        if (fault := disk.fault_behind(error, folder)) is not None:
            return TrialResult(None, error=fault)
        # Here what the training held is still there to measure.
        return TrialResult(end_of(error, world), error=error)
    status, reason = Status.OK if outcome.finished else Status.PRUNED, outcome.reason
    if target is not None and outcome.finished and TIME_TO_TARGET not in outcome.points[-1]:
        status, reason = Status.MISSED, target.missed
    return TrialResult(End(status, reason, outcome.seconds, outcome.steps, outcome.peak), outcome)


def end_of(error: BaseException, world: World | None = None) -> End:
    """Return the end of a trial that raised `error`: `nan`, `oom` or `error`, and why.

    Call it where the error is handled: of a `world` it measures the memory that the training holds.
    """
    peak = memory.peak_mib(world.device) if world is not None else {}
    if isinstance(error, NotFiniteError):
        return End(Status.NAN, str(error), peak=peak)
    reason = code.described(error)
    return End(Status.OOM if memory.is_oom(error) else Status.ERROR, reason, peak=peak)


def lost_a_process(error: Exception, ranks: int) -> bool:
    """Return whether a lost rank failed a collective, or a killed process the loading."""
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        # The rank that owns the process and torch's signal handler word it differently.
        return "killed by signal" in str(error) or "exited unexpectedly" in str(error)
    if memory.is_oom(error):  # NCCL reports its own buffers with the signs of a lost peer
        return False
    return (
        ranks > 1
        and isinstance(error, RuntimeError)
        and any(sign in str(error).lower() for sign in LOST_PEER_SIGNS)
    )
