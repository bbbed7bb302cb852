"""Short trainings on the tiny set, one thread."""

import pytest
import torch

from tests.training.conftest import images, one_thread  # noqa: F401
from tunediff.distributed import World
from tunediff.profiling.measure import Bench

CPU = World(0, 1, torch.device("cpu"))


@pytest.fixture
def bench(images):  # noqa: F811
    return Bench(images, CPU)
