"""tunediff finds the training configuration that gives the best result for the wall-clock spent, and proves it.

What a workload's file needs: `from tunediff import Choice, Metric, Range, Trial`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunediff.core import signals  # noqa: F401 – first of all: Ctrl-C while the rest is imported

# isort: split
from tunediff.config.knobs import Choice, EvaluationProtocol, File, Fixed, Range
from tunediff.config.workload import Metric, Quantity

if TYPE_CHECKING:
    from tunediff.training.trial import Trial

__version__ = "0.2.0"
__all__ = ["Choice", "EvaluationProtocol", "File", "Fixed", "Metric", "Quantity", "Range", "Trial"]


def __getattr__(name: str) -> Any:
    """`Trial` imports torch, which most of what only reads configurations does without."""
    if name == "Trial":
        from tunediff.training.trial import Trial

        return Trial
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
