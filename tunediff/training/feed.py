"""Where a training's batches come from: what is fetched is moved to the device later, and may be moved again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from tunediff.data.gate import Gate, gated
from tunediff.data.loader import to_device


class Feed(Protocol):
    """Batches without end."""

    def fetch(self) -> Any:
        """Return the next batch where it lies; wait until it is loaded."""
        ...

    def move(self, fetched: Any) -> Any:
        """Return a fetched batch on the device, as the training gets it; may be called again for the same batch."""
        ...

    gate: Gate | None
    """What loader processes wait at while the clock stands still; None without any."""

    def close(self) -> None:
        """Stop what loads."""
        ...


class RepeatingLoader:
    """Any iterable, run through again and again. Raises RuntimeError when it is empty."""

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self._batches, self.gate = gated(batches)
        self._device = device
        self._now: Iterator[Any] = iter(())
        self._ahead: list[Any] = []

    @functools.cached_property
    def samples(self) -> int:
        """Return the number of rows of the first tensor of the first batch."""
        self._ahead = [self.fetch()]
        return next((len(tensor) for tensor in _tensors(self._ahead[0]) if tensor.dim()), 1)

    def fetch(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        for _ in range(2):
            for batch in self._now:
                return batch
            self._now = iter(self._batches)
        raise RuntimeError("trial.steps(loader): the loader has no batches, or cannot be run through twice")

    def move(self, fetched: Any) -> Any:
        return to_device(fetched, self._device)

    def close(self) -> None:
        if self.gate is not None:
            self.gate.open()  # a process that waits there would not hear that it shall end


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors in tuples, lists and dictionaries."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


class WarmupReplay:
    """A feed whose first batches are there already, and come again: for each step of the warm-up, and for the first."""

    def __init__(self, feed: Feed, count: int, warm_ups: int) -> None:
        self._feed, first = feed, [feed.fetch() for _ in range(count)]
        self.gate = feed.gate
        # Copies: whoever trains may write into a batch.
        self._ahead = [*(batch for _ in range(warm_ups) for batch in copy.deepcopy(first)), *first]

    def fetch(self) -> Any:
        return self._ahead.pop(0) if self._ahead else self._feed.fetch()

    def move(self, fetched: Any) -> Any:
        return self._feed.move(fetched)

    def close(self) -> None:
        self._feed.close()
