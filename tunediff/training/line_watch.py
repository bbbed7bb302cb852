"""Name the line of a user's `train` that changes weights after its last evaluation."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from tunediff.training import weights

MOST_LINES = 200
"""Lines that are watched at most; each costs a digest of all weights."""


class LineWatch:
    """Looks at the weights of a model after each line of a function that is running."""

    def __init__(self, model: nn.Module, function: Callable[..., object]) -> None:
        self._model, self._code = model, getattr(function, "__code__", None)
        self._before, self._number, self._lines = self._state(), 0, 0
        self.line = ""
        """The first line that has written weights, `mine.py:34: net.load_state_dict(best)`."""

    def start(self) -> None:
        """Watch from the function's present line on. The caller ends it: `sys.settrace(None)`."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        if frame is not None and sys.gettrace() is None:  # a debugger stays
            self._number = frame.f_lineno
            frame.f_trace = self._trace
            sys.settrace(lambda *_: None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        self._lines += 1
        now = self._state()
        if now != self._before:
            path = frame.f_code.co_filename
            text = linecache.getline(path, self._number).strip()
            self.line = f"{Path(path).name}:{self._number}: {text}"
        if self.line or self._lines >= MOST_LINES or event == "return":
            sys.settrace(None)
            return None
        self._number = frame.f_lineno
        return self._trace

    def _state(self) -> tuple[object, ...]:
        """Return what any write changes; of equal values too, as the best weights may be last."""
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        local = {name: getattr(one, "to_local", one.detach)() for name, one in tensors}
        return weights.digest(local), *(one._version for _, one in tensors)
