"""Where a training's batches come from: what is fetched is moved to the device later, and may be
moved again."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from tunediff.data import randomness
from tunediff.data.items import to_device


class Feed(Protocol):
    """Batches without end."""

    def fetch(self) -> Any:
        """Return the next batch where it lies; wait until it is loaded."""
        ...

    def move(self, fetched: Any) -> Any:
        """Return a fetched batch on the device, as the training gets it; may be called again for
        the same batch."""
        ...

    @property
    def position(self) -> Position | None:
        """Return where the last batch that was moved stands; None where the number of batches says
        it all."""
        ...

    def close(self) -> None:
        """Stop what loads."""
        ...


@dataclasses.dataclass(frozen=True)
class Position:
    """How far a loader of the user's own is."""

    epoch: int = -1
    """Passes over the loader that were begun, less one."""
    batches: int = 0
    """Batches of this pass that were trained on."""
    generators: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """States of the generators when the pass was begun, global ones and the loader's: its order is
    drawn from them."""
    samples: int = 0
    """Rows of an item of the feed, as the training's first one had."""
    ended: bool = False
    """Whether the loop has left this pass before its last batch."""


class RepeatingLoader:
    """Any iterable, run through again and again; goes on behind `position`. Raises RuntimeError
    when it is empty.

    `group`: an item of the feed is a list of so many batches, fewer at the end of a pass; None: it
    is a batch.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        device: torch.device,
        group: int | None = None,
        position: Position | None = None,
    ) -> None:
        self._batches, self._device, self._group = batches, device, group
        self._now: Iterator[Any] = iter(())
        self._ahead: list[Any] = []
        self.position = self.current = self._fetched = position or Position()
        """`current`: behind the last batch that was moved, those of a warm-up included."""
        self._samples = self.position.samples
        if position is not None and position.epoch >= 0:
            self._go_on(position)

    def _go_on(self, position: Position) -> None:
        """Begin the pass again as it was begun, and skip what was trained on."""
        if not position.generators:  # of another number of ranks
            self._fetched = dataclasses.replace(position, epoch=position.epoch - 1)
            return
        with randomness.forked():
            # Persistent loader processes draw a seed when they start, and not at the beginning of a
            # later pass.
            loader = getattr(
                self._batches, "base_dataloader", self._batches
            )  # which accelerate wraps
            if position.epoch > 0 and getattr(loader, "persistent_workers", False):
                iter(loader)
            _set_generators(self._batches, position.generators)
            set_epoch(self._batches, position.epoch)
            self._now = iter(self._batches)
            for _ in itertools.islice(self._now, position.batches):
                pass
        if position.ended:
            self._now = iter(())

    @property
    def samples(self) -> int:
        """Return the number of rows of the first tensor of an item, as the training's first item
        had."""
        if not self._samples:
            self._ahead = [self.fetch()]
            group, _ = self._ahead[0]
            self._samples = sum(
                next((len(one) for one in _tensors(batch) if one.dim()), 1) for batch in group
            )
        return self._samples

    def fetch(self) -> tuple[list[Any], Position]:
        """Return the next batches and the position behind them."""
        if self._ahead:
            return self._ahead.pop()  # type: ignore[no-any-return]
        for _ in range(2):
            if group := list(itertools.islice(self._now, self._group or 1)):
                position = self._fetched
                self._fetched = dataclasses.replace(position, batches=position.batches + len(group))
                return group, self._fetched
            self._fetched = Position(self._fetched.epoch + 1, 0, _generators(self._batches))
            set_epoch(self._batches, self._fetched.epoch)
            self._now = iter(self._batches)
        raise RuntimeError(
            "trial.steps(loader): the loader has no batches, or cannot be run through twice"
        )

    def move(self, fetched: tuple[list[Any], Position]) -> Any:
        group, self.current = fetched
        self.position = dataclasses.replace(self.current, samples=self._samples)
        moved = [to_device(batch, self._device) for batch in group]
        return moved[0] if self._group is None else moved

    def end_pass(self) -> None:
        """Let the next batch be the first one of a new pass."""
        self._now = iter(())
        self.current = self._fetched = dataclasses.replace(self.current, ended=True)
        self.position = dataclasses.replace(self.position, ended=True)

    def close(self) -> None:
        """The loader is the user's."""


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader and its samplers the number of the pass, from which samplers of several ranks
    draw their order."""
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(tell := getattr(part, "set_epoch", None)):
            tell(epoch)


def _generators(loader: Any) -> dict[str, Any]:
    own = [generator.get_state() for generator in _own_generators(loader)]
    return {"torch": torch.get_rng_state(), "own": own, **randomness.library_state()}


def _set_generators(loader: Any, state: Mapping[str, Any]) -> None:
    # Fewer are there where a sampler makes its generator, and seeds it, when a pass begins.
    for generator, saved in zip(_own_generators(loader), state["own"], strict=False):
        generator.set_state(saved)
    torch.set_rng_state(state["torch"])
    randomness.set_library_state(state)


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found = {
        id(generator): generator
        for part in parts
        if (generator := getattr(part, "generator", None)) is not None
    }
    return [generator for generator in found.values() if isinstance(generator, torch.Generator)]


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors in tuples, lists and dictionaries."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


class WarmupReplay:
    """A feed whose first batches are there already, and come again: for each step of the warm-up,
    and for the first."""

    def __init__(self, feed: Feed, count: int, warm_ups: int) -> None:
        self._feed, first = feed, [feed.fetch() for _ in range(count)]
        self._start = feed.position
        # Copies: whoever trains may write into a batch.
        self._ahead = [*(batch for _ in range(warm_ups) for batch in copy.deepcopy(first)), *first]
        self._replays = warm_ups * count

    def fetch(self) -> Any:
        return self._ahead.pop(0) if self._ahead else self._feed.fetch()

    def move(self, fetched: Any) -> Any:
        moved = self._feed.move(fetched)
        if self._replays:
            self._replays -= 1
        else:
            self._start = None
        return moved

    @property
    def position(self) -> Position | None:
        """Return where the last batch stands that was no replay; where the feed began before
        that."""
        return self._start if self._start is not None else self._feed.position

    def close(self) -> None:
        self._feed.close()
