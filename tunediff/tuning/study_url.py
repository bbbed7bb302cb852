"""The URL of a search's Optuna study. Apart from `study_file`, because reports need it and shall not import Optuna."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from tunediff.core.files import has_locks


def study_url(path: Path) -> str:
    """Return the URL of the study in a file, for Optuna and optuna-dashboard; `%` and `?` in its path are quoted."""
    if has_locks(path.parent):
        return f"sqlite:///{path}".replace("%", "%25").replace("?", "%3F")
    # SQLite refuses a file that it cannot lock, unless told so in a URI, which is quoted once more.
    return f"sqlite:///file:{quote(quote(str(path)))}?nolock=1&uri=true"
