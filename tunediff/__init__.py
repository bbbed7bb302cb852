"""tunediff finds the training configuration that gives the best result for the wall-clock spent,
and proves it.

What a workload's file needs: `from tunediff import Choice, Metric, Range, Trial`, and `epochs` or
`steps` for a loader of its own. What the commands do, as functions: `run_search`, `open_search`,
`open_study`, `run_comparison`, `run_training`, `run_profile` and `load_model`;
docs/how-to/python.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tunediff.core import signals  # noqa: F401 – first of all: Ctrl-C while the rest is imported

# isort: split
# It notes the threads of torch before the user's program sets them.
from tunediff.core import machine

# isort: split
from tunediff import command  # noqa: F401 – registers commands as workloads
from tunediff.config.knobs import Choice, ConfigError, EvaluationProtocol, File, Fixed, Range
from tunediff.config.workload import Metric
from tunediff.core.errors import TunediffError
from tunediff.core.point import Quantity

if TYPE_CHECKING:
    from tunediff.api.ask_tell import AskedTrial, AskTellStudy, open_study
    from tunediff.api.compare import PairedComparison, run_comparison
    from tunediff.api.finished import judge
    from tunediff.api.profile_run import ProfileResult
    from tunediff.api.search import Search, open_search, run_search
    from tunediff.api.training import Training, load_model, run_profile, run_training
    from tunediff.integrations.loaders import epochs, steps
    from tunediff.training.trial import Trial

__version__ = "0.3.0"
__all__ = [
    "AskTellStudy", "AskedTrial", "Choice", "ConfigError", "EvaluationProtocol",
    "File",
    "Fixed", "Metric", "PairedComparison", "ProfileResult", "Quantity", "Range", "Search",
    "Training", "Trial",
    "TunediffError", "epochs", "judge", "load_model", "open_search", "open_study", "run_comparison", "run_profile",
    "run_search",
    "run_training", "steps",
]  # fmt: skip
_LAZY = {
    "training.trial": ["Trial"],
    "integrations.loaders": ["epochs", "steps"],
    "api.ask_tell": ["AskTellStudy", "AskedTrial", "open_study"],
    "api.search": ["Search", "open_search", "run_search"],
    "api.finished": ["judge"],
    "api.compare": ["PairedComparison", "run_comparison"],
    "api.training": ["Training", "load_model", "run_profile", "run_training"],
    "api.profile_run": ["ProfileResult"],
}
"""Modules of names that import torch, Ray or pandas, which most of what only reads configurations
does without."""


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            machine.limit_spinning()  # before torch is imported
            return getattr(importlib.import_module(f"tunediff.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
