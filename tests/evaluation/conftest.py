from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tunediff.config import baseline, override
from tunediff.data import images
from tunediff.data.images import Images
from tunediff.workloads.diffusion.process import Diffusion


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache folder for all tests of this folder: the classifier is trained once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEDIFF_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share busy cores wait for each other; nothing here is large enough to need them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def digits() -> Images:
    return images.load(baseline("digits").data)


@pytest.fixture
def config() -> Any:
    return override(baseline("digits"), {"evaluation.images": 130, "evaluation.batch_size": 50})


class Identity(Diffusion):
    """A diffusion whose images are its noise: one network call, one added noise."""

    def __init__(self) -> None:
        super().__init__(baseline("digits").process)

    def sample(self, predict, noise: Tensor, *, step_noise, **how) -> Tensor:  # type: ignore[no-untyped-def]
        t = torch.zeros(len(noise), dtype=torch.int64, device=noise.device)
        return predict(0.3 * noise, t) + 0.1 * step_noise(0) + 0.1 * step_noise(1)


@pytest.fixture
def identity() -> Identity:
    return Identity()
