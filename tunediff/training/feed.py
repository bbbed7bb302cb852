"""Where batches come from: fetched early, moved to the device when trained, perhaps again."""

from __future__ import annotations

import copy
from typing import Any, Protocol


class Feed(Protocol):
    """Batches without end."""

    def fetch(self) -> Any:
        """Return the next batch where it lies; wait until it is loaded."""
        ...

    def move(self, fetched: Any) -> Any:
        """Return a fetched batch on the device, as the training gets it."""
        ...

    @property
    def position(self) -> Any:
        """Return what a checkpoint needs to go on behind the last moved batch, in plain data; None:
        the number of batches tells."""
        ...

    def close(self) -> None:
        """Stop what loads."""
        ...


class WarmupReplay:
    """A feed whose first `count` batches are fetched at once and come again: for each of the
    `warm_ups` steps that are undone, and then for the first real step."""

    def __init__(self, feed: Feed, count: int, warm_ups: int) -> None:
        self._feed, first = feed, [feed.fetch() for _ in range(count)]
        self._start = feed.position
        # Copies: the loop may write into a batch.
        self._waiting = [
            *(batch for _ in range(warm_ups) for batch in copy.deepcopy(first)),
            *first,
        ]
        self._replays = warm_ups * count

    def fetch(self) -> Any:
        return self._waiting.pop(0) if self._waiting else self._feed.fetch()

    def move(self, fetched: Any) -> Any:
        moved = self._feed.move(fetched)
        if self._replays:
            self._replays -= 1
        else:
            self._start = None
        return moved

    @property
    def position(self) -> Any:
        """Return the position of the last batch that is no replay; first, the feed's start."""
        return self._start if self._start is not None else self._feed.position

    def close(self) -> None:
        self._feed.close()
