"""tunediff finds the training configuration that gives the best result for the wall-clock spent, and proves it.

What a workload's file needs: `from tunediff import Choice, Metric, Range, Trial`. What the commands do, as functions:
`run_search`, `open_search`, `run_comparison`, `run_training`, `run_profile` and `load_model`; docs/how-to/python.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tunediff.core import signals  # noqa: F401 – first of all: Ctrl-C while the rest is imported

# isort: split
from tunediff.config.knobs import Choice, ConfigError, EvaluationProtocol, File, Fixed, Range
from tunediff.config.workload import Metric, Quantity
from tunediff.core.errors import TunediffError

if TYPE_CHECKING:
    from tunediff.api.comparison import PairedComparison, run_comparison
    from tunediff.api.search import Search, open_search, run_search
    from tunediff.training.trial import Trial

__version__ = "0.2.0"
__all__ = [
    "Choice", "ConfigError", "EvaluationProtocol", "File", "Fixed", "Metric", "PairedComparison", "Quantity", "Range",
    "Search", "Trial", "TunediffError", "open_search", "run_comparison", "run_search",
]  # fmt: skip
_LAZY = {
    "Trial": "training.trial", "Search": "api.search", "open_search": "api.search", "run_search": "api.search",
    "PairedComparison": "api.comparison", "run_comparison": "api.comparison",
}  # fmt: skip
"""Modules of names that import torch, Ray or pandas, which most of what only reads configurations does without."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"tunediff.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
