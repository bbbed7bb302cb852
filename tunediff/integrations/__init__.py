"""What connects a search with other software: trackers, and frameworks' loops.

Every package is imported lazily.
"""

from __future__ import annotations

import importlib.util

from tunediff.config import ConfigError
from tunediff.core.environment import install_command


def require(extra: str, *packages: str) -> None:
    """Raise `ConfigError` that names the extra unless all of its packages are installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"tunediff.integrations.{extra}: {', '.join(missing)} is not installed;"
            f" {install_command(extra)}"
        )
