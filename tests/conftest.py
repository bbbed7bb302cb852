"""Shared by all tests."""

import gc
import os
import sys

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as the commands do; before anything imports torch


def pytest_collection_finish():
    """Every training collects garbage first: without this it would look at all that was imported, for a third of a
    second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    if helpers := sys.modules.get("tests.helpers"):
        helpers.end_pair()


@pytest.fixture(autouse=True)
def _timed_in_no_time(monkeypatch):
    """What a search measures before it starts is measured in this process, and shortly: few tests care."""
    from tests.helpers import measure_here, measured_once
    from tunediff.training import hardware, judging

    measure_here(monkeypatch)
    monkeypatch.setattr(judging, "LONG_ENOUGH_S", 1e-4)
    monkeypatch.setattr(hardware, *measured_once())


def pytest_collection_modifyitems(config, items):
    """Slow tests run when asked for: `-m slow`."""
    if "slow" in config.getoption("-m"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
