"""A captured step: a CUDA graph, or on a CPU a recording that behaves like one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class RecordedStep(TorchDispatchMode):
    """A CUDA graph's semantics on a CPU: each operator runs again on the same storage.

    It is for tests, and no faster than the step itself. Outputs stay where they were when the step
    was recorded; reading a value on the host raises `RuntimeError`, as CUDA does under capture.
    """

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = list[tuple[Any, Any, Any, list[Any]]]()

    def capturing(self) -> contextlib.AbstractContextManager[object]:
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in HOST_READS:
            raise RuntimeError(f"operation not permitted when a step is captured: {func}")
        outputs = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, tree_leaves(outputs)))
        return outputs

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self._calls:
            for recorded, new in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
                # A view, or an operator in place, gives the recorded storage again
                if isinstance(recorded, Tensor) and recorded.data_ptr() != new.data_ptr():
                    recorded.copy_(new)
