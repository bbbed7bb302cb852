"""Endless training batches. Which images a step sees, and which of them are mirrored, follows from seed and step only:
not from the number of processes, of accumulation passes or of loader workers, and not from where a run was resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tunediff.config import Config, ConfigError
from tunediff.data.images import Images


def mix(*parts: object) -> int:
    """A seed in [0, 2⁶³) from any printable parts; different parts give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1


def build(
    images: Images,
    config: Config,
    *,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    start: int = 0,
) -> Batches:
    """The batches of one training process, from `loader.resident` memory or from loader workers.

    `seed` defaults to the configuration's; `start` is the number of micro-batches this process has already consumed.
    Raises `ConfigError` if the batch cannot be divided, or if there is no shared memory for the workers.
    """
    loader, passes = config.loader, world * config.loader.accumulation
    if loader.batch_size % passes:
        raise ConfigError(
            f"loader.batch_size: {loader.batch_size} is not allowed: must be a multiple of "
            f"{world} processes × loader.accumulation = {passes}"
        )
    order = Order(
        count=len(images),
        batch_size=loader.batch_size,
        passes=loader.accumulation,
        rank=rank,
        world=world,
        seed=config.seed if seed is None else seed,
    )
    device = torch.device(device)
    source = (
        _Resident(images, order, device, start) if loader.resident else _Loaded(images, config, order, device, start)
    )
    return Batches(source, order, config.data.horizontal_flip, device, start, loader.non_blocking)


@dataclasses.dataclass(frozen=True)
class Order:
    """Which images make up which batch.

    The set is run through again and again, each time in a new order, as one endless stream. Optimizer step k takes
    the next `batch_size` of it; each pass of the step takes its part, and within a pass each process takes its share.
    """

    count: int
    batch_size: int
    passes: int
    rank: int
    world: int
    seed: int
    _latest: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def micro(self) -> int:
        """Images per process and pass."""
        return self.batch_size // (self.world * self.passes)

    def indices(self, number: int) -> Tensor:
        """int64 [micro]: the images of this process's micro-batch `number`, counted from 0."""
        first = (number * self.world + self.rank) * self.micro
        last, pieces = first + self.micro, []
        while first < last:
            epoch, offset = divmod(first, self.count)
            pieces.append(self._permutation(epoch)[offset : offset + last - first])
            first += len(pieces[-1])
        return torch.cat(pieces)

    def flips(self, number: int) -> Tensor:
        """bool [micro]: which of these images are mirrored, drawn for the whole step at once."""
        step, turn = divmod(number, self.passes)
        generator = torch.Generator().manual_seed(mix("flip", self.seed, step))
        first = (turn * self.world + self.rank) * self.micro
        return (torch.rand(self.batch_size, generator=generator) < 0.5)[first : first + self.micro]

    def _permutation(self, epoch: int) -> Tensor:
        if self._latest.get("epoch") != epoch:
            generator = torch.Generator().manual_seed(mix("epoch", self.seed, epoch))
            self._latest.update(epoch=epoch, permutation=torch.randperm(self.count, generator=generator))
        permutation: Tensor = self._latest["permutation"]
        return permutation


class Batches(Iterator[Tensor]):
    """float32 [micro, C, H, W] in [−1, 1] on the device, without end. Close it to stop its loader workers.

    `consumed` counts the micro-batches handed out: give it to `build` as `start` to go on exactly from here. Raises
    RuntimeError if a loader worker has died.
    """

    def __init__(
        self,
        source: _Resident | _Loaded,
        order: Order,
        flip: bool,
        device: torch.device,
        consumed: int,
        non_blocking: bool = True,
    ) -> None:
        self.consumed = consumed
        self._source, self._order, self._flip, self._device = source, order, flip, device
        self._non_blocking = non_blocking

    def __next__(self) -> Tensor:
        return self.move(self.fetch())

    def fetch(self) -> Tensor:
        """The next batch as it lies in host memory (`loader.resident`: on the device); waits for loader workers."""
        return next(self._source)

    def move(self, fetched: Tensor) -> Tensor:
        """A fetched batch on the device, as numbers; each is to be moved once, in order."""
        batch = fetched.to(self._device, non_blocking=self._non_blocking).float().div_(127.5).sub_(1.0)
        if self._flip:
            mirrored = self._order.flips(self.consumed).to(self._device, non_blocking=True)
            batch = torch.where(mirrored[:, None, None, None], batch.flip(-1), batch)
        self.consumed += 1
        return batch

    def close(self) -> None:
        """Stop the loader workers now; harmless when there are none or they are stopped already."""
        self._source.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Resident:
    """uint8 batches drawn on the device, where the whole set lies."""

    def __init__(self, images: Images, order: Order, device: torch.device, start: int) -> None:
        self._pixels, self._order, self._number = images.pixels.to(device), order, start

    def __next__(self) -> Tensor:
        indices = self._order.indices(self._number).to(self._pixels.device, non_blocking=True)
        self._number += 1
        return self._pixels.index_select(0, indices)

    def close(self) -> None:
        pass


