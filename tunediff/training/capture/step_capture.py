"""Capture one whole step across the batch that the loop gets, check it, and replay it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tunediff.core.errors import CaptureFailedError
from tunediff.core.outcomes import CaptureOutcome
from tunediff.core.trial_record import CAPTURED
from tunediff.training.capture.comparison import difference
from tunediff.training.capture.group_values import GroupValues, deferred_schedules
from tunediff.training.capture.steps import (
    Call,
    MakeGraph,
    StepGraph,
    StepLoop,
    Steps,
    leave_side_stream,
)

_PACKAGE = Path(__file__).parents[2]
_INTERNAL = (
    str(Path(torch.__file__).parent), contextlib.__file__, "<",
    *(str(_PACKAGE / name) for name in ("training", "data", "core", "distributed.py")),
)  # fmt: skip
"""How the paths of files begin whose code is torch's or the engine's."""
_aten = torch.ops.aten
HOST_READS = {
    _aten._local_scalar_dense, _aten.is_nonzero, _aten.nonzero, _aten.masked_select, _aten.equal,
    _aten._unique2, _aten.unique_dim, _aten.unique_consecutive,
}  # fmt: skip
"""Operators whose result, or its shape, Python gets to know: the host waits for the device."""
_MASKED = {_aten.index, _aten.index_put_, _aten.index_put}
LEARNING_RATES = (0.5, 1.0, 1.5)
"""Factors of the learning rate in the compared steps: two eager, one replayed."""


@dataclasses.dataclass
class CapturedStep:
    """A captured step, and what belongs to it on the host."""

    graph: StepGraph
    batches: list[Any]
    """Those of its passes; a replay reads them where they lie."""
    loss: Tensor
    """Where each replay leaves its loss."""
    before: list[Call]
    """Called before each replay."""
    after: list[tuple[Call, tuple[Tensor, ...]]]
    """Called after each replay, with copies of the tensors."""


class StepCapture(Steps):
    """A step is made in the workload's loop until it can be captured; then it is replayed.

    The loop's body runs between two batches of a generator, so a capture begins before a batch is
    given out and ends when the next one is requested. Replays then go on inside the generator,
    without giving out a batch. What a captured step cannot hold, schedules and whatever learns on
    the host, is called before and after it: see `Trial.before_step` and `after_step`.
    """

    def __init__(self, loop: StepLoop, make_graph: MakeGraph) -> None:
        super().__init__(loop)
        self.make_graph = self._make_graph = make_graph
        self._values, self._watch = GroupValues(loop.state, loop.device), StepWatch()
        self._captured: CapturedStep | None = None
        self._eager_steps, self._latest = 0, list[Any]()
        self._in_body = self._watching = self._count_due = False
        self.capturing = False
        """Whether the loop's body runs to be captured: an error that it raises is the capture's."""
        self._before, self._after = list[Call](), list[tuple[Call, tuple[Tensor, ...]]]()
        self._moved_before = set[str]()
        self._optimizer: torch.optim.Optimizer | None = None
        self._addresses, self._points, self._constants = list[int](), 0, dict[str, Any]()
        self._contexts = contextlib.ExitStack()  # of the loop's body
        self._schedules = contextlib.ExitStack()
        self._schedules.enter_context(deferred_schedules(self._defer))

    # ---- what the loop's body calls
    def before(self, call: Callable[[], object]) -> None:
        if self.refusal:
            call()
            return
        if self.capturing:
            self._before.append(call)
            return
        in_body, self._in_body = self._in_body, False
        with self._values.outside(), unwatched(self._loop.device):
            numbers = loop_numbers()
            call()
            self._moved_before |= set(_changed(numbers, loop_numbers()))
        self._in_body = in_body

    def after(self, call: Call, *tensors: Tensor) -> None:
        if self.refusal or not self._defer(call, *tensors):
            call(*tensors)

    def _defer(self, call: Call, *tensors: Tensor) -> bool:
        if self._in_body:
            self._after.append((call, tensors))
        return self._in_body

    def note_read(self, name: str) -> None:
        if self._in_body and self._watching:
            self._watch.object_to(f"{name} is read, which trial.before_step may")

    def learning_rate(self, optimizer: torch.optim.Optimizer) -> float:
        self._optimizer = optimizer
        return self._values.number(optimizer)

    # ---- one step
    def step(self) -> Iterator[Any]:
        if self._captured is None and not self.refusal and self._eager_steps >= 2:
            yield from self._capture()
        if self.refusal:
            yield from self._loop.passes()
            return
        batches = self._loop.fetch_batches()
        if (captured := self._captured) is not None and self._replayed(captured, batches):
            return
        if self.refusal:
            yield from self._loop.passes(batches)
        elif self._eager_steps == 1:
            yield from self._watched(batches)
        else:
            yield from self._body(batches)
            self._end_body(batches)

    def _end_body(self, batches: list[Any]) -> None:
        """Count the step that the loop has made, and call what is due after it."""
        self._latest, self._eager_steps = batches, self._eager_steps + 1
        due, self._count_due = self._count_due, False
        if due:
            self._loop.count_step()
        after, self._after = self._after, []
        for call, tensors in after:
            call(*tensors)

    def count(self) -> None:
        """Count a step, once the loop's body is over: that reads the clock, and waits for it."""
        if self._in_body:
            self._count_due = True
        else:
            self._loop.count_step()

    def _body(
        self, batches: list[Any], *inside: contextlib.AbstractContextManager[object]
    ) -> Iterator[Any]:
        """Let the loop make a step `inside` contexts, its optimizers' numbers on the device."""
        self._before, self._after = [], []
        self._values.prepare()
        with self._contexts as stack:
            for context in (self._values(), *inside):
                stack.enter_context(context)
            self._in_body = True
            try:
                yield from self._loop.passes(batches)
            finally:
                self._in_body = False

    def _watched(self, batches: list[Any]) -> Iterator[Any]:
        """Make a step as ever, and look whether it can be captured."""
        watch, constants = self._watch, self._values.constants()
        self._moved_before, before = set(), loop_numbers()
        self._watching = True
        yield from self._body(batches, watch.waits(self._loop.device), watch)
        self._watching = False
        for name in {*_changed(before, loop_numbers())} - self._moved_before:
            watch.object_to(f"{name} changes on the host in every step")
        if self._values.set_inside:
            watch.object_to("a learning rate is set, which trial.before_step may")
        self._refuse_changed(constants)
        self._end_body(batches)
        if watch.reasons:
            self.refuse(watch.reasons[0])

    def _refuse_changed(self, constants: dict[str, Any]) -> None:
        now = self._values.constants()
        for name, value in constants.items():
            if name in now and now[name] != value:
                self.refuse(f"{name} changes, and a captured step has it as a constant")

    # ---- capture
    def refuse(self, reason: str) -> None:
        if self.refusal:
            return
        self.refusal, self._captured = reason, None
        self._schedules.close()
        self._values.release()
        self._loop.decided(CaptureOutcome.REFUSED, reason)

    def fail(self, error: RuntimeError) -> None:
        """Raise `CaptureFailedError`; the journal tells the next process, which trains eagerly."""
        if not self.capturing:
            return
        reason = f"capture failed: {' '.join(str(error).split())[:300]}"
        self._loop.decided(CaptureOutcome.REFUSED, reason)
        raise CaptureFailedError(f"{reason}; the next attempt trains eagerly") from error

    def _capture(self) -> Iterator[Any]:
        """Capture the step and check it; afterwards everything is as it was before."""
        before = self._loop.state.copied()
        with self._loop.undone():
            captured, problem = yield from self._checked(before)
            self._values.factor = 1.0
            self._values.put(before)
        if problem:
            return self.refuse(problem)
        self._captured, self._latest = captured, []
        self._addresses, self._constants = self._values.addresses(), self._values.constants()
        self._loop.decided(CaptureOutcome.CAPTURED)

    def _checked(self, before: Any) -> Generator[Any, None, tuple[CapturedStep, str]]:
        """Make the same steps eagerly twice, capture one, and replay it as often.

        Returns the captured step, and where its replays differ from the steps; "" if nowhere.
        """
        batches = tree_map(cloned, self._latest)
        inputs = [tree_map(lambda one, k=k: repeated(one, k), batches) for k in (1, 2, 3)]
        states = []
        for _ in range(2):
            self._values.put(before)
            losses = []
            for factor, content in zip(LEARNING_RATES, inputs, strict=True):
                self._values.factor = factor
                fill(batches, content)
                yield from self._body(batches)
                self._end_body(batches)
                losses.append(self._loop.loss)
            states.append({"loss": losses, **self._loop.state.copied()})

        self._values.put(before)
        captured = yield from self._recorded(batches)
        self._values.put(before)
        losses = []
        for factor, content in zip(LEARNING_RATES, inputs, strict=True):
            self._values.factor = factor
            losses.append(self._launch(captured, content))
        replayed = {"loss": losses, **self._loop.state.copied()}
        eager, again = states
        return captured, difference(eager, again, replayed, before)

    def _recorded(self, batches: list[Any]) -> Generator[Any, None, CapturedStep]:
        """Capture the step while the loop makes it."""
        graph = self._make_graph([self._loop.state.rng, *self._watch.generators.values()])
        self.capturing = True
        with self._loop.phases.captured():
            yield from self._body(batches, graph.capturing())
        self.capturing = False
        assert self._loop.loss is not None
        return CapturedStep(graph, batches, self._loop.loss, self._before, self._after)

    # ---- replays
    def _replayed(self, captured: CapturedStep, batches: list[Any]) -> bool:
        """Make the step by a replay, if these batches have the shapes of the captured ones and all
        else is where and what it was; return whether it did."""
        if not alike(captured.batches, batches):
            return False
        # Only an evaluation may have moved them: listing all takes longer than a small step
        before, self._points = self._points, len(self._loop.points)
        if before != self._points and self._addresses != self._values.addresses():
            self.refuse("weights or the optimizer's state were moved to another place")
        return not self.refusal and self._launch(captured, batches) is not None

    def _launch(self, captured: CapturedStep, batches: list[Any]) -> Tensor | None:
        """Make the captured step with these batches; return its loss; None: constants changed."""
        for call in captured.before:
            call()
        self._refuse_changed(self._constants)
        if self.refusal:
            return None
        self._values.fill()
        fill(captured.batches, batches)
        captured.graph.replay()
        self._loop.phases.replayed()
        loss = captured.loss.clone()  # the next replay overwrites it
        rate = float("nan") if self._optimizer is None else self._values.number(self._optimizer)
        self._loop.count_replay(loss, rate)
        for call, tensors in captured.after:
            call(*(tensor.clone() for tensor in tensors))
        return loss

    def facts(self) -> dict[str, str]:
        return {"capture": CAPTURED} if self._captured is not None else super().facts()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a capture that failed cannot be ended
            self._contexts.close()
        self._schedules.close()
        if self._loop.device.type == "cuda":
            leave_side_stream(self._loop.device)


def _changed(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield the names of numbers that are no longer what they were."""
    return (name for name, value in before.items() if name in now and now[name] != value)


# ---- batches of a captured step
def cloned(leaf: Any) -> Any:
    """Return a copy of a tensor, and all else as it is."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def repeated(leaf: Any, times: int) -> Any:
    """Return a batch of as many items, the first ones so many times: its mean loss is another one,
    which reveals steps that ignore their batch."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return cloned(leaf)
    return leaf.repeat_interleave(times, 0)[: len(leaf)]


def alike(batches: list[Any], others: list[Any]) -> bool:
    """Return whether batches differ in the values of their tensors alone."""
    old, new = tree_flatten(batches), tree_flatten(others)
    return old[1] == new[1] and all(map(_is_alike, old[0], new[0]))


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype)
    return type(one) is type(other) and bool(one == other)


def fill(batches: list[Any], content: list[Any]) -> None:
    """Copy the content into the tensors of batches, which stay where they are."""
    for static, new in zip(tree_leaves(batches), tree_leaves(content), strict=True):
        if isinstance(static, Tensor):
            static.copy_(new)


# ---- whether a step can be captured: what it reads from the device or moves on the host
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
