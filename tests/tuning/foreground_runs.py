"""What the runs of `test_foreground.py` do."""

import logging
import os
import signal

import torch

from tunediff.core.trial_record import NotFiniteError


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
    lines.say("half-way", "point", value=1)
    lines.aside.say("aside")
    logging.getLogger("tunediff.training.x").warning("a %s", "warning")
    return content, os.getpid()


def fail(name, lines):
    raise ERRORS[name]


def die(content, lines):
    os.kill(os.getpid(), signal.SIGKILL)


def threads(content, lines):
    return torch.get_num_threads()
