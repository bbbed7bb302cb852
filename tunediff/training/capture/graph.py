"""A captured step as a CUDA graph, and the stream in which it is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

_aten = torch.ops.aten
HOST_READS = {
    _aten._local_scalar_dense, _aten.is_nonzero, _aten.nonzero, _aten.masked_select, _aten.equal,
    _aten._unique2, _aten.unique_dim, _aten.unique_consecutive,
}  # fmt: skip
"""Operators whose result, or its shape, Python gets to know: the host waits for the device."""


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
