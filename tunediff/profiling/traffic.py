"""Count the bytes that a step's operators read and write, to compare them with a copy's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core.clock import Budget
from tunediff.distributed import World
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.training_run import Program, TrainingRun
from tunediff.training.trial import run

_aten = torch.ops.aten
_ONLY_WRITE = {_aten.copy_, _aten.zero_, _aten.fill_}
_ALLOCATE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty}


class TrafficCounter(TorchDispatchMode):
    """Adds up what operators read and write once each: the least that a step made of them moves.

    Views and allocations move nothing. An operator that passes over its input several times, as a
    norm does, moves more; one whose input is still in a cache moves less.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _ALLOCATE:
            self.moved_bytes += _moved_bytes(func, args, kwargs or {}, outputs)
        return outputs


def _moved_bytes(func: Any, args: Any, kwargs: Any, outputs: Any) -> int:
    read, changed = dict[int, Tensor](), list[Tensor]()
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += tensors
            if func.overloadpacket in _ONLY_WRITE:
                continue
        read |= {id(tensor): tensor for tensor in tensors}
    storages = {_storage(tensor) for tensor in (*read.values(), *changed)}
    new = [
        leaf
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, Tensor) and _storage(leaf) not in storages
    ]
    if not changed and not new:
        return 0
    return sum(map(_bytes, (*read.values(), *changed, *new)))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, an expanded one's as they lie in memory."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class CountTraffic(Program):
    """Train, and count the traffic of each batch."""

    def __init__(self) -> None:
        self.batches_bytes = list[int]()

    def batch(self, run: TrainingRun, batch: Any) -> contextlib.AbstractContextManager[object]:
        return self._counting()

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        with TrafficCounter() as counter:
            yield
        self.batches_bytes.append(counter.moved_bytes)


def step_bytes(config: Systems, world: World) -> float | None:
    """Return the bytes that a step moves at least; None for a compiled model."""
    if config.compile.active:
        return None
    # A captured step has the same operators, which replays do not show
    short = cfg.override(config, {"evaluation.points": 1, "compile.capture": "none"})
    program = CountTraffic()
    run(Engine(short, Budget(steps=2), world, Observer(), program, evaluates=False))
    return float(sum(program.batches_bytes[-short.loader.accumulation :]))
