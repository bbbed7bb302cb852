import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tunediff.config import baseline
from tunediff.data import images
from tunediff.data.images import Images
from tunediff.evaluation import features


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, one_thread: None, digits: Images) -> Iterator[Path]:
    """One cache folder for all tests of this folder, with the classifier: all test processes train it once."""
    folder, base = tmp_path_factory.mktemp("cache"), tmp_path_factory.getbasetemp()
    common = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "classifier"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEDIFF_CACHE", str(common))
        features.Classifier(digits, "cpu")
        for file in common.glob("classifier-*.safetensors"):
            shutil.copy(file, folder)
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
