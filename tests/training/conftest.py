"""A training that takes a second: few digits, a tiny network."""

import pytest
import torch

from tests.helpers import TINY, tiny
from tunediff.data import images as data

__all__ = ["TINY", "tiny"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def images():
    return data.load(tiny().data)


@pytest.fixture
def passing(monkeypatch):
    """Seconds pass when a test says so; nothing that is timed by them is measured before a training."""
    now = [100.0]
    for name, replaced in (
        ("tunediff.training.meter.time.perf_counter", lambda: now[0]),
        ("tunediff.training.hardware.peak_flops_per_s", lambda *_: 1e9),
    ):
        monkeypatch.setattr(name, replaced)

    def passing(seconds):
        now[0] += seconds

    return passing
