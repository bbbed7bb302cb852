"""Endless training batches. The items of a step, and the random numbers of each item, depend on
seed and step alone: not on the number of processes, of accumulation passes or of loader workers,
nor on where a run was resumed.

The global generators are seeded before a data set makes an item, by `seed` and the item's place
among all that the training sees, and before a collate function makes a batch of them. The place of
a stream's item is that in its pass.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import pickle
import sys
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils import worker

from tunediff.config import ConfigError
from tunediff.config.knobs import refuse
from tunediff.config.systems import Loader
from tunediff.data import randomness
from tunediff.data.items import Collate, columns, mix, select, tensors, to_device, with_parts
from tunediff.data.items import Order as Order
from tunediff.data.items import Prepare as Prepare
from tunediff.data.items import Source as Source
from tunediff.data.items import length as length
from tunediff.data.loader_processes import begin_worker


def build(
    source: Source,
    loader: Loader,
    order: Order,
    device: torch.device,
    start: int = 0,
    prepare: Prepare | None = None,
    collate: Collate | None = None,
) -> Batches:
    """Return a training process's batches, from `loader.resident` memory or from workers.

    `start` is the number of micro-batches this process has already consumed, which a stream does
    not skip; `prepare` turns a batch on the device into what the training gets. Raises
    `ConfigError` if resident data are no tensors, or if there is no shared memory for the workers.
    """
    batches: Generator[Any] | _LoaderBatches
    rows = tensors(source) if collate is None else None
    if loader.resident:
        refuse(
            rows is None,
            "loader.resident: True is not allowed: only tensors, tuples and dictionaries of them,"
            " and a TensorDataset can lie on the device; allowed: false",
        )
        resident = to_device(rows, device)
        batches = (select(resident, order.indices(number)) for number in itertools.count(start))
    else:
        devices = sorted({str(column.device) for column in columns(source)} - {"cpu"})
        refuse(
            bool(devices),
            f"loader.resident: False is not allowed: the data lie on {', '.join(devices)}, not in"
            " host memory; allowed: true, or tensors in host memory",
        )
        batches = _LoaderBatches(
            source if rows is None else rows, loader, order, device, start, collate
        )
    return Batches(batches, order, device, start, loader.non_blocking, prepare)


class Batches:
    """An endless series of micro-batches. Close it to stop its loader workers."""

    position = None
    """What a checkpoint needs beside the number of the next batch: nothing."""

    def __init__(
        self,
        source: Generator[Any] | _LoaderBatches,
        order: Order,
        device: torch.device,
        start: int,
        non_blocking: bool,
        prepare: Prepare | None,
    ) -> None:
        self._source, self._order, self._device, self._next = source, order, device, start
        self._non_blocking, self._prepare = non_blocking, prepare

    def fetch(self) -> tuple[int, Any]:
        """Return number and content of the next micro-batch, in host memory unless resident.

        Waits for loader workers; raises RuntimeError if one has died.
        """
        self._next += 1
        return self._next - 1, next(self._source)

    def move(self, fetched: tuple[int, Any]) -> Any:
        """Return a fetched micro-batch on the device; may be called again."""
        number, content = fetched
        batch = to_device(content, self._device, self._non_blocking)
        if self._prepare is None:
            return batch
        return self._prepare(batch, functools.partial(self._order.uniform, number))

    def close(self) -> None:
        """Stop the loader workers now, if there are any that run."""
        self._source.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LoaderBatches:
    """Batches in host memory from a DataLoader, with or without worker processes."""

    def __init__(
        self,
        source: Source,
        loader: Loader,
        order: Order,
        device: torch.device,
        start: int,
        collate: Collate | None,
    ) -> None:
        options = dataset_options(source, loader, order, start, collate)
        if loader.workers:
            _share(source, loader)
            # A fork of this process would inherit locks held by its threads (Ray's, OpenMP's) and
            # may hang. The fork server has no such threads, and torch is imported there once for
            # all workers to come.
            if before_processes is not None:
                before_processes()
            options["multiprocessing_context"] = use_fork_server()
            options["worker_init_fn"] = functools.partial(begin_worker, None)
            options["prefetch_factor"] = loader.prefetch_factor
            options["persistent_workers"] = loader.persistent_workers
        self._loader = DataLoader(
            num_workers=loader.workers,
            pin_memory=loader.pin_memory and device.type == "cuda",
            # By default it would draw from, and so shift, the training's generator.
            generator=torch.Generator().manual_seed(mix("loader", order.seed, order.rank, start)),
            **options,
        )
        self._passes, self._had_batch = 0, False
        try:
            self._batches: Any = self._started()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            if not loader.workers or "pickle" not in str(error) + type(error).__name__:
                raise
            raise ConfigError(
                f"loader.workers: {loader.workers} needs data that another process can get:"
                f" {error}; allowed: 0, or a data set and collate function defined at the top of a"
                " file"
            ) from None

    def _started(self) -> Iterator[Any]:
        """Begin a pass over the loader, with its processes.

        multiprocessing runs the file of `__main__` again in every process. Nothing here needs that,
        and a plain script would train once more in each of them.
        """
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            return iter(self._loader)
        finally:
            sys.modules["__main__"] = main

    def __next__(self) -> Any:
        try:
            batch = next(self._batches, None)
            # A first pass without a batch is too short: later ones would only give some from rests
            if batch is None and self._had_batch:
                self._passes += 1
                if isinstance(self._loader.dataset, Stream):
                    # For loader processes that begin with this pass.
                    self._loader.dataset.passes = self._passes
                self._batches = self._started()
                batch = next(self._batches, None)
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            # A process was killed while it handed over a batch.
            raise RuntimeError("a DataLoader worker exited unexpectedly") from error
        refuse(
            batch is None,
            "trial.batches: the data set gives fewer items than one batch of each loader process"
            " needs; allowed: a smaller loader.batch_size, fewer workers",
        )
        self._had_batch = True
        return batch

    def close(self) -> None:
        with contextlib.suppress(AttributeError):  # without workers there is nothing to stop
            self._batches._shutdown_workers()


before_processes: Callable[[], object] | None = None
"""Called before loader processes start; see `training.prepared.begin`."""


def use_fork_server() -> Any:
    """Return the multiprocessing context whose server has imported torch for loaders."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tunediff.data.isolated", "torch", __name__])
    return context


