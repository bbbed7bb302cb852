"""Whether a step can be captured: what its code reads from the device or moves on the host."""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tunediff.training.capture.steps import HOST_READS

_PACKAGE = Path(__file__).parents[2]
_INTERNAL = (
    str(Path(torch.__file__).parent), contextlib.__file__, "<",
    *(str(_PACKAGE / name) for name in ("training", "data", "core", "distributed.py")),
)  # fmt: skip
"""How the paths of files begin whose code is torch's or the engine's."""
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


# ---- host state
def loop_numbers() -> dict[str, Any]:
    """Return plain values and the lengths of containers in the frame that takes batches, its module
    and its `self`, by name.

    Its Python code does not run in a replay: what changes there in every step may matter in a later
    one. What is kept and generators are compared in replays themselves.
    """
    if (frame := _users_frame()) is None:
        return {}
    own = getattr(frame.f_locals.get("self"), "__dict__", {})
    scope = {**frame.f_globals, **frame.f_locals, **{f"self.{name}": own[name] for name in own}}
    sizes = {name: len(one) for name, one in scope.items() if type(one) in (list, dict, set)}
    return sizes | {
        name: one for name, one in scope.items() if isinstance(one, bool | int | float | str)
    }


def _line() -> str:
    frame = _users_frame()
    if frame is None:
        return "in the backward pass"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _users_frame() -> types.FrameType | None:
    """Return the frame of the innermost code that is neither torch's nor the engine's."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
    return frame
