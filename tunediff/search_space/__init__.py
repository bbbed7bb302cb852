"""Search files: find, read and check them. Use as `from tunediff import search_space`."""

from tunediff.search_space.default_space import completed
from tunediff.search_space.dimension import Dimension, Draw, to_params
from tunediff.search_space.files import SHIPPED, find, folder_of, of_search, shipped
from tunediff.search_space.model import SearchBudget, SearchSpace, size
from tunediff.search_space.narrowing import Narrowed, narrow
from tunediff.search_space.reading import load, load_recorded, parse, read
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
    "load_recorded",
    "narrow",
    "of_search",
    "parse",
    "read",
    "shipped",
    "size",
    "to_params",
]
