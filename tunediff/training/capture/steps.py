"""How an engine makes its steps: each in the workload's loop, or captured once and replayed, as a
CUDA graph in a stream of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tunediff.core.outcomes import CaptureOutcome
from tunediff.core.trial_record import REFUSED
from tunediff.training.meter import Phases
from tunediff.training.state import State

Call = Callable[..., object]


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


class StepLoop(Protocol):
    """What this module calls of the engine, which it does not import."""

    device: torch.device
    state: State
    phases: Phases

    @property
    def points(self) -> Sequence[object]: ...
    @property
    def loss(self) -> Tensor | None: ...
    def fetch_batches(self) -> list[Any]: ...
    def passes(self, batches: list[Any] | None = None) -> Iterator[Any]: ...
    def undone(self) -> contextlib.AbstractContextManager[None]: ...
    def count_step(self) -> None: ...
    def count_replay(self, loss: Tensor, learning_rate: float) -> None: ...
    def decided(self, outcome: CaptureOutcome, reason: str = "") -> None: ...


class Steps:
    """How the engine makes its steps; here each one in the workload's loop.

    The engine and `Trial` call these methods, whether steps are captured or not.
    """

    make_graph: MakeGraph | None = None
    """Captures what an evaluation calls often; None: nothing is captured."""

    def __init__(self, loop: StepLoop, refusal: str = "") -> None:
        self._loop, self.refusal = loop, refusal
        """`refusal`: why a step that was to be captured is not."""

    def step(self) -> Iterator[Any]:
        """Make one optimizer step: yield its batches, unless it is replayed."""
        yield from self._loop.passes()

    def before(self, call: Call) -> None:
        """Call what sets numbers for this step: now, and before every replay."""
        call()

    def after(self, call: Call, *tensors: Tensor) -> None:
        """Call this with the tensors when the step is made."""
        call(*tensors)

    def count(self) -> None:
        """Count a step that the loop's body has made."""
        self._loop.count_step()

    def note_read(self, name: str) -> None:
        """Note that the loop's body reads a number that moves from step to step."""

    def learning_rate(self, optimizer: torch.optim.Optimizer) -> float:
        """Return an optimizer's learning rate in the step that is made now."""
        return optimizer.param_groups[0]["lr"]  # type: ignore[no-any-return]

    def facts(self) -> dict[str, str]:
        """Return `capture`, as a `Point` has it."""
        return {"capture": REFUSED + self.refusal} if self.refusal else {}

    def refuse(self, reason: str) -> None:
        """Make every further step in the loop, for this reason."""

    def fail(self, error: RuntimeError) -> None:
        """Raise `CaptureFailedError` where the error is that of a capture."""

    def close(self) -> None:
        """Leave torch as it was, also where the loop's body has raised an error."""


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


def await_default_stream(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Order what was queued in the default stream, as by threads of a user's loader, before what
    follows here, and keep the memory of these tensors of the device until that is done."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        for tensor in tensors:
            tensor.record_stream(stream)
