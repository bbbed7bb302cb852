"""What differs between a training's states, entry by entry."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

ALLOWED = 4.0
"""How many times as much a replay may differ from an eager step as two eager steps differ."""

SAME_LOSS = 0.01
"""Greatest difference of a repeated step's loss that rounding explains."""


def difference(eager: Any, again: Any, replayed: Any) -> str:
    """Return in which entry a replayed state differs most from two eager ones; "" if in none.

    Where two eager runs of the same steps are equal, as with deterministic kernels, so must the
    replays be. Elsewhere an entry may differ by `ALLOWED` times as much as it does in two eager
    runs, or as entries do there in the median.
    """
    entries = zip(_entries(eager), _entries(again), _entries(replayed), strict=True)
    found = [(name, _distance(a, b), _distance(a, c)) for (name, a), (_, b), (_, c) in entries]
    for name, repeated, _ in found:
        if name.startswith("loss.") and repeated > SAME_LOSS:
            return f"the same steps made twice differ: {name} by {repeated:.1g} of it"
    repeats = [repeated for _, repeated, _ in found if repeated > 0.0]
    usual = statistics.median(repeats) if repeats else 0.0
    wrong = [
        (distance, name)
        for name, repeated, distance in found
        if distance > ALLOWED * max(repeated, usual)
    ]
    if not wrong:
        return ""
    distance, name = max(wrong)
    return f"replays are not the steps: {name} differs by {distance:.1g} of its largest value"


def _entries(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested state, with their places."""
    if isinstance(state, Mapping):
        pairs: Any = state.items()
    elif isinstance(state, list | tuple):
        pairs = enumerate(state)
    else:
        yield name, state
        return
    for key, value in pairs:
        yield from _entries(value, f"{name}.{key}".strip("."))


def _distance(a: Any, b: Any) -> float:
    """Return the largest difference of two entries, in units of the first one's largest value."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return 0.0 if a is b or repr(a) == repr(b) else float("inf")
    if a.shape != b.shape:
        return float("inf")
    if torch.equal(a, b) or not a.numel():
        return 0.0
    a, b = (one if one.dtype == torch.float64 else one.float() for one in (a, b))
    gap = (a - b).abs()
    if not (gap.isfinite() | (a.isnan() & b.isnan())).all():
        return float("inf")
    return float(gap.nan_to_num(0.0).max() / a.nan_to_num(0.0).abs().max().clamp(min=1e-30))
