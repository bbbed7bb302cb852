"""Search files: find, read and check them. Use as `from tunediff import search_space`."""

from tunediff.search_space.content import (
    SHIPPED,
    Narrowed,
    completed,
    find,
    folder_of,
    narrow,
    of_search,
    read,
    shipped,
)
from tunediff.search_space.dimension import Dimension, Draw, to_params
from tunediff.search_space.model import SearchBudget, SearchSpace, size
from tunediff.search_space.reading import load, parse
from tunediff.search_space.sections import EARLY_STOPPING, MOST_FINALISTS, duration_s

__all__ = [
    "EARLY_STOPPING",
    "MOST_FINALISTS",
    "SHIPPED",
    "Dimension",
    "Draw",
    "Narrowed",
    "SearchBudget",
    "SearchSpace",
    "completed",
    "duration_s",
    "find",
    "folder_of",
    "load",
    "narrow",
    "of_search",
    "parse",
    "read",
    "shipped",
    "size",
    "to_params",
]
