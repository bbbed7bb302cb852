"""Run the comparison of a folder again on this machine: `compare --reproduce`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tunediff import config as cfg
from tunediff.analysis import pairs
from tunediff.analysis.pair_test import HOLDOUT, JUDGE
from tunediff.command import definition, worktrees
from tunediff.config import recorded
from tunediff.config.code import FOLDER
from tunediff.core.files import write_text
from tunediff.core.refusals import check_name, check_new, timed_name, writing
from tunediff.judge import verification
from tunediff.tuning import at_once


def create(source: Path, storage: Path, name: str | None, say: Callable[[str], object]) -> Path:
    """Make a new comparison with both sides, the rules and the seeds of the folder `source`.

    Commands run in the copy of their files; what their folder lacks, such as data that git ignores,
    is linked from the working folder. Raises `ConfigError` for a folder that has been changed, and
    for runs at the same time on other devices than this machine has.
    """
    checked = verification.check(source)
    if checked.faults:
        raise cfg.ConfigError(f"{source}: is not as it was written: {checked.faults[0]}")
    at_once.as_it_began(checked.test.at_once)  # refuses what this machine cannot run
    name = name or timed_name("reproduce")
    folder = storage.resolve() / name
    check_name(name)
    check_new(folder)
    new = folder.with_name(f".{folder.name}-{os.getpid()}")
    with writing("--storage", folder):
        for path in (pairs.FILE, pairs.CODE, JUDGE, HOLDOUT):
            _copy(source / path, new / path)
        for side in recorded.SIDES:
            shutil.copytree(source / side, new / side)
            _run_in_copy(new / side, folder / side)
        new.rename(folder)
    say(f"runs the code in {source}: A is {checked.content['a']}, B is {checked.content['b']}")
    return folder


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copyfile(source, target)


def _run_in_copy(new: Path, side: Path) -> None:
    """Let the command of a side run in its copied files, if it is a command."""
    file = new / FOLDER / definition.FILE
    if not file.is_file():
        return
    runs_in, copy = Path().absolute(), new / worktrees.SOURCE
    if copy.is_dir():
        for entry in runs_in.iterdir():
            hidden = entry.name.startswith(".") or entry.name in ("__pycache__", "ray_results")
            if not hidden and not (copy / entry.name).exists():
                (copy / entry.name).symlink_to(entry)
        runs_in = side.absolute() / worktrees.SOURCE
    content = cfg.read_yaml(file)
    write_text(file, cfg.to_yaml({**content, "folder": str(runs_in)}))
