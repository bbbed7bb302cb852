from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tunediff.config import baseline
from tunediff.data import images
from tunediff.data.images import Images


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
