"""Freeze the code of both sides of a comparison: files, digests, and the seeds that follow.

The first seed is a function of both digests, so that nobody chooses it: neither side, nor a script
that proposes changes, can look for seeds on which it is ahead without changing the code, which is
seen. A reader computes digests and seed again from the files (`tunediff verify`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import sides
from tunediff.command import definition, worktrees
from tunediff.config.code import MARK
from tunediff.core.errors import ConfigError
from tunediff.core.files import CODE as FOLDER
from tunediff.core.files import sha256, write_text
from tunediff.core.git import git
from tunediff.core.text import shown, truncate
from tunediff.experiment.model import CONFIG, SIDES

FIRST_SEED, SEEDS = 10_000, 990_000
"""The least seed that is drawn, above those of searches, and how many there are."""
TWIN_DISTANCE = 1_000_003
"""From A's seeds to those of B where both sides are equal: they overlap with none that is drawn,
and a prime gives other remainders too (`seed % 100`)."""
PROOF = "proof.json"
"""File that marks the folder of a `compare --out`, which holds copies of code."""


@dataclasses.dataclass(frozen=True)
class SideCode:
    """The code of one side, as it was before its first run."""

    configuration: Mapping[str, Any]
    """Its configuration without the seed; `command`: the command and how it is judged."""
    files: Mapping[str, str]
    """SHA-256 of each file by its path in the side's folder: `workload/…` or `source/…`."""
    commit: str | None = None
    """The commit that was checked out, or on which the working copy is."""
    working_copy: bool = False
    """Whether it runs in the working copy, which can be edited meanwhile."""
    not_counted: Sequence[str] = ()
    """Names in the working folder that may be part of what runs, and are in no digest."""

    @property
    def digest(self) -> str:
        """Return 64 hex digits that are equal exactly for equal code and configurations."""
        content = json.dumps([self.configuration, self.files], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    @classmethod
    def of(cls, side: Path, runs_in: Path | None = None, working_copy: bool = False) -> SideCode:
        """Return the code in the folder of a side; `runs_in`: the working folder of a command."""
        configuration = cfg.read_yaml(side / CONFIG)
        configuration.pop("seed", None)
        files = digests(side, FOLDER)
        if files.pop(f"{FOLDER}/{definition.FILE}", None) is not None:
            command = cfg.read_yaml(side / FOLDER / definition.FILE)
            configuration["command"] = {k: v for k, v in command.items() if k != "folder"}
        if runs_in is None:
            return cls(configuration, files)
        sources, left = _sources(runs_in, results=side.parents[1])
        return cls(configuration, files | sources, _commit(runs_in), working_copy, left)


def drawn_seed(digests: Sequence[str]) -> int:
    """Return the first seed of the comparison of two versions."""
    drawn = hashlib.sha256("\n".join(digests).encode()).digest()
    return FIRST_SEED + int.from_bytes(drawn[:8], "big") % SEEDS


def write(folder: Path, codes: Sequence[SideCode], seed: int, drawn: bool) -> None:
    """Write what both sides are into the folder of a comparison."""
    content: dict[str, Any] = {"first_seed": seed, "drawn": drawn}
    for side, code in zip(SIDES, codes, strict=True):
        content[side] = {**dataclasses.asdict(code), "digest": code.digest}
    write_text(folder / sides.CODE, json.dumps(content, indent=1) + "\n")


def write_searched(folder: Path) -> None:
    """Write what the command of a search runs in its working folder, into the search's folder."""
    files, left = _sources(worktrees.working_folder(folder), results=folder.parent)
    content = {worktrees.SEARCHED: {"files": files, "working_copy": True, "not_counted": left}}
    write_text(folder / sides.CODE, json.dumps(content, indent=1) + "\n")


def check_unedited(folder: Path, force: bool) -> None:
    """Refuse to go on with a search or comparison of a command whose program has changed: its runs
    would be of two programs. With `force` they may be, and the file says so. Raises `ConfigError`.
    """
    if not (names := worktrees.edited(folder)):
        return
    if not force:
        raise ConfigError(
            f"--resume: {shown(folder)}: {', '.join(names)} changed since its first run; allowed:"
            " as it was, a new name, or --force"
        )
    code = sides.content(folder, sides.CODE)
    code[worktrees.EDITED] = sorted({*code.get(worktrees.EDITED, ()), *names})
    write_text(folder / sides.CODE, json.dumps(code, indent=1) + "\n")


def not_counted(code: Mapping[str, Any]) -> str:
    """Return which files may be part of what runs and are in no digest; '' for none."""
    names = {name for side in SIDES for name in code.get(side, {}).get("not_counted", ())}
    listed = truncate(", ".join(sorted(names)), 200)
    return f"in no digest (git ignores or does not know them): {listed}" if names else ""


# ---- files
def listed(folder: Path, results: Path) -> tuple[list[str], list[str]]:
    """Return the files in the working folder of a command that are its code, relative to it, and
    what else may be.

    In a git repository those that git tracks, in submodules and by links too, and new ones that it
    would add, but for hidden ones; else Python files. What is in `results`, a folder below, is
    none, nor what an earlier comparison has left with `--out`, nor the file that takes our output.
    """

    def names(*options: str) -> list[str]:
        return git(folder, "ls-files", "-z", *options, where="git").decode().split("\0")[:-1]

    try:
        found = names("--recurse-submodules")
        new = names("--others", "--exclude-standard")
        left = names("--others", "--ignored", "--exclude-standard", "--directory")
    except ConfigError:  # no repository
        found, new, left = _python_files(folder), [], ["all but Python files, without git"]
    for name in [name for name in found if (folder / name).is_dir()]:
        if (folder / name).is_symlink():
            inside = sorted((folder / name).rglob("*"))
            found += [
                one.relative_to(folder).as_posix()
                for one in inside
                if one.suffix in worktrees.PROGRAM
            ]
        else:  # another repository, which git names as a folder
            left.append(f"{name}/")
    for name in new:
        other = any(part.startswith(".") for part in Path(name).parts) or not (
            _is_regular(folder / name)
            # such as of `compare … > log.txt`
            and all(not os.path.samestat(os.stat(folder / name), os.fstat(out)) for out in (1, 2))
        )
        (left if other else found).append(name)
    found = [name for name in found if (folder / name).is_file()]
    parents = {parent for name in found for parent in Path(name).parents} - {Path()}
    proofs = [one for one in parents if (folder / one / PROOF).is_file()]
    if folder.resolve() in results.resolve().parents:
        proofs.append(results.resolve().relative_to(folder.resolve()))
    skipped = ("ray_results/", ".tunediff/", *(f"{one.as_posix()}/" for one in proofs))
    left = [name for name in left if not name.startswith(skipped) and "__pycache__" not in name]
    return sorted({name for name in found if not name.startswith(skipped)}), left


def _sources(runs_in: Path, results: Path) -> tuple[dict[str, str], list[str]]:
    """Return the SHA-256 of each file that `listed` names, by its name below `source/`, and what
    else may be code."""
    names, left = listed(runs_in, results)
    return {f"{worktrees.SOURCE}/{name}": sha256(runs_in / name) for name in names}, left


def _python_files(folder: Path) -> list[str]:
    """Return the Python files below a folder, of which there may be far too many others."""
    found = list[str]()
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] not in "._" and name != "ray_results"]
        paths = (Path(root, name) for name in names if name.endswith(".py"))
        found += [path.relative_to(folder).as_posix() for path in paths]
    return found


def digests(side: Path, place: str) -> dict[str, str]:
    """Return the SHA-256 of the files in a folder of a side, by their names in the side."""
    paths = [path for path in regular_files(side / place) if path.name != MARK]
    return {path.relative_to(side).as_posix(): sha256(path) for path in paths}


def regular_files(folder: Path) -> list[Path]:
    """Return the files below a folder, without links, to data of the user, and caches."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return sorted(filter(_is_regular, paths))


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _commit(folder: Path) -> str | None:
    try:
        return git(folder, "rev-parse", "HEAD", where="git").decode().strip()
    except ConfigError:
        return None
