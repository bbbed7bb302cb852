"""What training data are, and which items make up which batch.

Items and random numbers of a step depend on seed and step alone, not on processes or passes.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tunediff.config import ConfigError
from tunediff.config.knobs import refuse

Source = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor] | Dataset[Any] | Sequence[Any]
"""Training data: rows of tensors, items of a dataset or list, or an `IterableDataset`."""
Collate = Callable[[list[Any]], Any]
"""Makes a batch of items."""
Uniform = Callable[[str], Tensor]
"""For a purpose, a number in [0, 1) for each item of the batch, float32 [b] on the CPU: the same
for an item however the batch is divided over processes and passes."""
Prepare = Callable[[Any, Uniform], Any]
"""Turns a batch on the device into the training's, such as floats, some mirrored."""


def mix(*parts: object) -> int:
    """Return a seed in [0, 2⁶³) from any printable parts; different parts give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1


def tensors(source: Any) -> Any:
    """Return a source of tensors with a row per item: one, a tuple, a dictionary; else None."""
    # Not of a subclass, which may make or count its items itself.
    content = source.tensors if type(source) is TensorDataset else source
    parts = _parts(content)
    are_rows = all(isinstance(part, Tensor) and part.dim() for part in parts)
    return content if parts and are_rows else None


def _parts(content: Any) -> list[Any]:
    if isinstance(content, Mapping):
        return list(content.values())
    return list(content) if isinstance(content, tuple) else [content]


def columns(source: Any) -> list[Tensor]:
    """Return the tensors of a source that is only tensors; [] otherwise."""
    content = tensors(source)
    return [] if content is None else _parts(content)


def length(source: Any) -> int | None:
    """Return the number of items; None for a stream. Raises `ConfigError` for other values."""
    if lengths := [len(column) for column in columns(source)]:
        shown = ", ".join(map(str, lengths))
        refuse(len(set(lengths)) > 1, f"trial.batches: tensors of different lengths: {shown}")
        return lengths[0]
    if isinstance(source, IterableDataset):
        return None
    if isinstance(source, DataLoader):
        raise ConfigError(
            "trial.batches takes a data set; a loader of your own goes to steps(trial, loader)"
        )
    is_group = isinstance(source, Mapping | tuple)
    is_indexed = hasattr(source, "__len__") and hasattr(source, "__getitem__") and not is_group
    if not is_indexed and isinstance(source, Iterable) and not is_group:
        return None
    refuse(
        not is_indexed,
        f"trial.batches: {type(source).__name__} is no data set; allowed: tensors, a torch Dataset"
        " with __len__ and __getitem__, an IterableDataset, a list of items",
    )
    return len(source)


@dataclasses.dataclass(frozen=True)
class Order:
    """Which samples make up which batch.

    The set is run through again and again, each time in a new order, as one endless stream.
    Optimizer step k takes the next `batch_size` of it; each pass of the step takes its part, and
    within a pass each process takes its share.
    """

    count: int
    batch_size: int
    passes: int
    rank: int
    world: int
    seed: int

    @property
    def micro(self) -> int:
        """Samples per process and pass."""
        return self.batch_size // (self.world * self.passes)

    def first(self, number: int) -> int:
        """Return the position of this micro-batch's first sample among all samples."""
        return (number * self.world + self.rank) * self.micro

    def indices(self, number: int) -> Tensor:
        """Return the samples of this process's micro-batch `number`, from 0: int64 [micro]."""
        first = self.first(number)
        last, pieces = first + self.micro, []
        while first < last:
            epoch, offset = divmod(first, self.count)
            order = _permutation(self.count, self.seed, epoch)
            pieces.append(order[offset : offset + last - first])
            first += len(pieces[-1])
        return torch.cat(pieces)

    def uniform(self, number: int, purpose: str) -> Tensor:
        """Return a number in [0, 1) per item of the micro-batch, drawn for the whole step."""
        step, turn = divmod(number, self.passes)
        generator = torch.Generator().manual_seed(mix(purpose, self.seed, step))
        first = (turn * self.world + self.rank) * self.micro
        return torch.rand(self.batch_size, generator=generator)[first : first + self.micro]


@functools.lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(mix("epoch", seed, epoch)))


def with_values(mapping: Mapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    """Return a mapping with `change(value)` for each value; a dict where copies may share."""
    copied = isinstance(mapping, dict | collections.UserDict)
    changed: Any = copy.copy(mapping) if copied else dict(mapping)
    for key, value in mapping.items():
        changed[key] = change(value)
    return changed


def with_parts(content: Any, parts: list[Any]) -> Any:
    """Return a tuple or list of the same type, also a named one, with other parts."""
    return type(content)(*parts) if hasattr(content, "_fields") else type(content)(parts)


def to_device(content: Any, device: torch.device, non_blocking: bool = True) -> Any:
    """Return the content with its tensors, and all else that has a `to`, on the device."""
    if isinstance(content, Tensor):
        return content.to(device, non_blocking=non_blocking)
    if type(content) not in (dict, list, tuple) and hasattr(content, "to"):
        content = copy.copy(content)  # transformers' BatchEncoding changes itself
        try:
            return content.to(device, non_blocking=non_blocking)
        except TypeError:  # it takes a device alone
            return content.to(device)
    if isinstance(content, Mapping):
        return with_values(content, lambda value: to_device(value, device, non_blocking))
    if isinstance(content, tuple | list):
        return with_parts(content, [to_device(part, device, non_blocking) for part in content])
    return content


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors in tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)


def select(source: Any, indices: Tensor, as_float: bool = False) -> Any:
    """Return these rows of a tensor, or of each of several; `as_float`: bytes become float32."""
    if isinstance(source, tuple):
        return with_parts(source, [select(part, indices, as_float) for part in source])
    if isinstance(source, Mapping):
        return {name: select(part, indices, as_float) for name, part in source.items()}
    # Several times faster than `source[indices]`.
    rows = source.index_select(0, indices.to(source.device, non_blocking=True))
    return rows.float() if as_float and rows.dtype == torch.uint8 else rows
