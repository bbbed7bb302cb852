"""Shared by the tests of facts."""

from tests.report.conftest import night  # noqa: F401
