"""Shared by all tests."""

import os

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as the commands do; before anything imports torch


@pytest.fixture(autouse=True)
def _timed_in_no_time(monkeypatch):
    """How fast a network judges is measured before every search and in every dry run; few tests care."""
    from tunediff.training import judging

    monkeypatch.setattr(judging, "LONG_ENOUGH_S", 1e-4)


def pytest_collection_modifyitems(config, items):
    """Slow tests run when asked for: `-m slow`."""
    if "slow" in config.getoption("-m"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
