"""Number formats: autocast, loss scaling, and when a loss that is not finite is the end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.backends import cudnn

from tunediff.config.systems import Precision

_backends: Any = torch.backends
_SCOPES = (
    _backends,
    _backends.cudnn,
    _backends.cuda.matmul,
    _backends.cudnn.conv,
    _backends.cudnn.rnn,
    _backends.mkldnn.matmul,
    _backends.mkldnn.conv,
    _backends.mkldnn.rnn,
)
"""Where torch takes an `fp32_precision`; `none`: a wider one before it counts."""
_CONVOLUTIONS = 3


def set_backends(precision: Precision, device: str) -> None:
    """Set the process's float32 formats, and cuDNN's choices where `device` is "cuda"."""
    _set_float32(precision.matmul, precision.conv_tf32)
    if device == "cuda":
        cudnn.benchmark = precision.cudnn_benchmark


def _set_float32(matmul: str, conv_tf32: bool) -> None:
    """Set the formats that libraries read, and clear each contradicting `fp32_precision`."""
    for scope in _SCOPES:
        scope.fp32_precision = "none"
    torch.set_float32_matmul_precision(matmul)
    cudnn.allow_tf32 = conv_tf32


@contextlib.contextmanager
def float32_formats(matmul: str, conv_tf32: bool) -> Iterator[None]:
    """Compute float32 products and convolutions in these formats, whatever was set before.

    `matmul`: as `torch.set_float32_matmul_precision` has it.
    """
    before = []
    for scope in _SCOPES:  # "none" first in the wider ones, to read what a scope itself has
        before.append(scope.fp32_precision)
        scope.fp32_precision = "none"
    # raises where an `fp32_precision` contradicts it
    matmul_before = torch.get_float32_matmul_precision()
    _set_float32(matmul, conv_tf32)
    try:
        yield
    finally:
        _set_float32(matmul_before, before[_CONVOLUTIONS] == "tf32")
        for scope, value in zip(_SCOPES, before, strict=True):
            scope.fp32_precision = value


def fastest_matmul(precision: Precision, device: str) -> str:
    """Return the `matmul` format of float32's fastest units; convolutions may have others."""
    tf32 = device == "cuda" and precision.conv_tf32 and precision.matmul == "highest"
    return "high" if tf32 else precision.matmul


@contextlib.contextmanager
def evaluation_precision(
    device: torch.device, precision: Literal["fp32", "tf32", "bf16"] = "fp32"
) -> Iterator[None]:
    """Compute in IEEE float32 or another `precision`, whatever format a trial trains in.

    All trials of a search are judged in this one format.
    """
    tf32 = precision == "tf32"
    with (
        float32_formats("high" if tf32 else "highest", tf32),
        torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
    ):
        yield


class Amp:
    """Autocast and gradient scaling of one training."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.device = device
        self.dtype = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision.amp]
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision.amp == "fp16")
        self.patience = 25 if self.scaler.is_enabled() else 1
        """Steps in a row whose loss is not finite that end a training. One bad loss is the end
        without scaling: the weights are NaN by the next step. With scaling, bad losses are how the
        scale is found; only a long streak of them means that no scale helps."""
        self.fastest_matmul = fastest_matmul(precision, device.type)
        set_backends(precision, device.type)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of forward passes."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


# ---- weights under autocast, in a captured step
_CAST = "_cast_weights"
"""Attribute of a layer with its cast weights, by name, while its model is called."""


class _CastTogether(torch.autograd.Function):
    """Casts of many tensors by one operation, and of their gradients by another one."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_cast(tensors, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cast = iter(_cast([one for one in gradients if one is not None], torch.float32))
        return (None, *(next(cast) if one is not None else None for one in gradients))


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    cast = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(cast, list(tensors))
    return cast


def cast_weights_together(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model's forward pass cast the weights of its products and convolutions at once.

    Autocast casts each of them by a kernel of its own, and each gradient back: 600 small ones of
    the 1,800 kernels in a captured step of the largest shipped model. The numbers are the same.
    """
    layers = [one for one in model.modules() if type(one) in (nn.Linear, nn.Conv1d, nn.Conv2d)]
    for layer in layers:
        layer.forward = functools.partial(_with_cast_weights, layer, layer.forward, dtype)
    model.forward = functools.partial(_casting_first, model.forward, layers, dtype)


def _casting_first(
    forward: Callable[..., Any], layers: Sequence[nn.Module], dtype: torch.dtype, *inputs: Any,
    **named: Any,
) -> Any:  # fmt: skip
    """Cast the weights of all layers, and call a model that uses them."""
    weights = {id(one): one for layer in layers for one in layer.parameters(recurse=False)}
    device = next(iter(weights.values())).device.type if weights else "cpu"
    if not (weights and torch.is_grad_enabled() and _casts_to(dtype, device)):
        return forward(*inputs, **named)
    cast = dict(zip(weights, _CastTogether.apply(dtype, *weights.values()), strict=True))
    for layer in layers:
        own = layer.named_parameters(recurse=False)
        layer.__dict__[_CAST] = {name: cast[id(weight)] for name, weight in own}
    try:
        return forward(*inputs, **named)
    finally:
        for layer in layers:
            layer.__dict__.pop(_CAST, None)


def _with_cast_weights(
    layer: nn.Module, forward: Callable[..., Any], dtype: torch.dtype, *inputs: Any, **named: Any
) -> Any:
    """Call a layer with its cast weights, where autocast would cast them."""
    cast, own = layer.__dict__.get(_CAST), dict(layer._parameters)
    if cast is None or not _casts_to(dtype, next(iter(cast.values())).device.type):
        return forward(*inputs, **named)
    layer._parameters.update(cast)
    try:
        return forward(*inputs, **named)
    finally:
        layer._parameters.update(own)


def _casts_to(dtype: torch.dtype, device: str) -> bool:
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype
