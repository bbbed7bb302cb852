"""What a DataLoader iterates over: the numbers of items of a data set, or the items of a stream."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate, get_worker_info
from torch.utils.data._utils import worker

from tunediff.config.systems import Loader
from tunediff.data import randomness
from tunediff.data.items import Collate, Order, Source, length, mix, select, tensors, with_parts


def dataset_options(
    source: Source, loader: Loader, order: Order, start: int, collate: Collate | None
) -> dict[str, Any]:
    """Return the options of a DataLoader that say what its batches are."""
    if length(source) is None:
        stream = Stream(cast(Any, source), order, start, collate)
        return {"dataset": stream, "batch_size": None, "collate_fn": _unchanged}
    # Endless; it ends with a pass over the set only where loader processes must not persist.
    per_pass = max(1, order.count // (order.micro * order.world))
    limit = None if loader.persistent_workers else per_pass
    as_float = loader.transfer == "float32"
    return {
        "dataset": _Unread(),
        "batch_sampler": _Numbers(order, start, limit),
        "collate_fn": functools.partial(_batch, source, as_float, collate, order.seed),
    }


def _unchanged(batch: Any) -> Any:
    return batch


# ---- data sets with a length
class _Unread(Dataset[Any]):
    """Passes what `_Numbers` yields to the collate function, which reads the source."""

    def __getitems__(self, micro_batch: tuple[int, list[int]]) -> tuple[int, list[int]]:
        return micro_batch


class _Numbers(Sampler[tuple[int, list[int]]]):
    """Yields for each micro-batch the position of its first item, and its indices.

    The indices are plain numbers: tensors would cost a file handle each. Endless, or `limit` at a
    time, each iteration continuing where the last one ended.
    """

    def __init__(self, order: Order, start: int, limit: int | None) -> None:
        numbers = itertools.count(start)
        self._endless = (
            (order.first(number), order.indices(number).tolist()) for number in numbers
        )
        self._limit = limit

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return itertools.islice(self._endless, self._limit)


def _batch(
    source: Any,
    as_float: bool,
    collate: Collate | None,
    seed: int,
    micro_batch: tuple[int, list[int]],
) -> Any:
    first, indices = micro_batch
    rows = tensors(source)
    if collate is None and rows is not None:
        return select(source, torch.tensor(indices), as_float)
    if collate is None and type(source) is list:
        return default_collate([source[index] for index in indices])
    # In a loader process nothing else uses the generators.
    with randomness.forked() if get_worker_info() is None else contextlib.nullcontext():
        items = []
        for position, index in enumerate(indices, first):
            if rows is not None:  # rows of tensors, for a function of the user's
                items.append(_row(source, index))
            else:  # the random numbers of an item depend on its position, not on the process
                randomness.seed(mix("item", seed, position))
                items.append(source[index])
        randomness.seed(mix("collate", seed, first))
        return (collate or default_collate)(items)


def _row(source: Any, index: int) -> Any:
    if isinstance(source, Mapping):
        return {name: part[index] for name, part in source.items()}
    if isinstance(source, tuple):
        return with_parts(source, [part[index] for part in source])
    return source[index]


# ---- streams
class Stream(IterableDataset[Any]):
    """Batches of the items of a stream that belong to this process.

    Each process runs through the whole stream and takes its part. So random numbers are equal in
    all of them: a shuffled stream has the same order in each process, and an item is the same in
    whichever process takes it.
    """

    def __init__(
        self, source: Iterable[Any], order: Order, start: int, collate: Collate | None
    ) -> None:
        self._source, self._order, self._start, self._collate = source, order, start, collate
        self._rest: list[Any] = []
        """Items at the end of a pass that did not fill a batch: the next pass begins with them."""
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        info, order = get_worker_info(), self._order
        of_pass = mix("stream", order.seed, self._start, self.passes)
        self.passes += 1
        drawn = None
        for number in itertools.count():
            # Without loader processes the stream shares the generators with the training.
            with randomness.forked():
                if drawn is None:
                    randomness.seed(of_pass)
                    items = share_of_stream(self._source, order.rank, order.world)
                else:
                    randomness.set_state(drawn)
                batch = [*self._rest, *itertools.islice(items, order.micro - len(self._rest))]
                drawn, self._rest = randomness.state(), []
                if len(batch) < order.micro:
                    self._rest = batch
                    return
                process = info.id if info is not None else 0
                randomness.seed(mix("collate", of_pass, order.rank, process, number))
                batch = (self._collate or default_collate)(batch)
            yield batch


def share_of_stream(source: Iterable[Any], rank: int, ranks: int) -> Iterator[Any]:
    """Return this process's items of a stream: every n-th, by rank and loader process."""
    info = get_worker_info()
    loaders, process = (info.num_workers, info.id) if info is not None else (1, 0)
    return itertools.islice(_undivided(source), rank * loaders + process, None, ranks * loaders)


def _undivided(source: Iterable[Any]) -> Iterator[Any]:
    """Yield a stream's items unaware of the loader process: it would divide itself again."""
    items = None
    while True:
        info, worker._worker_info = worker._worker_info, None
        try:
            items = iter(source) if items is None else items
            item = next(items)
        except StopIteration:
            return
        finally:
            worker._worker_info = info
        yield item
