"""What differs between a training's states, entry by entry."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

ALLOWED = 4.0
"""How many times as much a replay may differ from an eager step as two eager steps differ."""

ROUNDING = 1e-4
"""Difference in units of an entry's largest value that the order of sums may make. A step with
another learning rate differs by a half."""

SAME_LOSS = 0.01
"""Greatest difference of a repeated step's loss that rounding explains."""


def difference(eager: Any, again: Any, replayed: Any, before: Any = None) -> str:
    """Return in which entry a replayed state differs most from two eager ones; "" if in none.

    An entry may differ by `ALLOWED` times as much as it does in two eager runs of the same steps,
    or as entries do there in the median; where these are equal by luck, by `ROUNDING`. `before`:
    the state in which all began. What the steps move must move in replays as well, and that a
    rounding error may be is no more than a quarter of what it moves.
    """
    start = dict(_entries(before))
    entries = zip(_entries(eager), _entries(again), _entries(replayed), strict=True)
    found = [
        (name, _distance(a, b), _distance(a, c), _floor(a, start.get(name)), c)
        for (name, a), (_, b), (_, c) in entries
    ]
    for name, repeated, *_ in found:
        if name.startswith("loss.") and repeated > SAME_LOSS:
            return f"the same steps made twice differ: {name} by {repeated:.1g} of it"
    repeats = [repeated for _, repeated, *_ in found if repeated > 0.0]
    usual = statistics.median(repeats) if repeats else 0.0
    wrong = [
        (distance, name)
        for name, repeated, distance, floor, entry in found
        if distance > max(ALLOWED * max(repeated, usual), floor)
        or (distance > 0.0 and name in start and _distance(start[name], entry) == 0.0)
    ]
    if not wrong:
        return ""
    distance, name = max(wrong)
    return f"replays are not the steps: {name} differs by {distance:.1g} of its largest value"


def _floor(entry: Any, before: Any) -> float:
    """Return the difference that rounding explains, in units of an entry's largest value."""
    if not isinstance(entry, Tensor) or not entry.is_floating_point():
        return 0.0
    moved = _distance(entry, before) if isinstance(before, Tensor) else math.inf
    return min(ROUNDING, max(moved / 4, 4 * torch.finfo(entry.dtype).eps))


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
