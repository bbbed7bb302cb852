"""Check the folder of somebody's result: compute its verdict again from its journals alone.

No code of the folder runs: journals, rules and digests are data. Compared are the numbers that
follow from the journals, the files' digests, and the seeds that follow from the code.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import pairs
from tunediff.analysis.pair_test import HOLDOUT, JUDGE, PairTest
from tunediff.config import recorded
from tunediff.core.errors import ConfigError
from tunediff.judge import frozen_code, proof
from tunediff.report.pair_summary import measured

TOLERANCE = 1e-9
"""Relative difference of a number on another machine that is rounding."""


@dataclasses.dataclass(frozen=True)
class CheckedFolder:
    """What the check of one folder has found."""

    folder: Path
    test: PairTest
    content: Mapping[str, Any]
    """Its file, `pairs.FILE`."""
    code: Mapping[str, Any]
    faults: list[str]
    """What is not as the folder says; empty: verified."""
    notes: list[str]
    """What a reader should know, and is no fault."""

    @property
    def values(self) -> dict[str, Any]:
        """Return the result of the check, for `verify --json`."""
        return {
            "folder": str(self.folder),
            "a": self.content["a"],
            "b": self.content["b"],
            "verified": not self.faults,
            "faults": self.faults,
            "notes": self.notes,
            **measured(self.test),
        }


def check(folder: Path) -> CheckedFolder:
    """Check a folder that `compare --out` has written. Raises `ConfigError` for another one."""
    for name in (proof.FILE, proof.RESULT, pairs.FILE):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder}: has no {name}; allowed: what tunediff compare --out has written"
            )
    said, result = _json(folder / proof.FILE), _json(folder / proof.RESULT)
    content, code = cfg.read_yaml(folder / pairs.FILE), frozen_code.read(folder)
    cfg.check_format(said.get("format"), f"{folder / proof.FILE}: format")
    for key in ("objective", "mode", "pairs", "within"):
        if key not in content:
            raise ConfigError(f"{folder / pairs.FILE}: is damaged: {key} is missing")
    test = PairTest.read(folder, content)
    faults = [
        *_changed_files(folder, said.get("files", {})),
        *_other_numbers(measured(test), result),
        *_other_code(folder, code, test),
        *_other_judges(folder, content),
    ]
    notes = [
        f"{side}: its files changed while it ran; the copy is of the end"
        for side in said.get("changed_meanwhile", ())
    ]
    return CheckedFolder(folder, test, content, code, faults, notes)


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError(f"{file}: is damaged: {error}") from None


def _changed_files(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    """Yield each file that is missing, changed or new since the folder was written."""
    found = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and path.name != proof.FILE
    }
    for name, digest in files.items():
        if name not in found:
            yield f"{name}: is missing"
        elif frozen_code.sha256(found[name]) != digest:
            yield f"{name}: has been changed"
    journals = (name for name in found.keys() - files.keys() if name.startswith("trials/"))
    yield from (f"{name}: was not there" for name in sorted(journals))


def _other_numbers(computed: Mapping[str, Any], said: Mapping[str, Any]) -> Iterator[str]:
    """Yield each key of the result that the journals contradict."""
    for key, value in computed.items():
        if not _equal(value, said.get(key)):
            yield f"{key}: {said.get(key)} in {proof.RESULT}, {value} by the journals"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=TOLERANCE)
    return bool(one == other)


def _other_code(folder: Path, code: Mapping[str, Any], test: PairTest) -> Iterator[str]:
    """Yield what contradicts the digests of the code: files, digests, and seeds."""
    if not code:
        return
    for side in recorded.SIDES:
        frozen = frozen_code.side_of(code, side)
        if frozen.digest != code[side]["digest"]:
            yield f"{side}: its digest is not that of its files and its configuration"
        for name, digest in frozen.files.items():
            copy = folder / side / name  # a large file is named and not copied
            if copy.is_file() and frozen_code.sha256(copy) != digest:
                yield f"{side}/{name}: is not the file that ran"
    first = code["first_seed"]
    digests = [code[side]["digest"] for side in recorded.SIDES]
    if code["drawn"] and first != frozen_code.drawn_seed(digests):
        yield f"first_seed: {first} does not follow from the digests of the code"
    if code["drawn"]:
        for number, pair in enumerate(test.runs):
            for run in pair:
                if run is not None and run.seed != first + number:
                    yield f"{run.name}: its seed is {run.seed}, not {first + number}"


def _other_judges(folder: Path, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield each judge that is not the one that was locked."""
    for key, name in (("judge", JUDGE), ("holdout", HOLDOUT)):
        digest = content.get(key)
        if digest is not None and frozen_code.sha256(folder / name) != digest:
            yield f"{name}: is not the {key} that was locked"
