"""Profile one configuration. Imports no torch.

It is measured in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.api.options import check_files, trainable
from tunediff.config import ConfigError, Systems, code
from tunediff.core import remote
from tunediff.core.errors import TunediffError, UserCodeError
from tunediff.core.files import numbered
from tunediff.core.options import REQUIRED, option, words_option, writing
from tunediff.core.outcomes import Status
from tunediff.core.progress import EventLines
from tunediff.profiling import tables
from tunediff.tuning import foreground


class ProfileOptions(remote.StorageOptions):
    """What is asked of a profile."""

    config: Path = option(REQUIRED, "configuration file, or digits, cifar10, mine.py")
    words: tuple[str, ...] = words_option("changes to the configuration", "knob=value")
    out: str | Path | None = option(
        None, "new folder for the results (default: profile-CONFIG in the folder of all searches)"
    )
    steps: int | None = option(
        None, "steps to measure, after a warm-up (default: what 5 seconds take, 3 to 200)", ge=3
    )


@dataclasses.dataclass(frozen=True)
class ProfileResult:
    """A finished profile: what was measured, and the files that say so."""

    folder: Path
    profile: Mapping[str, Any]
    files: Mapping[str, Path]
    """Paths by what they are: `report`, `numbers`, `operations`."""

    def json(self) -> dict[str, Any]:
        """Return the numbers as `tunediff profile --json` prints them."""
        numbers: dict[str, Any] = json.loads(self.files["numbers"].read_text(encoding="utf-8"))
        return numbers

    def text(self) -> str:
        """Return the tables as text."""
        return tables.report(self.profile)

    def __repr__(self) -> str:
        return f"ProfileResult({str(self.folder)!r})"


def run(options: ProfileOptions, command: str, lines: EventLines) -> ProfileResult:
    """Measure everything and write it into a new folder; `command`: how it was started.

    Raises `ConfigError`, and `TunediffError` for no memory.
    """
    # Torch's profiler speaks of itself on stderr; read when torch is first imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config, workers = _one_worker(trainable(options.config, options.words))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"torchrun: profile runs in one process; start it as {command}")
    check_files(config, evaluates=False)
    if options.out is None:
        remote.check(Path(options.storage))
    folder = _folder(options)
    asked = {
        "config": config, "folder": folder, "name": options.config.stem, "command": command,
        "workers": workers, "steps": options.steps,
    }  # fmt: skip
    try:
        profile = foreground.call(_measured, asked, config.schema.workload, lines)
        profile["wall_s"] = time.monotonic() - lines.begun
        result = ProfileResult(folder, profile, tables.write_all(profile, folder))
        remote.push_or_warn(folder)
        return result
    finally:
        _tidy(folder)


def _one_worker(config: Systems) -> tuple[Systems, int]:
    """Return the configuration of one of the training workers, and how many there are."""
    workers = config.parallel.workers
    if workers == 1:
        return config, 1
    # The stages of a pipeline see the whole batch
    parts = 1 if config.parallel.strategy == "pipeline" else workers
    part = {"parallel.workers": 1, "loader.batch_size": config.loader.batch_size // parts}
    return cfg.override(config, part), workers


def _folder(options: ProfileOptions) -> Path:
    """Return a new or empty folder; without `out`, a free name with `-2`, `-3`, …"""
    out, name = options.out, f"profile-{options.config.stem}"
    folders = [Path(out)] if out is not None else numbered(Path(options.storage), name)
    for folder in folders:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            with writing("--out", folder):
                folder.mkdir(parents=True, exist_ok=True)
            return folder
    raise ConfigError(f"--out: {out} exists and is not empty; allowed: a new or an empty folder")


def _tidy(folder: Path) -> None:
    """Remove what an interruption left of the trainings, and the folder when it is empty."""
    for left in folder.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _measured(asked: dict[str, Any], lines: EventLines) -> dict[str, Any]:
    """Measure everything, in a process of its own, which alone imports torch. `asked`: arguments of
    `profiling.run.profile`.

    Raises `TunediffError` for no memory and for errors of a user's file.
    """
    from tunediff.profiling import run
    from tunediff.training.outcome import end_of

    config = asked["config"]
    try:
        return run.profile(**asked, say=lines.aside.say)
    except Exception as error:
        if end_of(error).status == Status.OOM:
            batch = config.loader.batch_size
            raise TunediffError(f"out of memory with a batch of {batch}: {error}") from error
        if cfg.of(config).file is None or isinstance(error, TunediffError):
            raise
        raise UserCodeError(code.trace(error).rstrip("\n")) from error  # the user's lines
