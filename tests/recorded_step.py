"""A captured step on a CPU: a recording that behaves like a CUDA graph."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tunediff.training.capture.step_capture import HOST_READS


class RecordedStep(TorchDispatchMode):
    """A CUDA graph's semantics on a CPU: each operator runs again on the same storage.

    No faster than the step itself. Outputs stay where they were when the step was recorded; reading a value on the host
    raises `RuntimeError`, as CUDA does under capture.
    """

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = list[tuple[Any, Any, Any, list[Any]]]()

    def capturing(self) -> contextlib.AbstractContextManager[object]:
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in HOST_READS:
            raise RuntimeError(f"operation not permitted when a step is captured: {func}")
        outputs = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_leaves(outputs)))
        return outputs

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            for recorded, new in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
                # A view, or an operator in place, gives the recorded storage again
                if isinstance(recorded, Tensor) and recorded.data_ptr() != new.data_ptr():
                    recorded.copy_(new)
