"""What torch.compile finds and leaves."""

import os
from pathlib import Path

from tunediff.config.systems import Compile
from tunediff.training.compilation import cold_cache


def test_compiled_trials_find_no_cache(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    with cold_cache(Compile()):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"  # nothing is compiled
    with cold_cache(Compile(mode="default")):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert list(folder.iterdir()) == []
        assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert not folder.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    assert "TRITON_CACHE_DIR" not in os.environ
