"""A network's forward pass of an evaluation, captured once and replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch
from torch import Tensor, nn

from tunediff.training.capture.comparison import difference
from tunediff.training.capture.steps import MakeGraph, StepGraph

MOST = 2
"""Graphs of one network: each keeps the memory of its pass."""


@dataclasses.dataclass
class _Captured:
    graph: StepGraph
    inputs: list[Tensor]
    output: Tensor
    addresses: list[int]


class CapturedCall:
    """A network that is called without gradients: eagerly at first, then replayed.

    A sampler calls its network hundreds of times with inputs of one shape. The second call of a
    shape and number format is made eagerly, captured, replayed and compared; what differs, or
    cannot be captured, is called eagerly for good.
    """

    def __init__(self, network: nn.Module, make_graph: MakeGraph) -> None:
        self._network, self._make_graph = network, make_graph
        self._captured = dict[Hashable, _Captured | None]()
        self.refusal = ""
        """Why the network is called eagerly."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        key = _kind(inputs)
        if self.refusal or (key not in self._captured and len(self._captured) >= MOST):
            return self._eager(*inputs)
        if key not in self._captured:
            self._captured[key] = None
            return self._eager(*inputs)
        captured = self._captured[key]
        if captured is None or captured.addresses != self._addresses():
            return self._capture(key, inputs)
        for static, new in zip(captured.inputs, inputs, strict=True):
            static.copy_(new)
        captured.graph.replay()
        return captured.output.clone()  # the next replay overwrites it

    def _eager(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self._network(*inputs)
        return output

    def _capture(self, key: Hashable, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return what this call gives, and have a graph of it afterwards, or a refusal."""
        static, graph = [one.clone() for one in inputs], self._make_graph([])
        with _uncached_autocast(inputs[0].device.type):
            eager, again = self._eager(*inputs), self._eager(*inputs)
            torch.clear_autocast_cache()  # of an autocast within the network
            try:
                with graph.capturing():
                    output = self._eager(*static)
                graph.replay()
            except RuntimeError as error:
                self.refusal = f"capture failed: {' '.join(str(error).split())[:300]}"
                return eager
        self.refusal = difference({"output": eager}, {"output": again}, {"output": output})
        self._captured[key] = _Captured(graph, static, output, self._addresses())
        return eager

    def _addresses(self) -> list[int]:
        tensors = (*self._network.parameters(), *self._network.buffers())
        return [tensor.data_ptr() for tensor in tensors]


def _uncached_autocast(device: str) -> torch.autocast:
    """Return the present autocast without its cache of cast weights: a graph that reads the cache
    has no cast of its own, and would go on with weights of then, in memory that is freed."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return torch.autocast(device, dtype, enabled, cache_enabled=False)


def _kind(inputs: tuple[Tensor, ...]) -> Hashable:
    """Return what a graph is for: shapes, and the number format of the pass."""
    device = inputs[0].device.type
    formats = (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )
    return formats, tuple((one.shape, one.dtype, one.device) for one in inputs)
