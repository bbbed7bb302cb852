"""Check out the revisions that a comparison runs, as git worktrees in its folder."""

from __future__ import annotations

from pathlib import Path

from tunediff.core.git import commit_of, git

SOURCE = "source"
"""Folder of a side with the worktree of its revision."""
WORKING_COPY = "."
"""The revision that is no worktree, but the folder in which the comparison was started."""


def add(path: Path, revision: str) -> Path:
    """Check a revision out into `path`; return the folder in it that is the working folder here.

    What git ignores at the top of the repository (data, say) is linked. Raises `ConfigError`.
    """
    where = f"--at: {revision}"
    top = Path(git(Path(), "rev-parse", "--show-toplevel", where=where).decode().strip())
    commit = commit_of(top, revision, where)
    git(top, "worktree", "add", "--detach", "--force", str(path.absolute()), commit, where=where)
    for entry in top.iterdir():
        hidden = entry.name.startswith(".") or entry.name in ("__pycache__", "ray_results")
        if not hidden and not (path / entry.name).exists():
            (path / entry.name).symlink_to(entry)
    return path.absolute() / Path.cwd().relative_to(top)


def moved(path: Path) -> None:
    """Tell git that a worktree is at `path` now."""
    if path.is_dir():
        git(Path(), "worktree", "repair", str(path), where="--at", check=False)


def remove(path: Path) -> None:
    """Remove a worktree, and nothing where there is none."""
    if path.is_dir():
        git(Path(), "worktree", "remove", "--force", str(path), where="--at", check=False)