def _share(source: Source, loader: Loader) -> None:
    """Put tensors where the loader processes map them instead of each copying the set."""
    for tensor in columns(source):
        try:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise ConfigError(
                f"loader.workers: {loader.workers} is not allowed: the data needs"
                f" {tensor.nbytes >> 20} MiB of shared memory ({error}); allowed: a larger"
                " /dev/shm, 0 workers, or loader.resident = true"
            ) from None


# ---- what a DataLoader iterates over: the numbers of items of a data set, or a stream's items
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
    """Batches of the items of a stream that belong to this process: every n-th, by rank and loader
    process.

    Each process runs through the whole stream, with equal random numbers in all of them: a shuffled
    stream has the same order in each process, and an item is the same in whichever process takes
    it. What does not fill a batch at the end of a pass begins the next one.
    """

    def __init__(
        self, source: Iterable[Any], order: Order, start: int, collate: Collate | None
    ) -> None:
        self._source, self._order, self._start, self._collate = source, order, start, collate
        self._info: Any = None
        self._rest: list[Any] = []
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self._info, order = self._info or get_worker_info(), self._order
        loaders, process = (1, 0) if self._info is None else (self._info.num_workers, self._info.id)
        worker._worker_info = None  # a stream that knows of the process would divide itself again
        of_pass = mix("stream", order.seed, self._start, self.passes)
        self.passes += 1

        def seeded(place: int) -> int:
            randomness.seed(mix("item", of_pass, place))
            return place

        # Seeded before each item; the iterator begins, and may draw, behind the first seed.
        items = itertools.chain.from_iterable([self._source])
        read = zip(map(seeded, itertools.count()), items, strict=False)
        taken = itertools.islice(read, order.rank * loaders + process, None, order.world * loaders)
        for number in itertools.count():
            # Without loader processes the stream shares the generators with the training.
            with randomness.forked():
                more = itertools.islice(taken, order.micro - len(self._rest))
                batch, self._rest = [*self._rest, *(item for _, item in more)], []
                if len(batch) < order.micro:
                    self._rest = batch
                    return
                randomness.seed(mix("collate", of_pass, order.rank, process, number))
                batch = (self._collate or default_collate)(batch)
            yield batch
