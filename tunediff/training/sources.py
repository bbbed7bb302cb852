"""A workload's training data: a set, by the knobs of `loader`, or the user's loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tunediff.data import loader
from tunediff.training.engine import Engine
from tunediff.training.feed import Position, RepeatingLoader


def batches_of_data(
    engine: Engine,
    source: loader.Source,
    prepare: loader.Prepare | None,
    collate: Callable[[list[Any]], Any] | None,
    samples_each: int,
) -> Iterator[Any]:
    """Return the batches of a data set; see `Trial.batches`."""
    section, ranks = engine.config.loader, engine.strategy.replicas
    options = {"prepare": prepare, "collate": collate, "samples_each": samples_each}
    engine.program.on_source(engine, source, options)
    if (length := loader.length(source)) == 0:
        raise engine.mistake("trial.batches: the data set is empty")
    size, seed = section.batch_size, engine.config.seed
    engine.samples_per_step = size * samples_each
    order = loader.Order(length or 1, size, section.accumulation, ranks.rank, ranks.size, seed)
    return engine.batches(
        lambda start, _: loader.build(
            source, section, order, engine.device, start, prepare, collate
        )
    )


def batches_of_loader(engine: Engine, batches: Iterable[Any], samples: int | None) -> Iterator[Any]:
    """Return the batches of the user's own loader; see `Trial.steps`."""
    engine.program.on_source(engine, None, {})
    engine.own_loader = True

    def build(start: int, position: Position | None) -> RepeatingLoader:
        feed = RepeatingLoader(batches, engine.device, position=position)
        count = int(engine.world.agree(samples if samples is not None else feed.samples))
        parts = engine.strategy.replicas.size * engine.step.accumulation
        engine.samples_per_step = count * parts
        return feed

    return engine.batches(build)
