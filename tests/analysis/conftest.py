"""Shared by the tests of facts."""

from tests.report.conftest import night

__all__ = ["night"]
