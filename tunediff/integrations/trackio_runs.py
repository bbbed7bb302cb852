"""Write a search to Trackio's local database, or to the Space or server that Trackio's own
variables name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import trackio

from tunediff.core.point import Point
from tunediff.integrations.services import Run, RunEnd, numbers, project


class TrackioRuns:
    """The runs of a search. Trackio has one open run, so each is opened for what is sent and closed
    again."""

    def __init__(self, folder: Path) -> None:
        pass

    def send(
        self, run: Run, points: Sequence[Point], pictures: Mapping[str, Path], end: RunEnd | None
    ) -> None:
        name = run.name if run.kind in ("search", "training") else f"{run.search}/{run.name}"
        trackio.init(
            project=project("TRACKIO_PROJECT"), name=name, group=run.search, config=dict(run.config), resume="allow",
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        images = {key: trackio.Image(str(path)) for key, path in pictures.items()}
        for point in points:
            shown = images if point is points[-1] else {}
            trackio.log({**numbers(point), **shown}, step=point.index)
        if end is not None:
            words = {"status": end.status, "reason": end.reason, **end.summary}
            result = {key: value for key, value in words.items() if value not in ("", None)}
            trackio.log({**result, **(images if not points else {})})
            for path in end.files:
                trackio.save(str(path))
        trackio.finish()

    def close(self) -> None:
        """Do nothing: every run is closed."""
