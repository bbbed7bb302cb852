"""When torch.compile has paid."""

import os
import re
import sys
import types

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


FAILING = """
import dataclasses
import os
import tunediff

@dataclasses.dataclass(frozen=True)
class Knobs:
    lr: float = 0.1
OBJECTIVE = tunediff.Metric("loss", "min")
def train(trial):
    {body}
"""
UNCOMPILABLE = 'raise RuntimeError(os.environ["TORCHINDUCTOR_CACHE_DIR"] + "\\nand a long story")'


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "the process that compiled was killed"),
        (UNCOMPILABLE, r"RuntimeError: .*/\.compiled-.*"),  # an empty cache of its own
    ],
)
def test_compilation_that_fails_is_a_result_and_runs_no_script_again(tmp_path, monkeypatch, body, reason):
    script, mine, scratch = tmp_path / "script.py", tmp_path / "mine.py", tmp_path / "scratch"
    scratch.mkdir()
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    mine.write_text(FAILING.format(body=body))
    plain = types.ModuleType("__main__")
    plain.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", plain)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    found = compiling.compile_cost(cfg.baseline(str(mine)), 3, scratch)
    assert found["mode"] == "default"
    assert re.fullmatch(reason, found["failed"])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert not list(scratch.iterdir())
    assert not (tmp_path / "ran").exists()


def test_what_is_measured_beside_each_other(monkeypatch):
    seen = []

    def speed(bench, config, steps, segments=3):
        if segments > 1:
            seen.append((config.compile.mode, config.compile.scope))
        return {"first_step_s": 1.0, "compile_s": 0.0, "step_s": 1.0}

    monkeypatch.setattr(Bench, "speed", speed)
    config = tiny(compile__mode="max-autotune", compile__scope="blocks")
    eager, _ = compiling._eager_and_compiled(config, "max-autotune", 3)
    assert len(eager) == 2
    compiling._eager_and_compiled(tiny(), "default", 3)
    plain = ("none", "model")
    assert seen == [plain, ("max-autotune", "blocks"), plain, plain, ("default", "model"), plain]


@pytest.mark.nightly
def test_compile_cost(tmp_path):
    found = compiling.compile_cost(tiny(), 10, tmp_path)
    assert "failed" not in found
    assert found["compile_s"] > 1
    assert found["graphs"] >= 1
