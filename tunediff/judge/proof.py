"""Write the folder of a result that a stranger can check: `compare --out`.

It holds the files of the comparison from which its verdict follows, so that it can be read as one:
`compare.yaml`, both sides with their code, the journal and the log of each run; and beside them the
result as JSON and as Markdown, the environment, and the SHA-256 of each file.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import pairs
from tunediff.analysis.pair_test import HOLDOUT, JUDGE
from tunediff.analysis.pairs import Pairs
from tunediff.command import process, worktrees
from tunediff.command.workload import CommandWorkload
from tunediff.config import recorded
from tunediff.config.code import FOLDER
from tunediff.core.errors import ConfigError
from tunediff.core.files import write_text
from tunediff.core.trial_record import JOURNAL
from tunediff.judge import frozen_code, locked_judge
from tunediff.judge.frozen_code import SideCode, sha256
from tunediff.report import pair_summary
from tunediff.tuning import sessions
from tunediff.tuning.local import OUTPUT

FILE, RESULT, COMMENT = frozen_code.PROOF, "result.json", "result.md"
FILES = (
    pairs.FILE, pairs.CODE, pairs.LEDGER, pairs.HOLDOUT_VALUES, JUDGE, HOLDOUT, OUTPUT,
    sessions.SESSIONS,
)  # fmt: skip
"""Files of a comparison besides its sides and its runs, of which some may not be there."""
MOST_BYTES = 10 * 2**20
"""Files above this size are named, with their digest, and not copied."""


def check(out: Path) -> None:
    """Refuse a folder that is there already and is not empty. Raises `ConfigError`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: {str(out)!r} is not allowed; allowed: a new folder")


def write(folder: Path, out: Path) -> None:
    """Write into `out` what proves the comparison in `folder`. Raises `OSError`, `ConfigError`."""
    comparison = pairs.read(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        _copy(folder / name, out / name)
    for side in recorded.SIDES:
        _copy(folder / side / recorded.CONFIG, out / side / recorded.CONFIG)
        if (folder / side / FOLDER).is_dir():
            shutil.copytree(folder / side / FOLDER, out / side / FOLDER, ignore=_links_and_caches)
    for trial in sorted((folder / "trials").glob("t*")):
        for name in (JOURNAL, process.LOG, locked_judge.LOG):
            _copy(trial / name, out / "trials" / trial.name / name)
    changed = _copy_sources(comparison, out)

    result = {**pair_summary.as_json(folder), "results": ".", "report": ""}
    write_text(out / RESULT, json.dumps(result, indent=2, default=str) + "\n")
    write_text(out / COMMENT, _comment(comparison))
    write_text(out / FILE, json.dumps(_content(comparison, out, changed), indent=1) + "\n")


def _content(comparison: Pairs, out: Path, changed: list[str]) -> dict[str, Any]:
    runs = sorted(comparison.test.begun, key=lambda run: run.started)
    return {
        "format": cfg.FORMAT,
        "order": [f"{run.drawn['side']} seed {run.seed}" for run in runs],
        "environment": runs[0].environment if runs else {},
        "changed_meanwhile": changed,
        "files": {
            path.relative_to(out).as_posix(): sha256(path)
            for path in sorted(out.rglob("*"))
            if path.is_file() and path.name != FILE
        },
    }


def _comment(comparison: Pairs) -> str:
    from tunediff.report import pairs as report  # imports matplotlib

    return report.comment(comparison) + "\n"


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _links_and_caches(folder: str, names: list[str]) -> list[str]:
    """Return what is not copied: data of the user that is linked, and Python's caches."""
    return [name for name in names if (Path(folder) / name).is_symlink() or name == "__pycache__"]


# ---- sources of commands
def _copy_sources(comparison: Pairs, out: Path) -> list[str]:
    """Copy the files of both commands; return the sides whose files have changed meanwhile."""
    changed = []
    for side, config in zip(recorded.SIDES, comparison.configs, strict=True):
        command = cfg.of(config)
        if not comparison.code or not isinstance(command, CommandWorkload):
            continue
        code = frozen_code.side_of(comparison.code, side)
        with contextlib.ExitStack() as undo:
            runs_in = Path(command.definition.folder)
            if not runs_in.is_dir() and code.commit is not None:  # the worktree is gone by now
                scratch = Path(undo.enter_context(tempfile.TemporaryDirectory()))
                undo.callback(worktrees.remove, scratch / worktrees.SOURCE)
                runs_in = worktrees.add(scratch / worktrees.SOURCE, code.commit)
            if not all([*_copies(code, runs_in, out / side / worktrees.SOURCE)]):
                changed.append(side)
    return changed


def _copies(code: SideCode, runs_in: Path, target: Path) -> Iterator[bool]:
    """Copy each file of a command that is small; yield whether it is as it was at the start."""
    for name, digest in source_files(code.files).items():
        source = runs_in / name
        if not source.is_file():
            yield False
            continue
        if source.stat().st_size <= MOST_BYTES:
            _copy(source, target / name)
        yield sha256(source) == digest


def source_files(files: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of a command's own files, by their path in its working folder."""
    prefix = f"{worktrees.SOURCE}/"
    return {
        name.removeprefix(prefix): digest
        for name, digest in files.items()
        if name.startswith(prefix)
    }
