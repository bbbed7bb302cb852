"""Trainings, profiles and saved models from Python: `tunediff.run_training`, `run_profile` and
`load_model`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from tunediff import cli, models
from tunediff.api import notebook, profile_run, train_run
from tunediff.api.calls import (
    Knobs,
    as_printed,
    called,
    duration,
    folder,
    with_plain_numbers,
    words,
)
from tunediff.api.display import lines_of
from tunediff.api.profile_run import ProfileOptions, ProfileResult
from tunediff.api.train_run import TrainOptions
from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.clock import UnitName
from tunediff.distributed import share_of_cores
from tunediff.models import Saved
from tunediff.report.html import el, join, table
from tunediff.training import process_settings


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

        `tunediff knobs --schema train-output` describes its keys.
        """
        return as_printed(cli.versioned(train_run.as_json(self.folder)))

    def points(self) -> pd.DataFrame:
        """Return one row per evaluation."""
        trial = record.read_trial(self.folder)
        rows = [point.flat for point in trial.points] if trial is not None else []
        return pd.DataFrame(rows).drop(columns="seconds", errors="ignore")

    def load(self) -> Saved:
        """Return its model."""
        return models.find(str(self.folder))

    def _repr_html_(self) -> str:
        rows = [[name, text.number(value)] for name, value in train_run.values(self.folder).items()]
        return str(join(el("p", el("b", self.folder.name)), table(["", ""], rows, words=2)))

    def __repr__(self) -> str:
        return f"Training({str(self.folder)!r})"


def run_training(
    config: Any, *knobs: Knobs, budget: str | float | None = None, unit: UnitName | None = None,
    samples: int | None = None, name: str | None = None, out: str | Path | None = None,
    storage: str | Path = text.STORAGE, initial: str | Path | None = None, track: str | None = None,
    progress: bool = True,
) -> Training:  # fmt: skip
    """Train one configuration in this process, or go on with a training in the same folder; return
    it, finished.

    Args:
        config: A configuration file such as an exported best.yaml, a baseline (`digits`), or a
            workload as `run_search` takes it, which is trained with its baseline.
        knobs: Changes: `"optimizer.lr=1e-3"`, or `{"optimizer.lr": 1e-3}`.
        budget, unit, samples: Training seconds (times devices: `unit="device"`), and training
            samples; whichever comes first ends it.
        name, out: Name of its folder in `storage`, or a folder anywhere. Default: train-CONFIG.
        initial: Weights to start from.
        track: `wandb`, `mlflow`, `trackio` or `tensorboard`: shows it as a run
            (docs/how-to/trackers.md).
        progress: Show bars and a line per evaluation on stderr of a terminal, elsewhere log to
            `tunediff.api`.

    Raises:
        TunediffError: Something is not allowed, or the training failed; the message is the one of
            the command.
        KeyboardInterrupt: It was interrupted; the same call goes on from its checkpoint.
    """
    place = folder(storage)
    with _in_this_process():
        options = TrainOptions(
            Path(notebook.named(config, place)), words(knobs), budget=duration(budget), unit=unit, samples=samples,
            name=name, out=None if out is None else Path(out), storage=place,
            initial=None if initial is None else Path(initial), track=track,
        )  # fmt: skip
        if budget is None and samples is None:
            raise ConfigError(
                "run_training: needs budget or samples; only the command trains without an end"
            )
        request = train_run.prepare(with_plain_numbers(options))
        if stopped := train_run.run(request, lines_of(progress)):
            raise KeyboardInterrupt(stopped)
    return Training(request.folder)


def run_profile(
    config: Any, *knobs: Knobs, out: str | Path | None = None, storage: str | Path = text.STORAGE,
    steps: int | None = None, attempt: bool = False, progress: bool = True,
) -> ProfileResult:  # fmt: skip
    """Measure where the seconds and the memory of a training go, in this process.

    Args:
        config, knobs: As `run_training` takes them.
        out: New folder for the results. Default: profile-CONFIG in `storage`.
        steps: Steps to measure. Default: what 5 seconds take.
        attempt: Measure each piece of advice as well.
        progress: Show what is measured next on stderr of a terminal, elsewhere log it to
            `tunediff.api`.

    Raises:
        TunediffError: Something is not allowed, or memory does not suffice.
    """
    place, out = folder(storage), None if out is None else Path(out).expanduser().absolute()
    with _in_this_process():
        options = ProfileOptions(
            Path(notebook.named(config, place)), words(knobs), out, place, steps, attempt,
            command="tunediff.run_profile",
        )  # fmt: skip
        return profile_run.run(with_plain_numbers(options), lines_of(progress))


def load_model(name: str | Path, storage: str | Path = text.STORAGE) -> Saved:
    """Return a saved model: of a training, the best of a search, `NAME/t0003`, an exported file.

    `Saved.network("cpu")` is the network with its weights. Raises `ConfigError` where there is
    none.
    """
    with called():
        return models.find(str(name), folder(storage))


@contextlib.contextmanager
def _in_this_process() -> Iterator[None]:
    """Put back what a training sets for its whole process, such as the number of threads.

    Inside, torch has its share of the cores, or fewer threads if the program has set so.
    """
    before = process_settings.read()
    try:
        with called(), share_of_cores(keep_fewer=True):
            yield
    finally:
        process_settings.restore(before)
