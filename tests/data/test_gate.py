"""While the clock stands still, loader processes begin no batch, whatever iterates their DataLoader."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tunediff.config import baseline, override
from tunediff.data import loader
from tunediff.data.gate import Gate
from tunediff.training.feed import RepeatingLoader

BATCH, ROOM = 4, 16


class Counted(Dataset[Any]):
    """Counts the items that were asked for, each of which takes a while."""

    def __init__(self) -> None:
        self.asked = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        time.sleep(0.005)
        return torch.tensor(index)


class Stream(IterableDataset[Any]):
    """Whole batches of them, as a pipeline in a loader process makes."""

    def __init__(self, items: Counted) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        for first in itertools.count():
            yield torch.stack([self.items[first + index] for index in range(BATCH)])


def loads(items: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(items, **{"batch_size": BATCH, "num_workers": 1, "prefetch_factor": ROOM} | options)


def iterated(items: Counted) -> DataLoader[Any]:
    """A loader whose processes live already."""
    made = loads(items, persistent_workers=True)
    next(iter(made))
    settled(items.asked)
    return made


LOADERS: dict[str, Callable[[Counted], Any]] = {
    "dataset": loads,
    "stream": lambda items: loads(Stream(items), batch_size=None),
    "iterated": iterated,
}


def ours(items: Counted) -> Any:
    section = override(
        baseline("cifar10"), {"loader.workers": 1, "loader.prefetch_factor": ROOM, "loader.batch_size": BATCH}
    ).loader
    return loader.build(items, section, loader.Order(1000, BATCH, 1, 0, 1, 0), torch.device("cpu"))


def settled(count: Tensor) -> int:
    """Return the count when it does not change any more."""
    before = -1
    while before != (now := int(count)):
        before = now
        time.sleep(0.3)
    return before


@pytest.mark.parametrize("kind", [*LOADERS, "batches"])
def test_loader_process_at_a_closed_gate_begins_no_other_batch(kind: str) -> None:
    items, gate = Counted(), Gate()
    made = LOADERS[kind](items) if kind != "batches" else None
    others = multiprocessing.active_children()
    with gate.over_loaders():
        feed = RepeatingLoader(made, torch.device("cpu")) if made is not None else ours(items)
        feed.fetch()
    gate.close()
    at_once = int(items.asked)
    assert settled(items.asked) <= at_once + 2 * BATCH, "the batch in hand, and one begun meanwhile"
    gate.open()
    with gate.over_loaders():
        for _ in range(3):
            feed.fetch()
    assert gate.worked_s > 0
    gate.close()
    settled(items.asked)
    own = [process for process in multiprocessing.active_children() if process not in others]
    gate.open()
    feed.close()
    del feed
    if kind == "batches":  # the processes of a user's loader end when it is forgotten
        assert [process.exitcode for process in own] == [0]


class Awaited(Dataset[Any]):
    """Notes in which item the process is, and stays there until it is let go."""

    def __init__(self) -> None:
        self.begun, self.free = (torch.zeros((), dtype=torch.int64).share_memory_() for _ in range(2))

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        self.begun.fill_(index + 1)
        while int(self.free) <= index:
            time.sleep(0.001)
        return index

    def in_item(self, index: int) -> None:
        while int(self.begun) <= index:
            time.sleep(0.001)


def test_a_process_notes_how_long_it_worked_while_the_clock_stood_still() -> None:
    began_s = time.monotonic()
    gate, items = Gate(), Awaited()
    feed = RepeatingLoader(loads(items, batch_size=1, prefetch_factor=2), torch.device("cpu"))
    items.free.fill_(1)
    with gate.over_loaders():
        feed.fetch()
    items.in_item(1)
    gate.open()
    running_s = gate.worked_s
    assert running_s > 0, "what was made before the first batch, too"
    gate.close()
    time.sleep(0.2)
    items.free.fill_(2)
    while gate.worked_s == running_s:
        time.sleep(0.001)
    in_hand_s, noted_s = gate.worked_s - running_s, time.monotonic() - began_s
    assert 0.2 <= in_hand_s <= noted_s
    time.sleep(0.2)
    gate.open()
    items.free.fill_(100)
    for _ in range(9):
        feed.fetch()
    assert gate.worked_s - running_s == pytest.approx(in_hand_s), "neither waiting there nor work while the clock runs"


def test_what_is_the_users_stays_as_it_is() -> None:
    """Its own processes do not wait: an evaluation may iterate the loader of the training."""
    seen = torch.zeros(1, dtype=torch.int64).share_memory_()

    def begin(worker: int) -> None:
        info = get_worker_info()
        assert isinstance(info.dataset, Counted)
        seen[worker] += 1

    gate, items = Gate(), Counted()
    given = loads(items, worker_init_fn=begin, sampler=range(20), multiprocessing_context="fork")
    with gate.over_loaders():
        RepeatingLoader(given, torch.device("cpu")).fetch()
    assert int(seen) == 1
    gate.close()
    assert len(list(given)) == 5
    assert given.worker_init_fn is begin
    assert int(seen) == 2
    gate.open()


def test_a_loader_without_processes_notes_nothing() -> None:
    gate = Gate()
    with gate.over_loaders():
        RepeatingLoader([1, 2], torch.device("cpu")).fetch()
        RepeatingLoader(loads(Counted(), num_workers=0, prefetch_factor=None), torch.device("cpu")).fetch()
    assert gate.worked_s is None
    assert gate.only_in_process, "nothing is made while the clock stands still"
