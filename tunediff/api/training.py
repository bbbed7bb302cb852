"""Trainings, profiles, saved models from Python: `run_training`, `run_profile`, `load_model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tunediff import models
from tunediff.api import notebook, profile_run, train_run
from tunediff.api.calls import (
    Knobs,
    ProgressKeywords,
    as_printed,
    called,
    folder,
    keywords,
    words,
)
from tunediff.api.display import lines_of
from tunediff.api.profile_run import ProfileOptions, ProfileResult
from tunediff.api.train_run import TrainOptions
from tunediff.config import ConfigError
from tunediff.core import files, text
from tunediff.core import trial_record as record
from tunediff.models import Saved


class Training:
    """A finished training in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def value(self) -> float | None:
        """Return the objective at its end."""
        value: float | None = self.json()["value"]
        return value

    @property
    def weights(self) -> Path:
        """Return the file with the weights that were evaluated."""
        return self.folder / models.WEIGHTS

    def json(self) -> dict[str, Any]:
        """Return the result as `tunediff train --json` prints it.

        `tunediff/schemas/train-output.json` describes its keys.
        """
        return as_printed(text.versioned(train_run.result(self.folder)))

    def points(self) -> pd.DataFrame:
        """Return one row per evaluation."""
        trial = record.read_trial(self.folder)
        rows = [point.flat for point in trial.points] if trial is not None else []
        return pd.DataFrame(rows).drop(columns="seconds", errors="ignore")

    def load(self) -> Saved:
        """Return its model."""
        return models.find(str(self.folder))

    def __repr__(self) -> str:
        return f"Training({str(self.folder)!r})"


class TrainCall(ProgressKeywords, TrainOptions):
    """The keywords of `run_training`."""


class ProfileCall(ProgressKeywords, ProfileOptions):
    """The keywords of `run_profile`."""


@keywords(TrainCall)
def run_training(config: Any, *knobs: Knobs, **options: Any) -> Training:
    """Train one configuration in a process, or go on in the same folder; return it, finished.

    Args:
        config: A configuration file such as an exported best.yaml, a baseline (`digits`), or a
            workload as `run_search` takes it, which is trained with its baseline.
        knobs: Changes: `"optimizer.lr=1e-3"`, or `{"optimizer.lr": 1e-3}`.
        options: See `TrainCall`. Durations are seconds, or text such as `"10m"`.

    Raises:
        TunediffError: Something is not allowed, or the training failed; the message is the one of
            the command.
        KeyboardInterrupt: It was interrupted; the same call goes on from its checkpoint.
    """
    with called():
        call = TrainCall(**options | _named(config, knobs, options))
        if call.budget is None and call.samples is None:
            raise ConfigError(
                "run_training: needs budget or samples; only the command trains without an end"
            )
        request = train_run.prepare(call)
        if stopped := train_run.run(request, lines_of(call.progress)):
            raise KeyboardInterrupt(stopped)
    return Training(request.folder)


@keywords(ProfileCall)
def run_profile(config: Any, *knobs: Knobs, **options: Any) -> ProfileResult:
    """Measure where the seconds and the memory of a training go, in a process of its own.

    Args:
        config, knobs: As `run_training` takes them.
        options: See `ProfileCall`.

    Raises:
        TunediffError: Something is not allowed, or memory does not suffice.
    """
    with called():
        call = ProfileCall(**options | _named(config, knobs, options))
        call.out = call.out and Path(call.out).expanduser().absolute()
        return profile_run.run(call, "tunediff.run_profile", lines_of(call.progress))


def _named(config: Any, knobs: Sequence[Knobs], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a command line names, of a call."""
    storage = folder(options.get("storage") or files.STORAGE)
    path = Path(notebook.named(config, storage))
    return {"config": path, "words": words(tuple(knobs)), "storage": storage}


def load_model(name: str | Path, storage: str | Path = files.STORAGE) -> Saved:
    """Return a saved model: of a training, the best of a search, `NAME/t0003`, an exported file.

    `Saved.network("cpu")` is the network with its weights. Raises `ConfigError` where there is
    none.
    """
    with called():
        return models.find(str(name), folder(storage))
