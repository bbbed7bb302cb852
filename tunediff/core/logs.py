"""Keep the loggers of other libraries quiet for a while."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def errors_only(*names: str) -> Iterator[None]:
    """Silence these loggers below ERROR inside a `with` block, and restore their levels."""
    before = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in before:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)
