"""Search files. `from tunediff import space`."""

from tunediff.space.model import (
    MAX_SEEDS,
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
from tunediff.space.reading import DEFAULT, SHIPPED, find, load, of_search, parse, read
from tunediff.space.sections import duration_s

__all__ = [
    "DEFAULT", "MAX_SEEDS", "RATE", "SHIPPED", "Confirm", "Dimension", "Draw", "Rung", "SearchBudget", "SearchSpace",
    "combinations", "duration_s", "find", "load", "of_search", "parse", "read", "size", "to_params",
]  # fmt: skip
