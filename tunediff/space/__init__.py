"""Search files. `from tunediff import space`."""

from tunediff.space.model import (
    RATE,
    Confirm,
    Dimension,
    Draw,
    Rung,
    SearchBudget,
    SearchSpace,
    combinations,
    size,
    to_params,
)
from tunediff.space.reading import SHIPPED, find, load, of_search, parse, read
from tunediff.space.sections import duration_s

__all__ = [
    "RATE", "SHIPPED", "Confirm", "Dimension", "Draw", "Rung", "SearchBudget", "SearchSpace",
    "combinations", "duration_s", "find", "load", "of_search", "parse", "read", "size", "to_params",
]  # fmt: skip
