"""Passes over a loader of the user's own, for loops by epochs and frameworks."""

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
from tunediff.training import loop
from tunediff.training.engine import Engine
from tunediff.training.feed import Position, RepeatingLoader


class EpochLoader:
    """A loader whose iterations are passes over `loader`, under the engine's clock.

    The engine's loop is a generator of steps, each a list of batches. It is resumed by `fill`
    whenever the batches of the next step are needed: then it counts the step before, and where it
    is time evaluates, saves and reports. So an iteration

    - gives the batches of the first step again, for the warm-up that is undone;
    - begins within a pass after a resume;
    - ends early when the budget is spent;
    - ends its pass when the loop leaves it, but during the warm-up.

    Attributes are those of `loader`.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Iterable[Any],
        *,
        samples: int | None,
        group: int | None,
        reseed: bool,
    ) -> None:
        """`group`: batches of a step that a framework accumulates by itself; `samples` of each
        batch and rank, None: as the first ones have; `reseed`: see `Engine.batches`."""
        self._engine, self._loader, self._samples = engine, loader, samples
        self._group, self._reseed = group or 1, reseed
        self._feed: RepeatingLoader | None = None
        self._steps: Iterator[list[Any]] | None = None
        self._next: list[Any] | None = None
        """Batches of the next step, of which none was given out."""
        self._resumed_epoch: int | None = None
        self.finished = False
        """Whether the budget is spent."""
        self.last_of_step = True
        """Whether the batch that was given out last is the last of its step."""
        self.before_step: Callable[[], object] = lambda: None
        """Called before the first batch of each step is given out."""
        self.after_step: Callable[[], object] = lambda: None
        """Called when all batches of a step were given out and the next one is asked for."""
        engine.own_loader = True
        engine.capture.refuse("a loop by epochs and a framework hand out batches by themselves")
        if group is not None:
            engine.step.accumulation = 1  # the engine's items are complete steps

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    @property
    def position(self) -> Position:
        """Return the position behind the step that was fetched last."""
        return self._feed.position if self._feed is not None else Position()

    def fill(self) -> bool:
        """Fetch the next step's batches, account for the last; return whether there is a step."""
        if self._steps is None:
            self._steps = loop.batches(self._engine, self._build, reseed=self._reseed)
        if self._next is None and not self.finished:
            self.after_step()
            self._next = next(self._steps, None)
            self.finished = self._next is None
        return not self.finished

    def _build(self, start: int, position: Position | None) -> RepeatingLoader:
        engine = self._engine
        feed = self._feed = RepeatingLoader(self._loader, engine.device, self._group, position)
        if (
            position is not None
            and position.batches
            and not position.ended
            and self._length is None
        ):
            self._resumed_epoch = position.epoch
        samples = self._samples * self._group if self._samples is not None else feed.samples
        parts = engine.strategy.replicas.size * engine.step.accumulation
        engine.samples_per_step = int(engine.world.agree(samples)) * parts
        return feed

    @property
    def _epoch(self) -> int:
        """Return the number of the pass that the next step belongs to.

        The last batch of a loader without length is only known when the next pass begins, which is
        after its step was saved. So a resume goes on with that pass, for what the loop does at its
        end: the warm-up belongs to it.
        """
        if self._engine.warming_up and self._resumed_epoch is not None:
            return self._resumed_epoch
        return self.position.epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = None
        while self.fill():
            if epoch is None:
                epoch = self._epoch
            elif self._epoch != epoch:
                return  # a loader without length: the next pass has begun
            self.before_step()
            batches, self._next = self._next or [], None
            for number, batch in enumerate(batches, 1):
                self.last_of_step = number == len(batches)
                try:
                    yield batch
                except GeneratorExit:  # the loop was left, for the next pass
                    same_pass = self.position.epoch == epoch and not self._pass_is_complete
                    if same_pass and not self._engine.warming_up and self._feed is not None:
                        self._feed.end_pass()
                    raise
            if self._pass_is_complete:
                return

    def passes(self) -> Iterator[tuple[int, EpochLoader]]:
        """Yield the number of each pass and this loader, until the budget is spent.

        Raises `WorkloadError` if the loop took no batch of a pass, which would repeat for ever.
        """
        while self.fill():
            step = self._next
            yield self._epoch, self
            if self._next is step:
                raise self._engine.mistake(
                    "train(trial): a pass of epochs(loader) was not iterated: for epoch, batches in"
                    " epochs(loader) needs a loop over batches, not over loader"
                )

    def left_of_pass(self, length: int) -> tuple[int, int]:
        """Return how many batches the next iteration gives, of a pass of `length`, replays of the
        warm-up included; and of how many steps those are. Call it after `fill`."""
        size = len(self._next or ())
        before = self.position.batches - size
        replays = self._engine.warm_ups if self._engine.warming_up else 0
        return length - before + replays * size, replays

    @property
    def _length(self) -> int | None:
        """Return the number of batches of a pass, where it is known."""
        try:
            return len(self)
        except TypeError:
            return None

    @property
    def _pass_is_complete(self) -> bool:
        length = self._length
        return length is not None and self.position.batches >= length


def divided(loader: Any, world: World, seed: int) -> Any:
    """Return a DataLoader divided over ranks; itself with a sampler of the user's own."""
    if world.size == 1 or type(loader) is not DataLoader:
        return loader
    samplers = type(loader.batch_sampler), type(loader.sampler)
    if samplers[0] is not BatchSampler or samplers[1] not in (RandomSampler, SequentialSampler):
        return loader
    dataset: Any = loader.dataset
    if len(loader.sampler) != len(dataset):  # type: ignore[arg-type]
        return loader
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler = DistributedSampler[Any](dataset, world.size, world.rank, shuffle, seed)
    names = (
        "dataset batch_size num_workers collate_fn pin_memory drop_last timeout worker_init_fn"
        " multiprocessing_context generator prefetch_factor persistent_workers"
    )
    options = {name: getattr(loader, name) for name in names.split()}
    return DataLoader(**options, sampler=sampler)
