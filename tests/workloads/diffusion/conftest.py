from typing import Any

import pytest
import torch
from torch import Tensor

from tests.evaluation.conftest import cache, digits, one_thread
from tunediff.config import baseline, override
from tunediff.workloads.diffusion.process import Diffusion

__all__ = ["cache", "digits", "one_thread"]


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def config() -> Any:
    return override(baseline("digits"), {"evaluation.images": 130, "evaluation.batch_size": 50})


class Identity(Diffusion):
    """A diffusion whose images are its noise: one network call, one added noise."""

    def __init__(self) -> None:
        super().__init__(baseline("digits").process)

    def sample(self, predict, noise: Tensor, *, step_noise, **how) -> Tensor:
        t = torch.zeros(len(noise), dtype=torch.int64, device=noise.device)
        return predict(0.3 * noise, t) + 0.1 * step_noise(0) + 0.1 * step_noise(1)


@pytest.fixture
def identity() -> Identity:
    return Identity()
