"""How a model's convolutions are fastest here: their memory format, and cuDNN's algorithms."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cudnn

from tunediff.training.capture.graph import MakeGraph
from tunediff.training.hardware import call_seconds

WORTH = 1.05
"""Least gain for which cuDNN times its algorithms, seconds for every shape."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to compute the same convolution."""

    nhwc: bool
    benchmark: bool | None = None
    """Of `cudnn.benchmark`; None: as it is set."""

    @property
    def memory_format(self) -> torch.memory_format:
        """Return the format of weights and feature maps."""
        return torch.channels_last if self.nhwc else torch.contiguous_format

    @property
    def gpu_maps(self) -> int:
        """Return a number of feature maps that no other variant has, nor a usual training: cuDNN
        keeps the algorithm of a shape, however it was chosen."""
        return 129 + 3 * self.nhwc + (None, False, True).index(self.benchmark)

    @contextlib.contextmanager
    def algorithms(self) -> Iterator[None]:
        """Let cuDNN choose as this variant says."""
        before = cudnn.benchmark
        cudnn.benchmark = before if self.benchmark is None else self.benchmark
        try:
            yield
        finally:
            cudnn.benchmark = before


def faster_in_nhwc(
    model: nn.Module,
    setting: bool | str,
    dtype: torch.dtype | None = None,
    make_graph: MakeGraph | None = None,
) -> bool:
    """Return whether to train a model in NHWC, by `memory.channels_last`; `auto` is measured here
    and now. `make_graph`: captures passes, where steps are captured too."""
    if setting != "auto":
        return bool(setting)
    devices = (parameter.device for parameter in model.parameters())
    device = next(devices, torch.device("cpu"))  # a model without parameters has no convolution
    return channels_last_gain(model, device, dtype, make_graph) > 1


def faster_with_benchmark(
    model: nn.Module,
    device: torch.device,
    nhwc: bool,
    dtype: torch.dtype | None,
    make_graph: MakeGraph | None = None,
) -> bool:
    """Return whether cuDNN should time its algorithms, as measured now; False without a GPU."""
    if device.type != "cuda":
        return False
    return benchmark_gain(model, device, nhwc, dtype, make_graph) > WORTH


def channels_last_gain(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype | None,
    make_graph: MakeGraph | None = None,
) -> float:
    """Return NHWC's speed-up of the model's most frequent convolution; 0 without one."""
    return _gain(model, device, dtype, make_graph, Variant(nhwc=False), Variant(nhwc=True))


def benchmark_gain(
    model: nn.Module,
    device: torch.device,
    nhwc: bool,
    dtype: torch.dtype | None,
    make_graph: MakeGraph | None = None,
) -> float:
    """Return the speed-up of the most frequent convolution if cuDNN times algorithms; 0: none."""
    variants = (Variant(nhwc, benchmark=benchmark) for benchmark in (False, True))
    return _gain(model, device, dtype, make_graph, *variants)


@torch.inference_mode(False)
@torch.enable_grad()  # the caller may have switched gradients off
def _gain(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype | None,
    make_graph: MakeGraph | None,
    *variants: Variant,
) -> float:
    """Return how many times as fast the second variant is as the first.

    Measures both passes on feature maps of 16×16, under autocast to `dtype`, in tens of
    milliseconds. The variants take turns, and the best time of each counts. A GPU gets more maps
    and several passes in a row, since a pass of few takes as long as starting it; those of captured
    steps are captured here as well, and replayed.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    kinds = Counter((layer.weight.shape, layer.stride, layer.groups) for layer in layers)
    if not kinds:
        return 0.0
    (shape, stride, groups), _ = kinds.most_common(1)[0]
    cuda = device.type == "cuda"
    passes = 20 if cuda else 1
    seconds: list[list[float]] = [[] for _ in variants]
    for _ in range(8):
        for variant, found in zip(variants, seconds, strict=True):
            maps = variant.gpu_maps if cuda else 8
            x = torch.ones(maps, shape[1] * groups, 16, 16, device=device)
            weight = torch.ones(shape, device=device)
            x, weight = (
                one.to(memory_format=variant.memory_format).requires_grad_() for one in (x, weight)
            )
            call = functools.partial(_both_ways, x, weight, stride, groups, dtype, passes)
            with variant.algorithms():
                found.append(call_seconds(call, device, make_graph) / maps)
    first, second = (min(times[1:]) for times in seconds)  # the first loads libraries
    return first / second


def _both_ways(
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, ...],
    groups: int,
    dtype: torch.dtype | None,
    passes: int,
) -> None:
    """Run a convolution forwards and backwards, so many times."""
    number_format = torch.autocast(
        x.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None
    )
    for _ in range(passes):
        with number_format:
            y = F.conv2d(x, weight, None, stride, weight.shape[-1] // 2, groups=groups)
        y.float().mean().backward()  # type: ignore[no-untyped-call]
