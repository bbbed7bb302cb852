"""Users' folders are on the path of imports only as long as the test that made them."""

import pytest


@pytest.fixture(autouse=True)
def _imports_as_before(imports_as_before): ...
