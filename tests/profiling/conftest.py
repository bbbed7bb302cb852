"""Short trainings on the tiny set, one thread."""

import pytest

from tests.helpers import CPU, tiny
from tests.training.conftest import one_thread  # noqa: F401
from tunediff.profiling.measure import Bench
from tunediff.training.meter import COMMON

PHASES = (*COMMON, "sampler", "ema")
"""Of a step of the diffusion workload."""


@pytest.fixture
def bench():
    return Bench(tiny(), CPU)
