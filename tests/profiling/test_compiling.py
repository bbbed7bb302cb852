"""When torch.compile has paid."""

import os
import signal

import pytest

from tests.helpers import tiny
from tunediff import config as cfg
from tunediff.analysis.speed import break_even
from tunediff.profiling import compiling
from tunediff.profiling.measure import Bench


def test_break_even():
    samples, seconds = break_even(60.0, 150.0, 1.5)
    assert (samples, seconds) == (pytest.approx(18_000), pytest.approx(180))
    assert 60 + samples / 150 == pytest.approx(seconds), "both trainings are there at that second"
    assert break_even(1.0, 100.0, 1.0) is None
    assert break_even(0.0, 90.0, 0.9) is None
    assert break_even(0.0, 110.0, 1.1) == (0.0, 0.0)


def measured(samples_per_s, sd=1.0, **values):
    return {
        "samples_per_s": samples_per_s, "samples_per_s_sd": sd, "first_step_s": 2.0, "compile_s": 0.0,
        "peak_memory_mib": 5.0, "disturbed": False, **values,
    }  # fmt: skip


def test_compiled_against_eager():
    eager = [measured(98.0, first_step_s=9.0), measured(102.0)]
    found = compiling.compared("default", eager, measured(150.0, compile_s=62.0, compiled_graphs=3, expected_graphs=4))
    assert found["compile_s"] == 60.0, "the first step is not compilation"
    assert (found["eager_samples_per_s"], found["speedup"]) == (100.0, 1.5)
    assert found["break_even"]["seconds"] == pytest.approx(180)
    assert (found["within_noise"], found["graphs"], found["expected_graphs"]) == (False, 3, 4)
    assert not found["disturbed"]
    assert compiling.compared("default", [measured(100.0, sd=20.0)], measured(130.0, sd=20.0))["within_noise"]
    drifted = [measured(60.0), measured(140.0, disturbed=True)]
    assert compiling.compared("default", drifted, measured(150.0))["within_noise"]
    assert compiling.compared("default", drifted, measured(150.0))["disturbed"]
    assert compiling.compared("default", [measured(100.0, None)], measured(130.0, None))["break_even"] is not None


def killed(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def uncompilable(*args):
    assert ".compiled-" in os.environ["TORCHINDUCTOR_CACHE_DIR"], "an empty cache of its own"
    raise RuntimeError("no C++ compiler\nand a long story")


@pytest.mark.parametrize(
    ("child", "reason"),
    [(killed, "the process that compiled was killed"), (uncompilable, "RuntimeError: no C++ compiler")],
)
def test_compilation_that_fails_is_a_result(tmp_path, monkeypatch, child, reason):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.setattr(compiling, "_eager_and_compiled", child)
    assert compiling.compile_cost(tiny(), 3, tmp_path) == {"mode": "default", "failed": reason}
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert not list(tmp_path.iterdir())


def test_what_is_measured_beside_each_other(monkeypatch):
    seen = []

    def speed(bench, config, steps, segments=3):
        if segments > 1:
            seen.append((config.compile.mode, config.compile.scope))
        return {"first_step_s": 1.0, "compile_s": 0.0, "step_s": 1.0}

    monkeypatch.setattr(Bench, "speed", speed)
    nested = cfg.to_dict(tiny(compile__mode="max-autotune", compile__scope="blocks"))
    eager, _ = compiling._eager_and_compiled(nested, "max-autotune", 3)
    assert len(eager) == 2
    compiling._eager_and_compiled(cfg.to_dict(tiny()), "default", 3)
    plain = ("none", "model")
    assert seen == [plain, ("max-autotune", "blocks"), plain, plain, ("default", "model"), plain]


@pytest.mark.nightly
def test_compile_cost(tmp_path):
    found = compiling.compile_cost(tiny(), 10, tmp_path)
    assert "failed" not in found
    assert found["compile_s"] > 1
    assert found["graphs"] >= 1
