"""Profile one configuration, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import cli
from tunediff import config as cfg
from tunediff.config import ConfigError, Systems, code
from tunediff.core import remote, text
from tunediff.core.errors import TunediffError, UserCodeError
from tunediff.core.files import numbered
from tunediff.core.progress import EventLines

if TYPE_CHECKING:
    from tunediff.profiling.result import Profile


@dataclasses.dataclass
class ProfileOptions:
    """What is asked of a profile: the arguments of the command and of `tunediff.run_profile`."""

    config: Path
    """A configuration file, or a baseline or a workload."""
    words: Sequence[str] = ()
    """`knob=value`."""
    out: Path | None = None
    storage: Path = text.STORAGE
    steps: int | None = None
    attempt: bool = False
    command: str = "python -m tunediff.profile"
    """How it was started."""


@dataclasses.dataclass(frozen=True)
class ProfileResult:
    """A finished profile: what was measured, and the files that say so."""

    folder: Path
    profile: Profile
    files: Mapping[str, Path]
    """Paths by what they are: `report`, `numbers`, `operations`."""

    def json(self) -> dict[str, Any]:
        """Return the numbers as `tunediff profile --json` prints them."""
        numbers: dict[str, Any] = json.loads(self.files["numbers"].read_text(encoding="utf-8"))
        return numbers

    def text(self) -> str:
        """Return the tables and the advice as text."""
        from tunediff.profiling import tables

        return "\n\n".join(section.text() for section in tables.sections(self.profile))

    def __repr__(self) -> str:
        return f"ProfileResult({str(self.folder)!r})"


def run(options: ProfileOptions, lines: EventLines) -> ProfileResult:
    """Measure everything and write it into a new folder. Raises `ConfigError`, and `TunediffError`
    for no memory."""
    # Torch's profiler speaks of itself on stderr; read when torch is first imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from tunediff.distributed import share_of_cores

    with (
        share_of_cores()
    ):  # before the user's file is imported, which may set another number of threads
        config, workers = _one_worker(cfg.named(options.config, options.words))
        _check(config, options)
        folder = _folder(options.out, options.storage, options.config.stem)
        try:
            return _profile(config, workers, folder, options, lines)
        finally:
            _tidy(folder)


def _one_worker(config: Systems) -> tuple[Systems, int]:
    """Return the configuration of one of the training workers, and how many there are."""
    workers = config.parallel.workers
    sharers = (
        1 if config.parallel.strategy == "pipeline" else workers
    )  # its stages see the whole batch
    share = {"parallel.workers": 1, "loader.batch_size": config.loader.batch_size // sharers}
    return (cfg.override(config, share), workers) if workers > 1 else (config, 1)


def _check(config: Systems, options: ProfileOptions) -> None:
    """Refuse what would fail later."""
    cli.allow(
        options.steps is None or options.steps >= 3,
        "--steps",
        options.steps,
        "a whole number of at least 3",
    )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"torchrun: profile runs in one process; start it as {options.command}")
    cli.check_here(config, evaluates=False)
    if options.out is None:
        remote.check(options.storage)


def _folder(out: Path | None, storage: Path, stem: str) -> Path:
    """Return a new or empty folder. Without `--out`, `-2`, `-3`, … is added to a name that is
    taken."""
    names = [out] if out is not None else numbered(storage, f"profile-{stem}")
    for folder in names:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            with cli.writing("--out", folder):
                folder.mkdir(parents=True, exist_ok=True)
            return folder
    raise ConfigError(f"--out: {out} exists and is not empty; allowed: a new or an empty folder")


def _tidy(folder: Path) -> None:
    """Remove what an interruption left of the trainings, and the folder when there is nothing in
    it."""
    for left in folder.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _profile(
    config: Systems, workers: int, folder: Path, options: ProfileOptions, lines: EventLines
) -> ProfileResult:
    from tunediff.profiling import files, run
    from tunediff.training.run_trial import end_of

    try:
        profile = run.profile(
            config, folder, lines.aside.say, name=options.config.stem, command=options.command, workers=workers,
            steps=options.steps, attempt=options.attempt,
        )  # fmt: skip
    except Exception as error:
        if end_of(error).status == "oom":
            raise TunediffError(
                f"out of memory with a batch of {config.loader.batch_size}: {error}"
            ) from error
        if cfg.of(config).file is not None and not isinstance(error, TunediffError):
            raise UserCodeError(code.trace(error).rstrip("\n")) from error  # the user's own lines
        raise
    profile["wall_s"] = time.monotonic() - lines.begun
    result = ProfileResult(folder, profile, files.write_all(profile, folder))
    remote.push_or_warn(folder)
    return result
