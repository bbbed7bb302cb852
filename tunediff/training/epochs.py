"""Passes over a loader of the user's own, for loops by epochs and for frameworks that own their
loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from tunediff.distributed import World
from tunediff.training.engine import Engine
from tunediff.training.feed import Position, RepeatingLoader


class EpochLoader:
    """A loader whose iterations are passes over `loader`; between two steps the engine counts,
    judges and saves.

    The first batch comes again: for the warm-up, whose step is undone. After a resume the first
    iteration is the rest of a pass. An iteration ends early when the budget is spent; one that is
    left ends its pass, but in the warm-up. Attributes are those of `loader`.
    """

    def __init__(
        self, engine: Engine, loader: Iterable[Any], *, samples: int | None = None, group: int | None = None,
        reseed: bool = True,
    ) -> None:  # fmt: skip
        """`group`: batches of an optimizer step; `samples` of each batch and rank, None: as the
        first ones have."""
        self._engine, self._loader, self._samples, self._reseed = engine, loader, samples, reseed
        self._group, self._held = group or 1, list[list[Any]]()
        self.begun = False
        """Whether the training has begun."""
        self._steps: Iterator[list[Any]] = iter(())
        self.finished = False
        """Whether the budget is spent."""
        self.last_of_step = True
        """Whether the batch that was given out last is the last of its step."""
        self.before_step: Callable[[], object] = lambda: None
        """Called before each step's first batch is given out."""
        engine.program.on_source(engine, None, {})
        engine.own_loader = True
        if group is not None:
            engine.step.accumulation = 1  # of the engine's items, which are whole steps

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    @property
    def position(self) -> Position:
        """Return where the batch that was given out last stands."""
        return self._feed.current if self.begun else Position()

    def left_of_pass(self, length: int) -> tuple[int, int]:
        """Return how many batches the next iteration gives, of a pass of `length`, replays of the
        warm-up included; and of how many steps those are. Call it after `fill`."""
        size = len(self._held[0])
        before = self.position.batches - size
        replays = self._engine.warm_ups if self._engine.warming_up else 0
        return length - before + replays * size, replays

    def __iter__(self) -> Iterator[Any]:
        epoch = None
        while self.fill():
            if epoch is None:
                epoch = self.position.epoch
            elif self.position.epoch != epoch:
                return  # a loader without length: the next pass has begun
            self.before_step()
            group = self._held.pop()
            for number, batch in enumerate(group, 1):
                self.last_of_step = number == len(group)
                try:
                    yield batch
                except GeneratorExit:  # the loop was left, for the next pass
                    if (
                        not self._engine.warming_up
                        and self.position.epoch == epoch
                        and not self._complete
                    ):
                        self._feed.end_pass()
                    raise
            if self._complete:
                return

    def passes(self) -> Iterator[tuple[int, EpochLoader]]:
        """Yield the number of each pass and this loader, until the budget is spent.

        Raises `WorkloadError` where the loop has taken no batch of a pass: it would begin the same
        pass for ever.
        """
        while self.fill():
            step = self._held[0]
            yield self.position.epoch, self
            if self._held and self._held[0] is step:
                raise self._engine.mistake(
                    "train(trial): a pass of epochs(loader) was not iterated: for epoch, batches in"
                    " epochs(loader) needs a loop over batches, not over loader"
                )

    @property
    def _complete(self) -> bool:
        """Return whether the pass has no more batches; False where their number is not known."""
        try:
            return self.position.batches >= len(self)
        except TypeError:
            return False

    def fill(self) -> bool:
        """Have the next step's batches ready, and account for those before. Returns whether there
        is a step."""
        if not self.begun:
            self.begun, self._steps = True, self._engine.batches(self._build, reseed=self._reseed)
        if not self._held and not self.finished:
            group = next(self._steps, None)
            self._held, self.finished = ([], True) if group is None else ([group], False)
        return not self.finished

    def _build(self, start: int, position: Position | None) -> RepeatingLoader:
        engine = self._engine
        feed = self._feed = RepeatingLoader(self._loader, engine.device, self._group, position)
        samples = self._samples * self._group if self._samples is not None else feed.samples
        parts = engine.strategy.replicas.size * engine.step.accumulation
        engine.samples_per_step = int(engine.world.agree(samples)) * parts
        return feed


def divided(loader: Any, world: World, seed: int) -> Any:
    """Return a DataLoader whose ranks have parts of the data; itself where a sampler of the user's
    own decides."""
    plain = type(loader) is DataLoader and type(loader.batch_sampler) is BatchSampler
    if (
        world.size == 1
        or not plain
        or type(loader.sampler) not in (RandomSampler, SequentialSampler)
    ):
        return loader
    if len(loader.sampler) != len(loader.dataset):
        return loader
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler = DistributedSampler[Any](loader.dataset, world.size, world.rank, shuffle, seed)
    names = [
        "dataset", "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
        "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
    ]  # fmt: skip
    return type(loader)(**{name: getattr(loader, name) for name in names}, sampler=sampler)
