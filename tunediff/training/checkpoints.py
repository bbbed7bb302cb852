"""Write a training's checkpoints and go on from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tunediff.config import to_dict
from tunediff.config.code import described
from tunediff.core.point import Point
from tunediff.core.trial_record import CHECKPOINT
from tunediff.training import adapters, memory, state, weights
from tunediff.training.engine import Engine


def save(engine: Engine) -> None:
    """Write all that the training has learned and measured. All ranks call it.

    Raises `OSError` where the disk is full.
    """
    if engine.folder is None:
        return
    with engine.clock.part("checkpoint"):
        engine.strategy.complete(*_result(engine))
        with engine.strategy.states_for_file():
            content = engine.state.take()
            # What is kept anyway shares its memory, and is written once.
            content["result"] = engine.judged if engine.judged is not None else _exported(engine)
        content |= {
            "config": to_dict(engine.config),
            "clock": engine.clock.state_dict(),
            "before_first_batch_s": engine.clock.before_first_batch_s,
            "pace": engine.pace.state_dict(),
            "meter": engine.meter.state_dict(),
            "positions": engine.world.gather(engine.feed.position if engine.feed else None),
            "points": [point.flat for point in engine.points],
        }
        if engine.world.main:
            state.save(content, engine.folder)
        engine.world.barrier()


# ---- the next process goes on
def find(engine: Engine) -> Mapping[str, Any] | None:
    """Return the checkpoint to go on from; None: the training begins at its first step.

    Rank 0 reads it and tells the others, so that none can go on alone. One that is of no use is set
    aside, and `engine.restart_reason` says why.
    """
    if engine.folder is None:
        return None
    reasons: list[str] = []
    content = state.load(engine.folder, reasons.append) if engine.world.main else None
    result = content.pop("result", None) if content is not None else None
    content, reasons = state.broadcast(content, engine.world), engine.world.tell(reasons)
    if content is not None and (misfit := _misfit(engine, content)):
        if engine.world.main:
            state.set_aside(engine.folder)
        content, reasons = None, [misfit]
        engine.points = []
    if engine.complete:
        engine.judged, engine.judged_digest = result, engine.points[-1].weights_digest
    engine.restart_reason = "".join(reasons)
    return content


def _misfit(engine: Engine, content: Mapping[str, Any]) -> str:
    """Return why this training cannot take a checkpoint (version, model), or "".

    Tries it with a copy and undoes that: the warm-up must not change the checkpoint's own tensors.
    """
    before = engine.state.copied()
    error: Exception | None = None
    try:
        engine.points = [Point.of(flat) for flat in content["points"]]
        expected = {"pace": engine.pace.state_dict(), "clock": engine.clock.state_dict()}
        for name, part in expected.items():
            if missing := sorted(part.keys() - content[name].keys()):
                raise KeyError(f"{name}: {missing[0]} is missing")
        engine.state.put(state.copied(content))
    except Exception as raised:
        if memory.is_oom(raised):
            raise
        error = raised
    fails = engine.world.any(error is not None)
    engine.state.put(before)
    if not fails:
        return ""
    notes = ["on another rank"]
    if error is not None:
        notes = [described(error), *getattr(error, "__notes__", ())]
    return f"{CHECKPOINT} does not fit: {' '.join(', '.join(notes).split())}"


# ---- the weights that are exported
def _result(engine: Engine) -> list[Any]:
    return [engine.result] if engine.result is not None else []


def _exported(engine: Engine) -> Mapping[str, Any]:
    """Return the weights that would be exported now; its tensors are not copied.

    All ranks call it together, after `complete` of the strategy.
    """
    return adapters.state_of(engine.result) if engine.result is not None else {}


def note_judged(engine: Engine, last: bool) -> None:
    """Note the digest of the weights as they are judged now; of the last point keep a copy as well.

    All ranks call it; rank 0 has the digest, and all weights of the copy.
    """
    engine.strategy.complete(*_result(engine))
    with engine.strategy.states_for_file():
        now = _exported(engine)
        engine.judged_digest = weights.digest(now) if engine.world.main else ""
        engine.judged = cast("dict[str, Any]", state.copied(now)) if last else None


def changed_weight(engine: Engine) -> str:
    """Return the first weight that has changed since the last point has judged it; "" if none has.

    All ranks call it; rank 0 knows. Frozen weights beside weights that learn, such as a target
    network, may change, and names may go, as those of a parametrization that is merged.
    """
    judged, result = engine.judged, engine.result
    if judged is None or result is None:
        return ""
    engine.strategy.complete(result)
    with engine.strategy.states_for_file():
        now = _exported(engine)
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
