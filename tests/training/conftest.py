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
    """Seconds pass when a test says so."""
    now = [100.0]
    monkeypatch.setattr("tunediff.training.phases.time.perf_counter", lambda: now[0])

    def passing(seconds):
        now[0] += seconds

    return passing