class _Loaded:
    """Batches in host memory from a DataLoader, with or without worker processes."""

    def __init__(self, images: Images, config: Config, order: Order, device: torch.device, start: int) -> None:
        loader = config.loader
        parallel: dict[str, Any] = {}
        if loader.workers:
            try:
                # The workers map this memory instead of each copying the set.
                images.pixels.share_memory_()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise ConfigError(
                    f"loader.workers: {loader.workers} is not allowed: the images need {images.pixels.nbytes >> 20} "
                    f"MiB of shared memory ({error}); allowed: a larger /dev/shm, 0 workers, or loader.resident = true"
                ) from None
            # A fork of this process would inherit locks held by its threads (Ray's, OpenMP's) and may hang. The fork
            # server has no such threads, and torch is imported there once for all workers to come.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["tunediff.data.isolated", "torch", __name__])
            parallel = {
                "multiprocessing_context": context,
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
            }
        # Batches are without end; only where loader processes shall not persist does an iteration end with a pass.
        pass_length = None if loader.persistent_workers else max(1, len(images) // (order.micro * order.world))
        self._numbers = _Numbers(order, start, pass_length)
        self._loader = DataLoader(
            _Pixels(images.pixels, loader.transfer == "float32"),
            batch_sampler=self._numbers,
            num_workers=loader.workers,
            collate_fn=_unchanged,
            pin_memory=loader.pin_memory and device.type == "cuda",
            generator=torch.Generator(),  # else it would draw from, and so shift, the training's own generator
            **parallel,
        )
        self._batches: Any = iter(self._loader)

    def __next__(self) -> Tensor:
        try:
            batch: Tensor | None = next(self._batches, None)
            if batch is None:
                self._batches = iter(self._loader)
                batch = next(self._batches)
        except (ConnectionError, EOFError, FileNotFoundError) as error:  # killed while it handed over a batch
            raise RuntimeError("a DataLoader worker exited unexpectedly") from error
        assert batch is not None
        return batch

    def close(self) -> None:
        with contextlib.suppress(AttributeError):  # without workers there is nothing to stop
            self._batches._shutdown_workers()


class _Pixels(Dataset[Tensor]):
    """Images by a whole batch of indices at once."""

    def __init__(self, pixels: Tensor, as_float: bool) -> None:
        self._pixels, self._as_float = pixels, as_float

    def __getitem__(self, index: int) -> Tensor:
        return self._pixels[index]

    def __getitems__(self, indices: list[int]) -> Tensor:
        batch = self._pixels.index_select(0, torch.tensor(indices))  # several times faster than `[…]` on bytes
        return batch.float() if self._as_float else batch


class _Numbers(Sampler[list[int]]):
    """The indices of one micro-batch after the other, as plain numbers: tensors would cost a file handle each.

    Without end, or `length` at a time, each iteration going on where the one before ended.
    """

    def __init__(self, order: Order, start: int, length: int | None = None) -> None:
        self._order, self._next, self._length = order, start, length

    def __iter__(self) -> Iterator[list[int]]:
        first = self._next
        while self._length is None or self._next < first + self._length:
            self._next += 1
            yield self._order.indices(self._next - 1).tolist()


def _unchanged(batch: Any) -> Any:
    return batch
