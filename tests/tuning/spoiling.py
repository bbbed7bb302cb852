"""Ways in which a training may change its process, and what would show in the next one."""

import atexit
import builtins
import gc
import locale
import logging
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import warnings

import numpy
import torch
from torch import nn
from torch.backends import cuda, cudnn

RAISES = numpy.seterr  # before anything patches it


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
    "default device": lambda: torch.set_default_device("meta"),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "gradients off": lambda: torch.set_grad_enabled(False),
    "autocast left open": _leave_autocast_open,
    "CUDA settings": lambda: (
        setattr(cudnn, "benchmark", True), setattr(cuda.matmul, "allow_tf32", True), cuda.enable_flash_sdp(False),
    ),
    "mkldnn off": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "denormal numbers": lambda: torch.set_flush_denormal(True),
    "module hook": lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "patched function": lambda: setattr(nn.functional, "relu", nn.functional.gelu),
    "patched class": lambda: setattr(nn.Linear, "forward", lambda self, x: x),
    "dynamo settings": lambda: setattr(torch._dynamo.config, "recompile_limit", 1),
    "generators": lambda: (torch.manual_seed(5), numpy.random.seed(5), random.seed(5)),
    "environment": lambda: os.environ.update(SPOILED="1"),
    "working directory": lambda: os.chdir("/"),
    "sys.path": lambda: sys.path.insert(0, "/nowhere"),
    "modules": lambda: sys.modules.update(spoiled=sys),
    "builtins": lambda: setattr(builtins, "spoiled", True),
    "logging": lambda: logging.disable(logging.CRITICAL),
    "numpy errors": lambda: RAISES(all="raise"),
    "warnings": lambda: warnings.simplefilter("error"),
    "signals": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "garbage collector": gc.disable,
    "recursion": lambda: sys.setrecursionlimit(5000),
    "running thread": _start_thread,
    "process of its own": _start_process,
    "umask": lambda: os.umask(0o077),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
    "limits": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (99, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
    "hook for errors": lambda: setattr(sys, "excepthook", lambda *_: None),
    "trace": lambda: sys.settrace(lambda *_: None),
    "print options": lambda: numpy.set_printoptions(precision=2),
    "socket timeout": lambda: socket.setdefaulttimeout(3.0),
    "matrix precision": lambda: torch.set_float32_matmul_precision("medium"),
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
    model = nn.Linear(2, 2, device="cpu")
    return {
        "torch": (
            torch.get_num_threads(), torch.get_default_dtype(), str(torch.get_default_device()), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(), torch.is_autocast_enabled("cpu"),
            torch.backends.mkldnn.enabled, cudnn.benchmark, cuda.matmul.allow_tf32, cuda.flash_sdp_enabled(),
            torch._dynamo.config.recompile_limit, float(torch.tensor(1e-40, device="cpu") * 1.0),
        ),
        "patches": (
            len(nn.modules.module._global_forward_hooks), nn.functional.relu.__name__, nn.Linear.forward.__name__,
        ),
        "drawn": (torch.rand(2, device="cpu").tolist(), numpy.random.rand(),
            model(torch.ones(2, device="cpu")).tolist()),
        "python": (
            dict(os.environ), os.getcwd(), sys.path, sorted(sys.modules), hasattr(builtins, "spoiled"), gc.isenabled(),
            sys.getrecursionlimit(), logging.root.manager.disable, numpy.geterr(), warnings.filters[:1],
            signal.getsignal(signal.SIGTERM), threading.active_count(), atexit._ncallbacks(),
        ),
        "system": (
            umask(), locale.setlocale(locale.LC_ALL), resource.getrlimit(resource.RLIMIT_NOFILE), sys.excepthook, sys.gettrace(),
            numpy.get_printoptions()["precision"], socket.getdefaulttimeout(), torch.get_float32_matmul_precision(), os.nice(0),
        ),
    }  # fmt: skip


def describe(connection, content):
    connection.send({name: repr(values) for name, values in _described().items()})


def spoil(connection, way):
    """Change this process, and show that it would be noticed."""
    before = {name: repr(values) for name, values in _described().items()}
    WAYS[way]()
    connection.send(before != {name: repr(values) for name, values in _described().items()})
