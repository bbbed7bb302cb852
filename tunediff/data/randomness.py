"""Seed, save and restore the global CPU generators of torch, numpy and `random` together."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy
import torch


def seed(value: int) -> None:
    """Seed all three. Generators of GPUs are not changed."""
    # torch.manual_seed visits every kind of device: too long for each item of a data set.
    torch.default_generator.manual_seed(value)
    seed_libraries(value)


def seed_libraries(value: int) -> None:
    """Seed numpy and `random`, beside `torch.manual_seed`."""
    numpy.random.seed(value % 2**32)
    random.seed(value)


def library_state() -> dict[str, list[Any]]:
    """Return the states of numpy and `random` as tensors and numbers, for `weights_only`."""
    _, words, gauss = random.getstate()
    _, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    return {
        "random": [torch.tensor(words), gauss],
        "numpy": [torch.from_numpy(keys.astype(numpy.int64)), *rest],
    }


def set_library_state(state: Mapping[str, list[Any]]) -> None:
    """Restore what `library_state` returned."""
    words, gauss = state["random"]
    random.setstate((3, tuple(words.tolist()), gauss))
    keys, *rest = state["numpy"]
    numpy.random.set_state(("MT19937", keys.numpy().astype(numpy.uint32), *rest))


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Restore the generators at the end: draws inside change none that follow."""
    of_torch, of_numpy, of_random = (
        torch.get_rng_state(),
        numpy.random.get_state(),
        random.getstate(),
    )
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        numpy.random.set_state(of_numpy)
        random.setstate(of_random)
