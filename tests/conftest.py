"""Shared by all tests."""

import os

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as the commands do; before anything imports torch


def pytest_collection_modifyitems(config, items):
    """Slow tests run when asked for: `-m slow`."""
    if "slow" in config.getoption("-m"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
