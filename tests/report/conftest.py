"""Shared by the tests of words and pictures."""

import pytest

from tests import searches
from tests.conftest import PNG
from tunediff.report import style


@pytest.fixture
def night(tmp_path):
    """The folder of a small search."""
    return searches.night(tmp_path / "night")


@pytest.fixture
def plain(monkeypatch):
    """Figures cost seconds: where only words matter they are a dot."""

    def draw(build, kind):
        return None if build() is None else PNG

    monkeypatch.setattr(style, "draw", draw)
