"""Check out the revisions that a comparison runs, as git worktrees in its folder, and see to it
that these are what runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tunediff import config as cfg
from tunediff.command import definition
from tunediff.core.disk import EDITED_MEANWHILE
from tunediff.core.errors import ConfigError
from tunediff.core.files import CODE as FOLDER
from tunediff.core.files import content, sha256
from tunediff.core.git import commit_of, git
from tunediff.core.text import shown
from tunediff.experiment.model import CODE, SIDES
from tunediff.experiment.model import FILE as EXPERIMENT

SOURCE = "source"
"""Folder of a side with the worktree of its revision, or with a copy of what it ran elsewhere."""
WORKING_COPY = "."
"""The revision that is no worktree, but the folder in which the comparison was started."""
SEARCHED, EDITED = "search", "edited"
"""Keys beside those of a comparison's sides: what a search runs, and the files in which its user
accepts an edit."""
PROGRAM = (".py", ".sh", ".toml", ".yaml", ".yml")
"""Endings of files whose change is one of the program, not of what it has written."""
HOOK = Path(__file__).parent / "loaded"
"""Folder that lets Python programs note the files which they execute."""
NOTE = "loaded.txt"
"""File in the folder of a run with these files, until they have been looked at."""


def add(path: Path, revision: str) -> Path:
    """Check a revision out into `path`; return the folder in it that is the working folder here.

    What git ignores at the top of the repository is linked, and links and repositories that it does
    not know: data, say. Raises `ConfigError`.
    """
    where = f"--at: {revision}"
    top = Path(git(Path(), "rev-parse", "--show-toplevel", where=where).decode().strip())
    commit = commit_of(top, revision, where)
    git(top, "worktree", "add", "--detach", "--force", str(path.absolute()), commit, where=where)
    words = ("ls-files", "-z", "--others", "--exclude-standard")
    new = git(top, *words, where=where).decode().split("\0")
    data = [  # but for code, which is of one revision; a repository in another is named as a folder
        name
        for name in new
        if name.endswith("/") or ((top / name).is_symlink() and not name.endswith(PROGRAM))
    ]
    ignored = git(top, *words, "--ignored", "--directory", where=where).decode().split("\0")
    link([*data, *ignored], top, path)
    return path.absolute() / Path.cwd().relative_to(top)


def link(names: Iterable[str], folder: Path, copy: Path) -> None:
    """Link what is at the top of a folder into a copy that lacks it, but for hidden files."""
    for name in {name.rstrip("/") for name in names}.difference(("", "__pycache__", "ray_results")):
        if "/" not in name and not name.startswith(".") and not os.path.lexists(copy / name):
            (copy / name).symlink_to(folder / name)


def moved(path: Path) -> None:
    """Tell git that a worktree is at `path` now."""
    if path.is_dir():
        git(Path(), "worktree", "repair", str(path), where="--at", check=False)


def remove(path: Path) -> None:
    """Remove a worktree, and nothing where there is none."""
    if path.is_dir():
        git(Path(), "worktree", "remove", "--force", str(path), where="--at", check=False)


# ---- what runs
def environment(run: Path) -> dict[str, str]:
    """Return the variables by which a run in this folder notes its files.

    Both runs of a comparison's first pair have them if there is a worktree: noting takes a moment.
    """
    if not _sources(run):
        return {}
    path = [str(HOOK), os.environ.get("PYTHONPATH", "")]
    return {"TUNEDIFF_LOADED": str(run / NOTE), "PYTHONPATH": os.pathsep.join(filter(None, path))}


def refuse_others(run: Path, runs_in: Path) -> None:
    """Refuse a run that has executed a file of its repository from outside of its side's folder:
    both sides would run that one. Raises `ConfigError`."""
    own = next((source for source in _sources(run) if runs_in.is_relative_to(source)), None)
    if not (note := run / NOTE).is_file():
        return
    files = [Path(line) for line in sorted({*note.read_text(errors="replace").splitlines()})]
    note.unlink()
    if own is None:
        return
    for file in others(files, own, own, own.parents[1]):
        raise ConfigError(
            f"{own.parent.name}: {shown(file)} was loaded, which is not of the revision in"
            f" {shown(own)}: both sides would run it (an editable install, or PYTHONPATH); allowed:"
            " files of the revision, e.g. by PYTHONPATH=src in the command, which is relative"
        )


def others(files: Iterable[Path], repository: Path, *allowed: Path) -> Iterator[Path]:
    """Yield the files that the repository around a folder has elsewhere than below `allowed`.

    Installed packages and what git ignores are none: a virtual environment may lie in it.
    """
    try:
        listed = git(repository, "worktree", "list", "--porcelain", where="git", check=False)
    except ConfigError:  # this machine has no git
        return
    lines = listed.decode().splitlines()
    tops = [Path(line.partition(" ")[2]) for line in lines if line.startswith("worktree ")]
    for file in files:
        real = file.resolve()
        inside = any(one.is_relative_to(f) for one in (file, real) for f in allowed)
        top = next((top for top in tops if real.is_relative_to(top)), None)
        installed = any((parent / "pyvenv.cfg").is_file() for parent in real.parents)
        if inside or installed or top is None:
            continue
        if git(top, "ls-files", "-co", "--exclude-standard", str(real), where="git", check=False):
            yield file


def _sources(run: Path) -> list[Path]:
    """Return the folders of the sides of a run's comparison in which their commands run."""
    sources = [run.parents[1] / side / SOURCE for side in SIDES if run.name in ("t0000", "t0001")]
    return [source for source in sources if source.is_dir()]


# ---- edits while it runs
def working_folder(place: Path) -> Path:
    """Return the folder in which the command of a side or search runs."""
    return Path(cfg.read_yaml(place / FOLDER / definition.FILE)["folder"])


def edited(folder: Path) -> list[str]:
    """Return the files of working copies, see `PROGRAM`, that differ from those at the first run of
    a comparison or search in `folder`; [] for any other folder."""
    code, names = content(folder, CODE), list[str]()
    for side in (*SIDES, SEARCHED):
        if not (frozen := code.get(side, {})).get("working_copy"):
            continue
        runs_in = working_folder(folder if side == SEARCHED else folder / side)
        for name, digest in frozen["files"].items():
            place, _, inside = name.partition("/")
            if place == SOURCE and inside.endswith(PROGRAM):
                file = runs_in / inside
                # A search's worker on another machine may lack what no run needs
                is_same = sha256(file) == digest if file.is_file() else side == SEARCHED
                names += [inside] * (not is_same)
    return sorted({*names}.difference(code.get(EDITED, ())))


def check_unedited(run: Path) -> None:
    """Raise an `OSError` if its code has changed: nothing is known of a run of two programs."""
    names = [
        name
        for place in run.parents[1:3]  # confirming runs are in a folder of their search
        if (place / EXPERIMENT).is_file()
        for name in edited(place)
        if name.endswith((".py", ".sh"))  # a run may write other files
    ]
    if names:
        raise OSError(EDITED_MEANWHILE, os.strerror(EDITED_MEANWHILE), ", ".join(names))
