"""How an engine makes its steps; what captures them is imported where a knob asks for it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from tunediff.core.outcomes import CaptureOutcome
from tunediff.training.capture.steps import (
    CudaStepGraph,
    MakeGraph,
    StepLoop,
    Steps,
    use_side_stream,
)


def steps_of(loop: StepLoop, asked: bool, make_graph: MakeGraph | None, refusal: str) -> Steps:
    """Return how an engine makes its steps. `asked`: whether its configuration wants them captured;
    `refusal`: why an earlier process could not; `make_graph`: captures in place of CUDA."""
    if refusal:
        loop.decided(CaptureOutcome.REFUSED, refusal)
        return Steps(loop, refusal)
    if make_graph is None and not asked:
        return Steps(loop)
    from tunediff.training.capture.step_capture import StepCapture

    if make_graph is None:
        use_side_stream(loop.device)
        make_graph = CudaStepGraph
    return StepCapture(loop, make_graph)


def captured(network: nn.Module, make_graph: MakeGraph | None) -> Callable[..., Tensor]:
    """Return the network, captured where steps are."""
    if make_graph is None:
        return network
    from tunediff.training.capture.captured_call import CapturedCall

    return CapturedCall(network, make_graph)
