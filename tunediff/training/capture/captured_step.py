"""A captured step with its batches, and what is called before and after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from tunediff.data.loader_processes import LoaderProcesses
from tunediff.training.capture.graph import StepGraph
from tunediff.training.step import OptimizerStep

Call = Callable[..., object]


class StepLoop(Protocol):
    """What the capture calls of the engine's loop."""

    step: OptimizerStep
    loader_processes: LoaderProcesses
    batches_left_out: int

    def fetch_batches(self) -> list[Any]: ...
    def passes(self, batches: list[Any] | None = None) -> Iterator[Any]: ...
    def count_step(self) -> None: ...
    def count_replay(self, loss: Tensor, learning_rate: float) -> None: ...


@dataclasses.dataclass
class CapturedStep:
    """A captured step, and what belongs to it on the host."""

    graph: StepGraph
    batches: list[Any]
    """Those of its passes; a replay reads them where they lie."""
    loss: Tensor
    """Where each replay leaves its loss."""
    before: list[Call]
    """Called before each replay."""
    after: list[tuple[Call, tuple[Tensor, ...]]]
    """Called after each replay, with copies of the tensors."""


def cloned(leaf: Any) -> Any:
    """Return a copy of a tensor, and all else as it is."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def repeated(leaf: Any, times: int) -> Any:
    """Return a batch of as many items, the first ones so many times: its mean loss is another one,
    which reveals steps that ignore their batch."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return cloned(leaf)
    return leaf.repeat_interleave(times, 0)[: len(leaf)]


def alike(batches: list[Any], others: list[Any]) -> bool:
    """Return whether batches differ in the values of their tensors alone."""
    old, new = tree_flatten(batches), tree_flatten(others)
    return old[1] == new[1] and all(map(_is_alike, old[0], new[0]))


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype)
    return type(one) is type(other) and bool(one == other)


def fill(batches: list[Any], content: list[Any]) -> None:
    """Copy the content into the tensors of batches, which stay where they are."""
    for static, new in zip(tree_leaves(batches), tree_leaves(content), strict=True):
        if isinstance(static, Tensor):
            static.copy_(new)
