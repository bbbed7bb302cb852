"""Endless training batches. The items of a step, and the random numbers of each item, depend on
seed and step alone: not on the number of processes, of accumulation passes or of loader workers,
nor on where a run was resumed.

The global generators are seeded before a data set makes an item, by `seed` and the item's place
among all that the training sees, and before a collate function makes a batch of them. A stream has
one seed for each pass through it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import pickle
import sys
import types
from collections.abc import Generator, Iterable, Iterator, Mapping
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


def build(
    source: Source, loader: Loader, order: Order, device: torch.device, start: int = 0, prepare: Prepare | None = None,
    collate: Collate | None = None,
) -> Batches:  # fmt: skip
    """Return the batches of one training process, from `loader.resident` memory or from loader
    workers.

    `start` is the number of micro-batches this process has already consumed, which a stream does
    not skip; `prepare` turns a batch on the device into what the training gets. Raises
    `ConfigError` if resident data are no tensors, or if there is no shared memory for the workers.
    """
    made: Generator[Any] | _Loaded
    tensor_source = None if collate is not None else tensors(source)
    if loader.resident:
        allowed_kinds = (
            "only tensors, tuples and dictionaries of them, and a TensorDataset can lie on the"
            " device"
        )
        refuse(
            tensor_source is None,
            f"loader.resident: True is not allowed: {allowed_kinds}; allowed: false",
        )
        tensor_source = to_device(tensor_source, device)
        made = (select(tensor_source, order.indices(number)) for number in itertools.count(start))
    else:
        places = sorted({str(column.device) for column in columns(source)} - {"cpu"})
        where = (
            f"loader.resident: False is not allowed: the data lie on {', '.join(places)}, not in"
            " host memory"
        )
        refuse(bool(places), f"{where}; allowed: true, or tensors in host memory")
        made = _Loaded(
            source if tensor_source is None else tensor_source,
            loader,
            order,
            device,
            start,
            collate,
        )
    return Batches(made, order, device, start, loader.non_blocking, prepare)


class Batches:
    """An endless series of micro-batches. Close it to stop its loader workers."""

    def __init__(
        self, source: Generator[Any] | _Loaded, order: Order, device: torch.device, start: int, non_blocking: bool,
        prepare: Prepare | None,
    ) -> None:  # fmt: skip
        self._source, self._order, self._device, self._next = source, order, device, start
        self._non_blocking, self._prepare = non_blocking, prepare
        self.position = None
        """The number of the next batch says it all."""

    def fetch(self) -> tuple[int, Any]:
        """Return number and content of the next micro-batch, in host memory (`loader.resident`: on
        the device).

        Waits for loader workers; raises RuntimeError if one has died.
        """
        self._next += 1
        return self._next - 1, next(self._source)

    def move(self, fetched: tuple[int, Any]) -> Any:
        """Return a fetched micro-batch on the device, as the training gets it; may be called
        again."""
        number, content = fetched
        batch = to_device(content, self._device, self._non_blocking)
        return (
            batch
            if self._prepare is None
            else self._prepare(batch, lambda what: self._order.uniform(number, what))
        )

    def close(self) -> None:
        """Stop the loader workers now; does nothing when there are none or they are stopped
        already."""
        self._source.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Loaded:
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
        parallel: dict[str, Any] = {}
        if loader.workers:
            _share(source, loader)
            # A fork of this process would inherit locks held by its threads (Ray's, OpenMP's) and
            # may hang. The fork server has no such threads, and torch is imported there once for
            # all workers to come.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["tunediff.data.isolated", "torch", __name__])
            parallel = {
                "multiprocessing_context": context,
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
            }
        # The iteration is endless; it ends with a pass over the set only where loader processes
        # must not persist.
        pass_length = (
            None
            if loader.persistent_workers
            else max(1, order.count // (order.micro * order.world))
        )
        if length(source) is None:
            stream = _Stream(cast(Any, source), order, start, collate)
            dataset_options: dict[str, Any] = {
                "dataset": stream,
                "batch_size": None,
                "collate_fn": _unchanged,
            }
        else:
            dataset_options = {
                "dataset": _Places(), "batch_sampler": _Numbers(order, start, pass_length),
                "collate_fn": functools.partial(_items, source, loader.transfer == "float32", collate, order.seed),
            }  # fmt: skip
        self._loader = DataLoader(
            **dataset_options,
            num_workers=loader.workers,
            pin_memory=loader.pin_memory and device.type == "cuda",
            # Without a generator of its own it would draw from, and so shift, the training's.
            generator=torch.Generator().manual_seed(mix("loader", order.seed, order.rank, start)),
            **parallel,
        )
        self._passes, self._begun = 0, False
        try:
            self._batches: Any = self._started()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            if not loader.workers or "pickle" not in str(error) + type(error).__name__:
                raise
            hint = "allowed: 0, or a data set and collate function defined at the top of a file"
            why = f"loader.workers: {loader.workers} needs data that another process can get"
            raise ConfigError(f"{why}: {error}; {hint}") from None

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
            # A first pass without a batch is too short: later ones would give some only as long as
            # rests add up
            if batch is None and self._begun:
                self._passes += 1
                if isinstance(self._loader.dataset, _Stream):
                    self._loader.dataset.passes = (
                        self._passes
                    )  # for loader processes that begin with this pass
                self._batches = self._started()
                batch = next(self._batches, None)
            few = "the data set gives fewer items than one batch of each loader process needs"
            refuse(
                batch is None,
                f"trial.batches: {few}; allowed: a smaller loader.batch_size, fewer workers",
            )
            self._begun = True
        except (
            ConnectionError,
            EOFError,
            FileNotFoundError,
        ) as error:  # killed while it handed over a batch
            raise RuntimeError("a DataLoader worker exited unexpectedly") from error
        return batch

    def close(self) -> None:
        with contextlib.suppress(AttributeError):  # without workers there is nothing to stop
            self._batches._shutdown_workers()


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


def _items(
    source: Any,
    as_float: bool,
    collate: Collate | None,
    seed: int,
    micro_batch: tuple[int, list[int]],
) -> Any:
    """Return a whole batch, from the position of its first item and the items' indices."""
    first, indices = micro_batch
    if collate is None and tensors(source) is not None:
        return select(source, torch.tensor(indices), as_float)
    if collate is None and type(source) is list:
        return default_collate([source[index] for index in indices])
    # In a loader process nothing else uses the generators.
    with randomness.forked() if get_worker_info() is None else contextlib.nullcontext():
        if tensors(source) is not None:  # rows of tensors, for a function of the user's
            items = [_row(source, index) for index in indices]
        else:
            items = [
                _drawn(source, index, mix("item", seed, place))
                for place, index in enumerate(indices, first)
            ]
        randomness.seed(mix("collate", seed, first))
        return (collate or default_collate)(items)


