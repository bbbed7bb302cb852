"""Ask git about the repository of a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tunediff.core.errors import ConfigError


def git(folder: Path, *words: str, where: str, check: bool = True) -> bytes:
    """Return what a git command prints, run in a folder.

    Raises `ConfigError` with the last line of its error behind `where`; not if `check` is false.
    """
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, check=check)
    except (OSError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise ConfigError(f"{where}: {message.splitlines()[-1]}") from None
    return done.stdout


def commit_of(folder: Path, revision: str, where: str) -> str:
    """Return the hash of a revision: git would take one that begins with a dash for an option."""
    words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    git(folder, "rev-parse", where=where)  # refuses a folder without a repository
    if commit := git(folder, *words, where=where, check=False).decode().strip():
        return commit
    raise ConfigError(f"{where}: {revision}: no such revision")
