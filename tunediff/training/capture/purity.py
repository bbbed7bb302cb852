"""Whether a step can be captured: what its code reads from the device or moves on the host."""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tunediff.training.capture.graph import HOST_READS

_OF_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(__file__).parents[2]
_OF_ENGINE = tuple(str(_PACKAGE / name) for name in ("training", "data", "core", "distributed.py"))
_MASKED = {torch.ops.aten.index, torch.ops.aten.index_put_, torch.ops.aten.index_put}


class StepWatch(TorchDispatchMode):
    """Sees a step's operators: host reads, with file and line, and its generators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reasons = list[str]()
        """Why this step cannot be captured, the first reason first."""
        self.generators = dict[int, torch.Generator]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                self.generators[id(value)] = value
        if func.overloadpacket in HOST_READS or _reads_mask(func, args):
            self.object_to("a value is read on the host, as by .item(), bool() or a mask")
        outputs = func(*args, **kwargs)
        if _leaves_device(args, outputs):
            self.object_to("a tensor is copied to the host")
        return outputs

    def object_to(self, what: str, where: str | None = None) -> None:
        """Note a reason, with the line of the user's code that is running."""
        self.reasons.append(f"{what} ({where or _line()})")

    @contextlib.contextmanager
    def waits(self, device: torch.device) -> Iterator[None]:
        """Note whatever else makes the host wait for a GPU inside, as torch's warnings say it."""
        if device.type != "cuda":
            yield
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for one in caught:
            if "called a synchronizing" in str(one.message):
                where = f"{Path(one.filename).name}:{one.lineno}"
                self.object_to("the host waits for the device", where)
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


@contextlib.contextmanager
def unwatched(device: torch.device) -> Iterator[None]:
    """Leave every watch inside: what is done between steps may read from the device."""
    with _disable_current_modes():
        if device.type != "cuda":
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _reads_mask(func: Any, args: Any) -> bool:
    """Return whether an index is a mask, whose length the host has to know.

    A single value is filled in where the mask holds, without that.
    """
    if func.overloadpacket not in _MASKED or (len(args) > 2 and args[2].numel() == 1):
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def _leaves_device(args: Any, outputs: Any) -> bool:
    if not isinstance(outputs, Tensor) or outputs.device.type != "cpu":
        return False
    return any(isinstance(one, Tensor) and one.device.type != "cpu" for one in args)


def _line() -> str:
    """Return file and line of the innermost code that is neither torch's nor the engine's."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if not _is_internal(frame):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "in the backward pass"


def _is_internal(frame: types.FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((_OF_TORCH, *_OF_ENGINE, "<")) or file == contextlib.__file__


# ---- host state
def loop_numbers() -> tuple[dict[str, Any], str]:
    """Return plain values of the frame that takes batches, its `self` and module, and its line.

    Its Python code does not run in a replay: what changes there in every step may matter in a later
    one. What is kept and generators are compared in replays themselves.
    """
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and _is_internal(frame):
        frame = frame.f_back
    values: dict[str, Any] = {}
    if frame is None:
        return values, ""
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    scopes: list[tuple[str, Mapping[str, Any]]] = [("", frame.f_globals), ("", frame.f_locals)]
    if "self" in frame.f_locals:
        scopes.append(("self.", getattr(frame.f_locals["self"], "__dict__", {})))
    for prefix, scope in scopes:
        for name, value in list(scope.items()):
            if not name.startswith("__") and (plain := _plain(value)) is not None:
                values[prefix + name] = plain
    return values, place


def _plain(value: Any) -> Any:
    """Return a number or a text itself, the length of a container, and None for all else."""
    if isinstance(value, bool | int | float | str):
        return value
    return f"{len(value)} items" if type(value) in (list, dict, set) else None
