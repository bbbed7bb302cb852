"""Search files. `from tunediff import space`."""

from tunediff.space.model import Dimension, Draw, SearchBudget, SearchSpace, size, to_params
from tunediff.space.narrowing import Narrowed, narrow
from tunediff.space.own import completed
from tunediff.space.reading import SHIPPED, find, folder_of, load, of_search, parse, read
from tunediff.space.sections import MOST_FINALISTS, duration_s

__all__ = [
    "MOST_FINALISTS", "SHIPPED", "Dimension", "Draw", "Narrowed", "SearchBudget", "SearchSpace", "completed",
    "duration_s", "find", "folder_of", "load", "narrow", "of_search", "parse", "read", "size", "to_params",
]  # fmt: skip
