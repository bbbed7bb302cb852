"""Shared by the tests of facts."""

import pytest

from tests import searches


@pytest.fixture
def night(tmp_path):
    """The folder of a small search."""
    return searches.night(tmp_path / "night")
