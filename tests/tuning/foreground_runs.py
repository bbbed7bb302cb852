"""What the runs of `test_foreground.py` do."""

import itertools
import logging
import os
import signal
from multiprocessing import synchronize
from pathlib import Path
from unittest import mock

import torch

from tunediff.config.systems import Loader
from tunediff.core.trial_record import NotFiniteError
from tunediff.data import loader


class TornError(Exception):
    """Cannot be read by another process."""

    def __init__(self, one, two):
        super().__init__(one)


ERRORS = {
    "of the package": NotFiniteError("the loss is not finite"), "of python": ZeroDivisionError("ours"),
    "unreadable": TornError("torn", 2),
}  # fmt: skip


def work(content, lines):
    """Spoil the process, report, and return the content."""
    torch.set_default_dtype(torch.float64)
    os.environ["SPOILED"] = "1"
    lines.say("half-way")
    lines.aside.say("aside")
    logging.getLogger("tunediff.training.x").warning("a %s", "warning")
    return content, os.getpid()


def fail(name, lines):
    raise ERRORS[name]


def die(content, lines):
    os.kill(os.getpid(), signal.SIGKILL)


def semaphores(prefix):
    return [*Path("/dev/shm").glob(f"sem.{prefix}*")]


def load(content, lines):
    """Have a batch of a loader process, through queues whose semaphores have names; then return, or die."""
    prefix, dies = content
    names = (f"/{prefix}-{number}" for number in itertools.count())  # joblib gives them names of its own
    mock.patch.object(synchronize.SemLock, "_make_name", names.__next__).start()
    order = loader.Order(8, 2, 1, 0, 1, 0)
    batches = loader.build(torch.arange(8), Loader(batch_size=2, workers=1), order, torch.device("cpu"))
    batches.fetch()
    count = len(semaphores(prefix))
    if dies:
        die(content, lines)
    return count
