"""Users' folders are on the path of imports only as long as the test that made them."""

import sys

import pytest


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
