"""What Ray's pages are told about a search, without a cluster."""

import typing

import pytest

from tests.helpers import point as point_of
from tunediff import config as cfg
from tunediff import search_space
from tunediff.core.journal import Journal
from tunediff.core.trial_record import End
from tunediff.ray_backend.backend import RayDashboardReporter

CONTENT = {
    "workload": "digits",
    "budget": {"per_trial": "9s", "trials": 4},
    "search": {"loader.batch_size": [64, 128, 256], "precision.amp": ["none", "bf16"]},
}


SPACE = search_space.parse(CONTENT, "here")


class Gauge:
    said: typing.ClassVar = []

    def __init__(self, name, description, tag_keys):
        self.name = name

    def set(self, value, tags):
        Gauge.said.append((self.name, value, tags["trial"]))


@pytest.fixture
def board(tmp_path, monkeypatch):
    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    Gauge.said.clear()
    shown = []
    show = lambda slot, line: shown.append((slot, line))  # noqa: E731
    return RayDashboardReporter(tmp_path, SPACE, show), shown


def test_a_trial_is_named_with_its_knobs_and_its_latest_numbers(board, tmp_path):
    told, shown = board
    drawn = {"loader.batch_size": 256, "precision.amp": "none"}
    journal = Journal(tmp_path / "trials" / "t0003")
    journal.start(*cfg.identity(SPACE.config(drawn)), drawn, 9.0, 3)
    told.start("t0003", {"slot": 1})
    point = point_of(1, 4.5, frechet=23.44, samples_per_s=4012.7, label="FD (classifier)")
    journal.point(point)
    told.point("t0003", {**point.flat, "objective": 23.44, "slot": 1})
    journal.end(End("oom", "16 GiB wanted"))
    told.end("t0003", {"slot": 1})
    assert shown == [
        (1, "t0003  start  loader.batch_size=256"),
        (1, "t0003  FD (classifier) 23.4  at 4.5 s, 4,013 images/s  loader.batch_size=256"),
        (1, "t0003  oom  FD (classifier) 23.4  at 4.5 s, 4,013 images/s  16 GiB wanted  loader.batch_size=256"),
    ]
    assert ("tunediff_objective", 23.44, "t0003") in Gauge.said
    assert ("tunediff_samples_per_s", 4012.7, "t0003") in Gauge.said
