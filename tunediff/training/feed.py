"""Where batches come from: fetched early, moved to the device when trained, perhaps again."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tunediff.data import randomness
from tunediff.data.items import to_device
from tunediff.training.capture.graph import await_default_stream


class Feed(Protocol):
    """Batches without end."""

    def fetch(self) -> Any:
        """Return the next batch where it lies; wait until it is loaded."""
        ...

    def move(self, fetched: Any) -> Any:
        """Return a fetched batch on the device, as the training gets it."""
        ...

    @property
    def position(self) -> Position | None:
        """Return the position of the last moved batch; None: the number of batches tells."""
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
    def position(self) -> Position | None:
        """Return the position of the last batch that is no replay; first, the feed's start."""
        return self._start if self._start is not None else self._feed.position

    def close(self) -> None:
        self._feed.close()


# ---- a loader of the user's own
@dataclasses.dataclass(frozen=True)
class Position:
    """How far a training is in a loader of the user's own."""

    epoch: int = -1
    """Number of the pass, from 0; -1: none has begun."""
    batches: int = 0
    """Batches of this pass so far."""
    generators: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Generators' states when the pass began, global and the loader's: they draw its order."""
    samples: int = 0
    """Rows of the training's first item."""
    ended: bool = False
    """Whether the loop has left this pass before its last batch."""


class RepeatingLoader:
    """Any iterable, run through again and again.

    `group`: an item of the feed is a list of so many batches, fewer at the end of a pass; None: it
    is a batch. `position`: where to go on.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        device: torch.device,
        group: int | None = None,
        position: Position | None = None,
    ) -> None:
        self._loader, self._device, self._group = batches, device, group
        self._pass: Iterator[Any] = iter(())  # what is left of this pass
        self._first: tuple[list[Any], Position] | None = None  # fetched to count its rows
        self._fetched = self.position = position or Position()  # behind the last fetched, moved one
        self._samples = self.position.samples
        if position is not None and position.epoch >= 0:
            self._go_on(position)

    def _go_on(self, position: Position) -> None:
        """Begin the pass again as it was begun, and skip the batches so far."""
        if not position.generators:  # of another number of ranks: the pass begins anew
            self._fetched = dataclasses.replace(position, epoch=position.epoch - 1)
            return
        with randomness.forked():
            # Persistent loader processes draw a seed when they start, and not at the beginning of a
            # later pass. `base_dataloader`: what accelerate wraps.
            loader = getattr(self._loader, "base_dataloader", self._loader)
            if position.epoch > 0 and getattr(loader, "persistent_workers", False):
                iter(loader)
            _set_generators(self._loader, position.generators)
            set_epoch(self._loader, position.epoch)
            self._pass = iter(self._loader)
            for _ in itertools.islice(self._pass, position.batches):
                pass
        if position.ended:
            self._pass = iter(())

    @property
    def samples(self) -> int:
        """Return the rows of the first tensor of an item, as the training's first item had."""
        if not self._samples:
            self._first = self.fetch()
            for batch in self._first[0]:
                self._samples += next((len(one) for one in _tensors(batch) if one.dim()), 1)
        return self._samples

    def fetch(self) -> tuple[list[Any], Position]:
        """Return the batches of the next item, and the position behind them."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        size = self._group or 1
        group = list(itertools.islice(self._pass, size))
        if not group:  # the next pass begins
            self._fetched = Position(self._fetched.epoch + 1, 0, _generators(self._loader))
            set_epoch(self._loader, self._fetched.epoch)
            self._pass = iter(self._loader)
            group = list(itertools.islice(self._pass, size))
        if not group:
            raise RuntimeError(
                "trial.steps(loader): the loader has no batches, or cannot be run through twice"
            )
        batches = self._fetched.batches + len(group)
        self._fetched = dataclasses.replace(self._fetched, batches=batches)
        return group, self._fetched

    def move(self, fetched: tuple[list[Any], Position]) -> Any:
        group, position = fetched
        self.position = dataclasses.replace(position, samples=self._samples)
        # Torch's own pinned memory is not written to while it is copied; a user's may be
        pinned = isinstance(self._loader, DataLoader) and self._loader.pin_memory
        moved = [to_device(batch, self._device, non_blocking=pinned) for batch in group]
        await_default_stream(_tensors(moved), self._device)
        return moved[0] if self._group is None else moved

    def end_pass(self) -> None:
        """Let the next batch be the first one of a new pass."""
        self._pass = iter(())
        self._fetched = self.position = dataclasses.replace(self.position, ended=True)

    def close(self) -> None:
        """Leave the loader to the user, and end its present pass."""
        self._pass = iter(())


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader and its samplers the pass's number, from which ranks draw their order."""
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(tell := getattr(part, "set_epoch", None)):
            tell(epoch)


def _generators(loader: Any) -> dict[str, Any]:
    states = [generator.get_state() for generator in _generators_of(loader)]
    return {"torch": torch.get_rng_state(), "own": states, **randomness.library_state()}


def _set_generators(loader: Any, state: Mapping[str, Any]) -> None:
    # Fewer exist where a sampler makes its generator, and seeds it, when a pass begins.
    for generator, saved in zip(_generators_of(loader), state["own"], strict=False):
        generator.set_state(saved)
    torch.set_rng_state(state["torch"])
    randomness.set_library_state(state)


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from, each once."""
    sampler, batch_sampler = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    parts = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    generators = [getattr(part, "generator", None) for part in parts]
    unique = {id(one): one for one in generators if isinstance(one, torch.Generator)}
    return list(unique.values())


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors in tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)
