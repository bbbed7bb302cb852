"""A workload of tests: a small net with batch statistics and dropout learns numbers."""

from dataclasses import dataclass

from tunediff.config import Metric


@dataclass(frozen=True)
class Knobs:
    """What can be set."""

    width: int = 8
    lr: float = 0.05
    norm: bool = True
    """Batch statistics: buffers that change, and a batch that cannot be divided without changing what is learned."""
    dropout: float = 0.0


OBJECTIVE = Metric("error", "min")
PRESETS = {"toy": {"loader.batch_size": 8, "loader.workers": 0, "evaluation.points": 2}}
