"""Ways in which a training may change its process, and what would show in the next one."""

import atexit
import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import time

import numpy
import torch
from torch import nn


def _leave_autocast_open():
    torch.autocast("cpu", torch.bfloat16).__enter__()


def _start_thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def _start_process():
    if os.fork() == 0:
        time.sleep(60)


WAYS = {
    "threads of torch": lambda: torch.set_num_threads(1),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "autocast left open": _leave_autocast_open,
    "mkldnn off": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "module hook": lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "patched class": lambda: setattr(nn.Linear, "forward", lambda self, x: x),
    "dynamo settings": lambda: setattr(torch._dynamo.config, "recompile_limit", 1),
    "generators": lambda: (torch.manual_seed(5), numpy.random.seed(5), random.seed(5)),
    "environment": lambda: os.environ.update(SPOILED="1"),
    "working directory": lambda: os.chdir("/"),
    "modules": lambda: sys.modules.update(spoiled=sys),
    "logging": lambda: logging.disable(logging.CRITICAL),
    "signals": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "garbage collector": gc.disable,
    "running thread": _start_thread,
    "process of its own": _start_process,
    "umask": lambda: os.umask(0o077),
    "limits": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (99, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
    "priority": lambda: os.nice(1),
    "exit handler": lambda: atexit.register(lambda: os._exit(7)),
}  # fmt: skip


def umask():
    before = os.umask(0)
    os.umask(before)
    return before


def prepare(options):
    import torch._dynamo  # noqa: F401


def _described():
    """What a training would meet in this process."""
    return {
        "torch": (
            torch.get_num_threads(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"),
            torch.backends.mkldnn.enabled, torch._dynamo.config.recompile_limit,
        ),
        "patches": (len(nn.modules.module._global_forward_hooks), nn.Linear.forward.__name__),
        "drawn": (torch.rand(2).tolist(), numpy.random.rand(), nn.Linear(2, 2)(torch.ones(2)).tolist()),
        "python": (
            dict(os.environ), os.getcwd(), sorted(sys.modules), gc.isenabled(), logging.root.manager.disable,
            signal.getsignal(signal.SIGTERM), threading.active_count(), atexit._ncallbacks(),
        ),
        "system": (umask(), resource.getrlimit(resource.RLIMIT_NOFILE), os.nice(0)),
    }  # fmt: skip


def describe(connection, content):
    connection.send({name: repr(values) for name, values in _described().items()})


def spoil(connection, way):
    """Change this process, and show that it would be noticed."""
    before = {name: repr(values) for name, values in _described().items()}
    WAYS[way]()
    connection.send(before != {name: repr(values) for name, values in _described().items()})
