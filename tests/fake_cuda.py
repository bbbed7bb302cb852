"""A GPU that is not there: tensors of "cuda" lie on the CPU, and `torch.cuda` answers as on a GPU.

So a test on a CPU runs the lines that only a GPU executes: streams, events, generators, memory statistics and graphs are
objects that note what they are told and refuse what CUDA refuses. It says nothing about kernels or speed.
"""

import contextlib
import itertools
import types
import warnings
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tests.recorded_step import RecordedStep
from tunediff.distributed import World

DEVICE = torch.device("cuda", 0)
GPU = World(0, 1, DEVICE)
MIB = 2**20


def _on_cpu(value):
    is_device = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_device or (isinstance(value, str) and value.startswith("cuda")) else value


class Placed(TorchFunctionMode):
    """Makes tensors of "cuda" on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **kwargs)


class Generator(torch.Generator):
    """A generator of the GPU."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls, device="cpu")
        made.named = torch.device(device)
        return made

    device = property(lambda self: self.named)


class Stream:
    """Notes which streams it waits for."""

    def __init__(self, device=None):
        self.waits_for = []

    def wait_stream(self, other):
        self.waits_for.append(other)

    def is_capturing(self):
        return Cuda.capturing


class Event:
    """A moment of a device that is behind its host: complete when it is waited for, and all before it."""

    count, done = itertools.count(1), 0

    def __init__(self, enable_timing=False, external=False):
        self.number, self.external = 0, external

    def record(self):
        assert self.external or not Cuda.capturing, "torch: only external events are timed in a graph"
        self.number = next(Event.count)

    def synchronize(self):
        Event.done = max(Event.done, self.number)

    def elapsed_time(self, end):
        assert self.external or end.number <= Event.done, "torch: both events must be completed"
        return 1.0 * (end.number - self.number)


class Graph(RecordedStep):
    """A CUDA graph: draws anew from the generators that it knows."""

    def __init__(self):
        super().__init__()
        self.generators = []

    def register_generator_state(self, generator):
        self.generators.append(generator)


class Cuda:
    """The state of the device."""

    capturing = False

    def __init__(self):
        self.default = self.current = Stream()
        self.generator = torch.Generator()
        self.sync_mode, self.sync_modes, self.ranges, self.recorded = 0, [], [], []

    @contextlib.contextmanager
    def graph(self, graph, stream, capture_error_mode):
        assert stream is self.current is not self.default, "CUDA: the legacy stream cannot be captured"
        Cuda.capturing = True
        try:
            with graph:
                yield
        finally:
            Cuda.capturing = False

    def set_sync_debug_mode(self, mode):
        self.sync_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)
        self.sync_modes.append(self.sync_mode)

    def get_rng_state(self, device=None):
        if self.sync_mode:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return self.generator.get_state()


@contextlib.contextmanager
def fake_cuda():
    """Yield a `Cuda` that is there inside."""
    cuda = Cuda()

    def record_stream(tensor, stream):
        cuda.recorded.append((tensor.data_ptr(), stream))

    properties = types.SimpleNamespace(name="fake", total_memory=2**34, major=9, minor=0, uuid="1234")
    answers = {
        "is_available": lambda: True, "is_bf16_supported": lambda *_: True, "device_count": lambda: 1,
        "is_initialized": lambda: False, "init": lambda: None, "synchronize": lambda *_: None,
        "empty_cache": lambda: None, "reset_peak_memory_stats": lambda *_: None, "set_device": lambda *_: None,
        "max_memory_allocated": lambda *_: 100 * MIB, "max_memory_reserved": lambda *_: 200 * MIB,
        "memory_reserved": lambda *_: 200 * MIB, "memory_allocated": lambda *_: 100 * MIB,
        "mem_get_info": lambda *_: (2**33, 2**34), "get_device_name": lambda *_: "fake",
        "get_device_properties": lambda *_: properties, "manual_seed": cuda.generator.manual_seed,
        "manual_seed_all": cuda.generator.manual_seed, "get_rng_state": cuda.get_rng_state,
        "set_rng_state": lambda state, device=None: cuda.generator.set_state(state),
        "Event": Event, "Stream": Stream, "CUDAGraph": Graph, "graph": cuda.graph,
        "current_stream": lambda *_: cuda.current, "default_stream": lambda *_: cuda.default,
        "set_stream": lambda stream: setattr(cuda, "current", stream),
        "is_current_stream_capturing": lambda: Cuda.capturing,
        "set_sync_debug_mode": cuda.set_sync_debug_mode, "get_sync_debug_mode": lambda: cuda.sync_mode,
        "nvtx.range_push": cuda.ranges.append, "nvtx.range_pop": lambda: None,
    }  # fmt: skip
    others = {
        "accelerator.current_stream": answers["current_stream"], "_C._host_emptyCache": answers["empty_cache"],
        "Generator": Generator, "Tensor.record_stream": record_stream,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", answer))
        for name, answer in others.items():
            stack.enter_context(mock.patch(f"torch.{name}", answer, create=True))
        stack.enter_context(Placed())
        yield cuda