def _drawn(source: Any, index: int, seed: int) -> Any:
    """Return an item; its random numbers depend on `seed` alone, in whatever process it is
    loaded."""
    randomness.seed(seed)
    return source[index]


def _row(source: Any, index: int) -> Any:
    """Return a row of a tensor, or of each of several."""
    if isinstance(source, Mapping):
        return {name: part[index] for name, part in source.items()}
    return (
        with_parts(source, [part[index] for part in source])
        if isinstance(source, tuple)
        else source[index]
    )


def _undivided(source: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a stream that cannot see its loader process: it would divide itself a
    second time."""
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


class _Dealt(IterableDataset[Any]):
    """The items of a stream that belong to this process: every n-th of them, by rank and loader
    process."""

    def __init__(self, source: Iterable[Any], rank: int, ranks: int) -> None:
        self._source, self._rank, self._ranks = source, rank, ranks

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        loaders, own = (info.num_workers, info.id) if info is not None else (1, 0)
        return itertools.islice(
            _undivided(self._source), self._rank * loaders + own, None, self._ranks * loaders
        )


class _Stream(IterableDataset[Any]):
    """Batches of the items of a stream that belong to this process.

    Each process runs through the whole stream and takes its part. So random numbers are equal in
    all of them: a shuffled stream has the same order in each process, and an item is the same in
    whichever process takes it.
    """

    def __init__(
        self, source: Iterable[Any], order: Order, start: int, collate: Collate | None
    ) -> None:
        self._dealt = _Dealt(source, order.rank, order.world)
        self._order, self._start, self._collate = order, start, collate
        self._rest: list[Any] = []
        """Items at the end of a pass that did not fill a batch: the next pass begins with them."""
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        info, order = get_worker_info(), self._order
        of_pass = mix("stream", order.seed, self._start, self.passes)
        self.passes += 1
        drawn = None
        for number in itertools.count():
            with (
                randomness.forked()
            ):  # without loader processes, it shares the generators with the training
                if drawn is None:
                    randomness.seed(of_pass)
                    items = iter(self._dealt)
                else:
                    randomness.set_state(drawn)
                batch = [*self._rest, *itertools.islice(items, order.micro - len(self._rest))]
                drawn, self._rest = randomness.state(), []
                if len(batch) < order.micro:
                    self._rest = batch
                    return
                own = info.id if info is not None else 0
                randomness.seed(mix("collate", of_pass, order.rank, own, number))
                batch = (self._collate or default_collate)(batch)
            yield batch


def _unchanged(batch: Any) -> Any:
    return batch


class _Places(Dataset[Any]):
    """Passes the output of `_Numbers` to the collate function."""

    def __getitems__(self, micro_batch: tuple[int, list[int]]) -> tuple[int, list[int]]:
        return micro_batch


class _Numbers(Sampler[tuple[int, list[int]]]):
    """Yields for each micro-batch the position of its first item, and its indices.

    The indices are plain numbers: tensors would cost a file handle each. Endless, or `length` at a
    time, each iteration continuing where the last one ended.
    """

    def __init__(self, order: Order, start: int, length: int | None) -> None:
        numbers = itertools.count(start)
        self._endless = (
            (order.first(number), order.indices(number).tolist()) for number in numbers
        )
        self._length = length

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return itertools.islice(self._endless, self._length)
