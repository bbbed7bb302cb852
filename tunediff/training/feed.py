"""Where a training's batches come from: what is fetched is moved to the device later, and may be moved again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from tunediff.data.loader import to_device


class Feed(Protocol):
    """Batches without end."""

    def fetch(self) -> Any:
        """The next batch where it lies; waits for whoever loads it."""
        ...

    def move(self, fetched: Any) -> Any:
        """A fetched batch on the device, as the training gets it; may be asked for again."""
        ...

    def close(self) -> None:
        """Stop what loads."""
        ...


class Endless:
    """Any iterable, run through again and again. Raises RuntimeError when it is empty."""

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._now: Iterator[Any] = iter(())

    def fetch(self) -> Any:
        for _ in range(2):
            for batch in self._now:
                return batch
            self._now = iter(self._batches)
        raise RuntimeError("trial.steps(loader): the loader has no batches, or cannot be run through twice")

    def move(self, fetched: Any) -> Any:
        return to_device(fetched, self._device)

    def close(self) -> None:
        pass


class Primed:
    """A feed whose first batches are there already, and come twice: for the warm-up, and for the first step."""

    def __init__(self, feed: Feed, count: int) -> None:
        self._feed, first = feed, [feed.fetch() for _ in range(count)]
        self._ahead = [*copy.deepcopy(first), *first]  # whoever trains may write into a batch

    def fetch(self) -> Any:
        return self._ahead.pop(0) if self._ahead else self._feed.fetch()

    def move(self, fetched: Any) -> Any:
        return self._feed.move(fetched)

    def close(self) -> None:
        self._feed.close()
