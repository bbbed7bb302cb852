"""What processes have prepared that train, check or judge: they are forked from templates."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tunediff import config as cfg
from tunediff.core import machine, trial_record
from tunediff.data import images, loader
from tunediff.data.knobs import Data

_asked = list[int]()
"""Numbers of threads that the user's file has set while it was imported; the last one holds."""
_by_default = 0
"""torch's own number of threads, in a process that was prepared."""


def _threads(default: int | None = None) -> int:
    """Return torch's number of threads in a run."""
    return _asked[-1] if _asked else default or machine.threads() or _by_default


def prepare_base() -> None:
    """Import what templates import of the environment: no trial pays for it."""
    # `torch.cuda.is_available()` at the top of a file then asks without starting CUDA
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for module in ("torch._dynamo", "torchvision", "tunediff.training.engine"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def prepare(workload: str) -> str:
    """Import what trials of a workload need; return why a fork is not safe, '' if it is."""
    global _by_default
    _by_default = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of OpenMP does not survive a fork
    random.seed(0)  # what a file draws while it is imported begins alike on both sides
    np.random.seed(0)
    torch.manual_seed(0)
    draws = list[str]()
    root = Path(workload).absolute().parent
    with (
        contextlib.suppress(cfg.ConfigError),  # each run raises it, which ends its trial
        _noted(draws, root),
        mock.patch.object(torch, "set_num_threads", _asked.append),
        mock.patch.object(torch, "get_num_threads", _threads),
    ):
        cfg.find(workload).code  # noqa: B018 – imports it
    if _has_started_cuda():
        return "it has started CUDA"
    return f"{draws[0]} draws a seed of its own while it is imported" if draws else ""


@contextlib.contextmanager
def _noted(draws: list[str], root: Path) -> Iterator[None]:
    """Note which lines of files below `root` ask the system for random numbers meanwhile: a draw
    that one template keeps would be the same in all runs of a side: a difference to a paired test.

    Python, numpy and torch ask through these functions; what a library draws while a file imports
    it is none of the file's.
    """

    def watched(function: Callable[..., Any], seeds: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def asked(*args: Any, **kwargs: Any) -> Any:
            if not seeds or (args[1:] or tuple(kwargs.values())) in ((), (None,)):
                draws.extend(_line_of(root))
            return function(*args, **kwargs)

        return asked

    places = ((os, "urandom"), (random, "_urandom"), (torch, "seed"), (random.Random, "seed"))
    with contextlib.ExitStack() as stack:
        for place, name in places:
            function = watched(getattr(place, name), seeds=place is random.Random)
            stack.enter_context(mock.patch.object(place, name, function))
        yield


def _line_of(root: Path) -> Iterator[str]:
    """Yield the line of a file below `root` that calls now, unless a module that it imports does."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" not in (name := frame.f_code.co_filename):
        if Path(name).is_relative_to(root) and "site-packages" not in name:
            yield f"{Path(name).name}:{frame.f_lineno}"
            return
        frame = frame.f_back  # type: ignore[assignment]


def _has_started_cuda() -> bool:
    """Return whether this process has started CUDA's driver, which no fork can use.

    `torch.cuda.is_available()` at the top of a file starts it, and torch does not know of that.
    """
    for descriptor in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # the one that lists the folder
            if "nvidia-uvm" in os.readlink(f"/proc/self/fd/{descriptor}"):
                return True
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def before_run(folder: str) -> None:
    """Read the data of the trial in `folder`, whose memory all runs share, and start the server
    that all loader processes are forked from."""
    config = cfg.configuration_of(trial_record.read_begun(Path(folder)))
    if isinstance(data := getattr(config.knobs, "data", None), Data):
        images.load(data)
    if config.loader.workers > 0:
        loader.use_fork_server()
        multiprocessing.forkserver.ensure_running()


def begin(threads: int | None = None) -> None:
    """Let this process, which was forked from a template, use what that has prepared. `threads`:
    torch's, unless the user's file says how many; None: its share of the cores."""
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is not None:  # that of the template, which watches it
        server.ensure_running = lambda: None
    loader.before_processes = functools.cache(_start_resource_tracker)
    if _by_default:
        torch.set_num_threads(_threads(threads))


def _start_resource_tracker() -> None:
    """Start the process that removes the named semaphores of this run's queues.

    A run ends at once, or is killed, and its process group with it, in which Python's own tracker
    would be: it warned of what it was about to remove, or was killed first, and the names stayed in
    /dev/shm. This one has a session of its own and ends after the run and its loader processes.
    """
    reading, writing = os.pipe()
    program = f"from multiprocessing.resource_tracker import main; main({reading})"
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    nothing = subprocess.DEVNULL
    tracker.process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-W", "ignore", "-c", program], pass_fds=[reading],
        stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True,
    )  # fmt: skip
    os.close(reading)
    tracker._fd, tracker._pid = writing, tracker.process.pid
