"""A captured step as a CUDA graph, and the stream in which it is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten
HOST_READS = {
    _aten._local_scalar_dense, _aten.is_nonzero, _aten.nonzero, _aten.masked_select, _aten.equal,
    _aten._unique2, _aten.unique_dim, _aten.unique_consecutive,
}  # fmt: skip
"""Operators whose result, or its shape, Python gets to know: the host waits for the device."""


class StepGraph(Protocol):
    """A step that was made once and can be made again without its Python code.

    Python's numbers and the places of tensors stay; random numbers are drawn anew.
    """

    def capturing(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the step to capture is made."""
        ...

    def replay(self) -> None:
        """Make the step again."""
        ...


MakeGraph = Callable[[Iterable[torch.Generator]], StepGraph]
"""Makes an empty graph for a step that draws from these generators."""


class CudaStepGraph:
    """A CUDA graph of the step, captured on the current stream, which is not the default one."""

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            if generator.device.type == "cuda":
                self._graph.register_generator_state(generator)

    def capturing(self) -> contextlib.AbstractContextManager[object]:
        # Loaders and NVML call CUDA in other threads meanwhile, which only "thread_local" allows
        return torch.cuda.graph(
            self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        )

    def replay(self) -> None:
        self._graph.replay()


def use_side_stream(device: torch.device) -> None:
    """Run everything from here on in a stream of its own, warm-ups and evaluations included.

    A gradient accumulator that first ran on the default stream waits for it in later steps, which
    no capture allows.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    torch.cuda.set_stream(stream)


def leave_side_stream(device: torch.device) -> None:
    """Go on in the default stream, after all that was queued in the other one."""
    default = torch.cuda.default_stream(device)
    default.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(default)


def await_default_stream(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Order what was queued in the default stream, as by threads of a user's loader, before what
    follows here, and keep the memory of these tensors of the device until that is done."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        for tensor in tensors:
            tensor.record_stream(stream)
