"""Run one training and map how it ended, exceptions included, to a `Status`.

The workers of a search, `tunediff.train`, `tunediff.profile` and the check of a workload all use
it, so that they agree on what an exception means. What each of them then does (write a journal,
print a line, end the process) is its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from tunediff.config import code
from tunediff.core import disk
from tunediff.core.errors import CaptureFailedError
from tunediff.core.outcomes import Status
from tunediff.core.target import TIME_TO_TARGET, Target
from tunediff.core.trial_record import End, NotFiniteError
from tunediff.distributed import World
from tunediff.training import memory
from tunediff.training.outcome import TrainingOutcome

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
