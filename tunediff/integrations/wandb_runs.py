"""Send a search to Weights & Biases: a run per trial, grouped by search. `WANDB_MODE=offline`
writes files instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from tunediff.core.point import Point
from tunediff.integrations.services import Run, RunEnd, numbers, project


class WandbRuns:
    """The open runs. Their files are in `wandb/` of the search's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, dict[str, Any]()

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        if run.id not in self._runs:
            self._runs[run.id] = self._begin(run)
        opened = self._runs[run.id]
        images = {name: wandb.Image(str(path)) for name, path in pictures.items()}
        for point in points:
            shown = images if point is points[-1] else {}
            opened.log({**numbers(point), **shown}, step=point.index, commit=True)
        if end is None:
            return
        if not points and images:
            opened.log(images)
        for path in end.files:
            opened.log({path.stem: wandb.Html(str(path))})
        opened.summary.update({"status": end.status, "reason": end.reason, **end.summary})
        opened.finish(exit_code=int(end.failed))
        del self._runs[run.id]

    def close(self) -> None:
        """Mark what still runs as going on later; a run of the same id continues it."""
        for opened in self._runs.values():
            opened.mark_preempting()
            opened.finish(exit_code=1)

    def _begin(self, run: Run) -> Any:
        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True,
            x_disable_machine_info=True,
        )  # fmt: skip
        opened = wandb.init(
            project=project("WANDB_PROJECT"), name=run.name, group=run.search, job_type=run.kind, id=run.id,
            resume="allow", reinit="create_new", dir=str(self._folder), config=dict(run.config), settings=quiet,
        )  # fmt: skip
        opened.define_metric("train_s")
        opened.define_metric("*", step_metric="train_s")
        return opened
