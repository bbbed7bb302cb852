"""Search files: find, read and check them. Use as `from tunediff import search_space`."""

from tunediff.search_space.content import (
    SHIPPED,
    completed,
    find,
    folder_of,
    narrow,
    of_search,
    read,
    shipped,
)
from tunediff.search_space.dimension import Dimension, Draw, to_params
from tunediff.search_space.model import SearchBudget, SearchSpace
from tunediff.search_space.reading import load, parse

__all__ = [
    "SHIPPED",
    "Dimension",
    "Draw",
    "SearchBudget",
    "SearchSpace",
    "completed",
    "find",
    "folder_of",
    "load",
    "narrow",
    "of_search",
    "parse",
    "read",
    "shipped",
    "to_params",
]
