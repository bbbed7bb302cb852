"""Write a training's checkpoints and go on from them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from typing import Any, cast

from tunediff.config import to_dict
from tunediff.config.code import described
from tunediff.core.point import Point
from tunediff.core.trial_record import CHECKPOINT
from tunediff.training import memory, state, weights
from tunediff.training.feed import Position
from tunediff.training.session import Session


def save(session: Session, pending: Point | None = None) -> None:
    """Write everything that the training has learned and measured. All ranks call it; rank 0
    writes.

    `pending`: a point whose evaluation was interrupted. Raises `OSError` where the disk is full.
    """
    session.program.before_save(session)
    if session.folder is None:
        return
    with session.clock.part("checkpoint"):
        session.strategy.complete(*([session.result] if session.result is not None else []))
        with session.strategy.states_for_file():
            content = learned(session)
            # What is kept anyway shares its memory.
            content["result"] = session.judged if session.judged is not None else exported(session)
        content |= {
            "config": to_dict(session.config),
            "clock": session.clock.state_dict(),
            "before_first_batch_s": session.clock.before_first_batch_s,
            "pace": session.pace.state_dict(),
            "meter": session.meter.state_dict(),
            "position": session.world.gather(_position(session)),
            "points": [point.flat for point in session.points],
            "pending": pending.flat if pending is not None else None,
        }
        if session.world.main:
            state.save(content, session.folder)
        session.world.barrier()


MOST_FILES = 16
"""Points at which files are written, at most; they are evenly spaced, and the last one is among
them."""


def write_files(session: Session, index: int) -> None:
    """Write what the workload has given to `write_at_points`. All ranks call it; rank 0 writes.

    An open-ended training writes what comes after its budget in place of its last point.
    """
    total = session.config.evaluation.points
    if session.folder is None or (
        index < total and (total - index) % math.ceil(total / MOST_FILES)
    ):
        return
    with session.clock.part("checkpoint"):
        for name, tensors in session.files_of_points.items():
            content = tensors()
            if session.world.main:
                path = session.folder / name / f"{min(index, total):04}.safetensors"
                path.parent.mkdir(parents=True, exist_ok=True)
                weights.save(content, path, {"progress": repr(session.pace.schedule)})


def remove_files(session: Session) -> None:
    """Remove what an earlier training in this folder has written by `write_files`. Rank 0 calls
    it."""
    if session.folder is not None:
        for name in session.files_of_points:
            shutil.rmtree(session.folder / name, ignore_errors=True)


def _position(session: Session) -> dict[str, Any] | None:
    """Return how far this rank's loader is, if it is one of the user's own."""
    position = session.feed.position if session.feed is not None else None
    return dict(vars(position)) if position is not None else None


def position_in(session: Session, content: Mapping[str, Any] | None) -> Position | None:
    """Return where this rank's loader goes on; after a change of ranks, at the beginning of the
    pass."""
    positions = (content or {}).get("position") or [None]
    if positions[0] is None:
        return None
    if len(positions) != session.world.size:
        return Position(positions[0]["epoch"])
    return Position(**positions[session.world.rank])


def exported(session: Session) -> Mapping[str, Any]:
    """Return the weights that would be exported now; its tensors are not copied.

    All ranks call it together, after `complete` of the strategy.
    """
    return session.result.state_dict() if session.result is not None else {}


def note_judged(session: Session, last: bool) -> None:
    """Note the digest of the weights as they are judged now; of the last point keep a copy as well.

    All ranks call it; rank 0 has the digest, and all weights of the copy.
    """
    session.strategy.complete(*([session.result] if session.result is not None else []))
    with session.strategy.states_for_file():
        now = exported(session)
        session.judged_digest = weights.digest(now) if session.world.main else ""
        session.judged = cast("dict[str, Any]", state.copied(now)) if last else None


def changed_weight(session: Session) -> str:
    """Return the first weight that has changed since the last point has judged it; "" if none has.

    What does not learn beside weights that do, such as a target network, may change, and names may
    go, as those of a parametrization that is merged. All ranks call it; rank 0 knows.
    """
    judged, result = session.judged, session.result
    if judged is None or result is None:
        return ""
    session.strategy.complete(result)
    with session.strategy.states_for_file():
        now = exported(session)
    if not session.world.main or weights.digest(now) == session.judged_digest:
        return ""
    # Buffers learn with the parameters of their module. Averaged weights do not learn at all.
    learning = {
        name.rpartition(".")[0] for name, one in result.named_parameters() if one.requires_grad
    }
    frozen = (
        {name.rpartition(".")[0] for name, _ in result.named_parameters()} - learning
        if learning
        else set()
    )
    for name in sorted(judged.keys() & now.keys()):
        before, after = ({"": state[name]} for state in (judged, now))
        if name.rpartition(".")[0] not in frozen and weights.digest(before) != weights.digest(
            after
        ):
            return name
    return ""


def learned(session: Session) -> dict[str, Any]:
    """Return what the training has learned so far; its tensors are not copied."""
    return session.state.take() | {"scaler": session.amp.scaler.state_dict()}


def copied(session: Session) -> dict[str, Any]:
    """Return a copy of what the training has learned so far, in host memory, for `put` on the same
    ranks."""
    with session.strategy.states_as_shares():
        return cast("dict[str, Any]", state.copied(learned(session)))


def put(session: Session, content: Mapping[str, Any]) -> None:
    """Put back what the training had learned when `content` was taken."""
    session.state.put(content)
    session.amp.scaler.load_state_dict(content["scaler"])


def find(session: Session) -> Mapping[str, Any] | None:
    """Return the checkpoint to go on from; None: the training begins at its first step.

    Rank 0 reads it and tells the others, so that none can go on alone. One that is of no use is set
    aside, and `session.restart_reason` says why.
    """
    if session.folder is None:
        return None
    reasons: list[str] = []
    result: Any = None
    content: dict[str, Any] | None = (
        state.load(session.folder, reasons.append) if session.world.main else None
    )
    if content is not None:
        result = content.pop("result", None)
    content, reasons = state.broadcast(content, session.world), session.world.tell(reasons)
    if content is not None and (misfit := _misfit(session, content)):
        if session.world.main:
            state.set_aside(session.folder)
        content, reasons = None, [misfit]
        session.points, session.pending = [], None
    if len(session.points) >= session.config.evaluation.points and not session.budget.open_ended:
        session.judged, session.judged_digest = result, session.points[-1].weights_digest
    session.restart_reason = "".join(reasons)
    return content


def _misfit(session: Session, content: Mapping[str, Any]) -> str:
    """Return why this training cannot take up a checkpoint, of another version or model; "" where
    it can.

    Takes up a copy of it, and goes back to how it was: the warm-up must not change the checkpoint's
    own tensors.
    """
    before = copied(session)
    error: Exception | None = None
    try:
        session.points = [Point.of(flat) for flat in content["points"]]
        session.pending = Point.of(content["pending"]) if content["pending"] is not None else None
        for part, expected in {
            "pace": session.pace.state_dict(),
            "clock": session.clock.state_dict(),
        }.items():
            if missing := sorted(expected.keys() - content[part].keys()):
                raise KeyError(f"{part}: {missing[0]} is missing")
        put(session, state.copied(content))
    except Exception as raised:
        if memory.is_oom(raised):
            raise
        error = raised
    fails = session.world.any(error is not None)
    put(session, before)
    if not fails:
        return ""
    notes = (
        [described(error), *getattr(error, "__notes__", ())]
        if error is not None
        else ["on another rank"]
    )
    return f"{CHECKPOINT} does not fit: {' '.join(', '.join(notes).split())}"
