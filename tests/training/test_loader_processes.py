"""Loader processes stand still while the clock does: no batch is made for nothing, and nothing waits for ever."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers import toy, train
from tests.toy.train import begin, loss_of
from tunediff import steps
from tunediff.training import state

ITEMS, BATCH = 64, 8


def await_stop(pid):
    """Return a process once it stands still: the signal may take a moment."""
    process = psutil.Process(int(pid))
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    return process


class Items(Dataset):
    """Counts the items that were made, each of which takes a while."""

    def __init__(self):
        self.made = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        self.made += 1
        time.sleep(0.002)
        return torch.full((4,), index / ITEMS), torch.full((1,), index / ITEMS)


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return map(self.items.__getitem__, itertools.cycle(range(ITEMS)))


def loads(items, **options):
    return DataLoader(items, **{"batch_size": BATCH, "num_workers": 1, "prefetch_factor": 8} | options)


def iterated(items):
    """A loader whose processes live already."""
    made = loads(items, persistent_workers=True)
    assert len(list(made)) == ITEMS // BATCH
    return made


LOADERS = {
    "non-persistent": loads,
    "persistent": lambda items: loads(items, persistent_workers=True),
    "fork server": lambda items: loads(items, multiprocessing_context="forkserver"),
    "iterated": iterated,
    "stream": lambda items: loads(Stream(items)),
}


def trained(loader, judge, **how):
    """Train 12 steps, judged by `judge(loader)` after 4, 8 and 12 of them."""

    def body(trial):
        net, optimizer = begin(trial)
        trial.evaluate_with(lambda: judge(loader) or {"error": 1.0})
        batches = steps(trial, loader) if isinstance(loader, DataLoader) else trial.batches(loader)
        for batch in batches:
            trial.step(loss_of(net, batch), optimizer)

    config = toy(loader__workers=1, loader__prefetch_factor=8, evaluation__points=3, loader__batch_size=BATCH)
    return train(config, samples=12 * BATCH, evaluates=True, body=body, **how)


SLOW = ("fork server", "stream")


def nightly(kind):
    return pytest.param(kind, marks=pytest.mark.nightly)


@pytest.mark.parametrize("kind", [*(nightly(kind) if kind in SLOW else kind for kind in LOADERS), "ours"])
def test_loader_processes_make_no_item_while_the_model_is_judged(kind):
    """A loader of the evaluation's own works meanwhile, and all processes end with the training."""
    before, items, seen = multiprocessing.active_children(), Items(), []

    def judge(loader):
        made = int(items.made)
        assert len(list(loads(Items()))) == ITEMS // BATCH
        assert int(items.made) == made
        seen.append(made)

    loader = LOADERS[kind](items) if kind != "ours" else items
    mine = multiprocessing.active_children() if kind == "iterated" else before
    assert trained(loader, judge).steps == 12
    assert seen == sorted(set(seen)), "between two evaluations they go on"
    del loader
    assert set(multiprocessing.active_children()) <= {*before, *mine}


@pytest.mark.parametrize("kind", ["persistent", nightly("iterated")])
def test_an_evaluation_may_run_through_the_loader_of_the_training(kind):
    """Its own iteration: it neither waits for the processes that stand still, nor moves the training's place."""
    batches = []

    def judge(loader):
        batches.append(len(list(loader)))

    plain = trained(LOADERS[kind](Items()), lambda loader: None)
    outcome = trained(LOADERS[kind](Items()), judge)
    assert batches == [ITEMS // BATCH] * 3
    assert [point.loss for point in outcome.points] == [point.loss for point in plain.points]


@pytest.mark.parametrize("kind", ["persistent", "ours"])
def test_processes_end_after_an_error_while_they_stand_still(kind):
    before = multiprocessing.active_children()

    def judge(loader):
        raise ArithmeticError

    loader = LOADERS[kind](Items()) if kind != "ours" else Items()
    with pytest.raises(ArithmeticError) as raised:
        trained(loader, judge)
    del loader, raised
    assert set(multiprocessing.active_children()) <= set(before)


def test_processes_stand_still_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """Also one between two evaluations, which stops the clock too."""
    others, saved = multiprocessing.active_children(), []

    def save(content, folder):
        workers = [one for one in multiprocessing.active_children() if one not in others]
        saved.append([await_stop(worker.pid) for worker in workers])

    monkeypatch.setattr(state, "save", save)
    trained(LOADERS["persistent"](Items()), lambda loader: None, folder=tmp_path, checkpoint_every_s=0.0)
    assert len(saved) > 3
    assert all(saved)


KILLED = """
import multiprocessing, time
from tests.training.test_loader_processes import Items, LOADERS, trained

def judge(loader):
    print(*(one.pid for one in multiprocessing.active_children()), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    trained(LOADERS[{kind!r}](Items()) if {kind!r} in LOADERS else Items(), judge)
"""


@pytest.mark.parametrize("kind", ["non-persistent", "ours"])
def test_processes_that_stand_still_end_with_a_killed_training(kind):
    script = KILLED.format(kind=kind)
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    workers = [await_stop(pid) for pid in run.stdout.readline().split()]
    assert workers
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        time.sleep(0.01)
