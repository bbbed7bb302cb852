"""The folder of finished runs: what was asked, the parsed numbers, the result, and its check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunediff.core.errors import ConfigError
from tunediff.core.files import write_text
from tunediff.experiment.model import Experiment
from tunediff.finished import words
from tunediff.finished.comparison import FinishedComparison
from tunediff.finished.runs import FinishedRun
from tunediff.proof import proof
from tunediff.report import page, reading
from tunediff.report.result import JSON, Result

RUNS = "runs"
"""Folder with a file for each set: the parsed numbers, a line a run."""


def result_of(comparison: FinishedComparison, name: str) -> Result:
    """Return what finished runs have shown. Raises `ConfigError`."""
    found = comparison.result(name)
    return found.model_copy(update={"summary": words.summary(found)})


def write(comparison: FinishedComparison, folder: Path) -> Result:
    """Write experiment, parsed numbers, result and page into a new folder; return the result.
    Raises `ConfigError`, before anything is written."""
    found = result_of(comparison, folder.name)
    for index, runs in enumerate(comparison.sets):
        rows = [json.dumps(run._asdict()) for run in runs]
        write_text(folder / RUNS / f"{index}.jsonl", "\n".join(rows) + "\n")
    comparison.experiment.write(folder)
    page.write_finished(folder, found)
    return found


def verify(folder: Path) -> dict[str, Any]:
    """Return whether the result in such a folder is what its numbers give: `verified`, `faults`.
    Raises `ConfigError` for another folder."""
    experiment = Experiment.read(folder)
    files = [folder / RUNS / f"{index}.jsonl" for index in range(len(experiment.candidates))]
    for file in (folder / JSON, *files):
        if not file.is_file():
            raise ConfigError(f"{file}: is missing; allowed: what tunediff judge --out has written")
    sets = [
        [FinishedRun(**json.loads(line)) for line in file.read_text().splitlines()]
        for file in files
    ]
    found = reading.as_json(FinishedComparison(experiment, sets).result(folder.name))
    computed = {
        key: value for key, value in found.items() if key not in ("summary", "files", "name")
    }
    faults = [*proof.other_numbers(computed, json.loads((folder / JSON).read_text()))]
    return {"folder": str(folder), "verified": not faults, "faults": faults,
            "verdict": found["verdict"]}  # fmt: skip
