"""Write the folder of a result that a stranger can check: `compare --out`.

It holds the files of the comparison from which its verdict follows, so that it can be read as one:
`experiment.yaml`, both sides with their code, the journal and the log of each run; and beside them the
result as JSON and as Markdown, the environment, and the SHA-256 of each file.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import sides
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.sides import HOLDOUT, JUDGE
from tunediff.command import process, worktrees
from tunediff.config import recorded
from tunediff.core.errors import ConfigError
from tunediff.core.files import CODE as FOLDER
from tunediff.core.files import write_text
from tunediff.core.trial_record import JOURNAL
from tunediff.experiment import model
from tunediff.judge import frozen_code, locked_judge
from tunediff.judge.frozen_code import sha256
from tunediff.report import reading, text
from tunediff.tuning import sessions
from tunediff.tuning.local import OUTPUT

FILE, RESULT, COMMENT = frozen_code.PROOF, "result.json", "result.md"
FILES = (
    model.FILE, sides.CODE, sides.LEDGER, sides.HOLDOUT_VALUES, JUDGE, HOLDOUT, OUTPUT,
    sessions.SESSIONS,
)  # fmt: skip
"""Files of a comparison besides its sides and its runs, of which some may not be there."""
MOST_BYTES = 10 * 2**20
"""Files of a command above this size are named, with size and digest, and not copied."""


def check(out: Path) -> None:
    """Refuse a folder that is there already and is not empty. Raises `ConfigError`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: {str(out)!r} is not allowed; allowed: a new folder")


def write(folder: Path, out: Path) -> None:
    """Write into `out` what proves the comparison in `folder`. Raises `OSError`, `ConfigError`."""
    comparison = Comparison.read(folder)
    paths = [folder / name for name in FILES]
    for side in recorded.SIDES:
        paths += [folder / side / recorded.CONFIG]
        paths += frozen_code.regular_files(folder / side / FOLDER)
    for name in (JOURNAL, process.LOG, locked_judge.LOG):
        paths += (folder / "trials").glob(f"t*/{name}")
    for path in filter(Path.is_file, paths):
        copy(path, out / path.relative_to(folder))
    changed, large = _copy_sources(comparison, out)

    result = {**reading.as_json(reading.of_sides(comparison)), "files": {}}
    del result["summary"]  # words of this version, which no check compares
    write_text(out / RESULT, json.dumps(result, indent=2, default=str) + "\n")
    write_text(out / COMMENT, text.comment(comparison) + "\n")
    runs = sorted(comparison.runs, key=lambda run: run.started)
    content = {
        "format": cfg.FORMAT,
        "order": [f"{run.drawn['side']} seed {run.seed}" for run in runs],
        "environment": runs[0].environment if runs else {},
        "changed_meanwhile": changed,
        "not_copied": large,
        "files": {
            path.relative_to(out).as_posix(): sha256(path)
            for path in frozen_code.regular_files(out)
        },
    }
    write_text(out / FILE, json.dumps(content, indent=1) + "\n")


def copy(source: Path, target: Path) -> None:
    """Copy the content of a file; folders are made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _copy_sources(comparison: Comparison, out: Path) -> tuple[list[str], dict[str, Any]]:
    """Copy the files of both commands. Return the sides whose files have changed meanwhile, and
    the files that are too large, with size in bytes and digest."""
    changed, large = dict[str, None](), dict[str, Any]()
    for side in recorded.SIDES if sides.of_commands(comparison.folder) else ():
        code = sides.content(comparison.folder, sides.CODE)[side]
        with contextlib.ExitStack() as undo:
            runs_in = frozen_code.working_folder(comparison.folder / side)
            if not runs_in.is_dir() and code["commit"] is not None:  # the worktree is gone by now
                scratch = Path(undo.enter_context(tempfile.TemporaryDirectory()))
                undo.callback(worktrees.remove, scratch / worktrees.SOURCE)
                runs_in = worktrees.add(scratch / worktrees.SOURCE, code["commit"])
            for name, digest in code["files"].items():
                file = runs_in / Path(name).relative_to(worktrees.SOURCE)
                if not file.is_file() or sha256(file) != digest:
                    changed[side] = None
                if file.is_file() and (size := file.stat().st_size) > MOST_BYTES:
                    large[f"{side}/{name}"] = {"bytes": size, "sha256": digest}
                elif file.is_file():
                    copy(file, out / side / name)
    return [*changed], large
