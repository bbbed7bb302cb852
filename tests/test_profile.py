"""The profile command: what it leaves behind, what it prints, what it refuses."""

import gzip
import json
import os
import re
from pathlib import Path

import pytest
import torch

from tests.helpers import CPU, TINY, tiny
from tests.profiling.conftest import PHASES
from tests.users import plain
from tunediff import config as cfg
from tunediff import profile
from tunediff.core import environment
from tunediff.core.trial_record import NotFiniteError
from tunediff.profiling import run as profiling_run
from tunediff.profiling import trace
from tunediff.profiling.measure import Bench

WORDS = [f"{name}={json.dumps(value)}" for name, value in TINY.items()]
FILES = {"profile.json", "profile.md", "operations.csv", "trace.json.gz"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, at_tmp_path):
    """A folder of its own; one thread, no matter what the machine has, and no GPU."""
    monkeypatch.setattr(profiling_run, "alone", lambda: CPU)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.fixture
def quick(monkeypatch, in_this_process):
    """Numbers as if measured, in no time."""
    made = {
        "samples_per_s": 100.0, "samples_per_s_sd": 1.0, "step_s": 0.16, "parts_s": dict.fromkeys(
            (*PHASES, "other"), 0.02
        ), "compile_s": 0.0, "disturbed": False, "peak_memory_mib": 100.0, "peak_host_memory_mib": 100.0, "first_step_s": 0.2, "flops_per_sample": 1e6,
        "peak_flops_per_s": 1e9, "peak_share": 0.1, "steps": 3, "batch_size": 16,
    }  # fmt: skip
    traced = {
        "operations": [], "traced_steps": 4, "convolution_share": 0.0,
        "memory": {"static": {"parameters": 1.0}, "peak": None},
    }  # fmt: skip
    for owner, name, found in ((Bench, "speed", made), (trace, "trace", traced)):
        monkeypatch.setattr(owner, name, lambda *_, found=found, **__: dict(found))
    monkeypatch.setattr(Bench, "loader_rate", lambda bench, config: None if config.loader.resident else 310.0)
    return made


def test_profile_of_the_digits(tmp_path, capsys, monkeypatch, in_this_process):
    monkeypatch.setattr(trace, "TRACED", 2)
    words = ["--config", "digits", "--steps", "3", "--out", "here", "data.max_images=32"]
    words += [word for word in WORDS if "max_images" not in word]
    assert profile.main(words) == 0
    out, err = capsys.readouterr()
    assert {path.name for path in (tmp_path / "here").iterdir()} == FILES, "and no checkpoint of a training"
    assert os.listdir() == ["here"]

    found = json.loads((tmp_path / "here" / "profile.json").read_text())
    step = found["step"]
    assert step["steps"] == 3
    assert sum(step["parts_s"].values()) == pytest.approx(step["step_s"], rel=0.05)
    assert step["samples_per_s"] == pytest.approx(16 / step["step_s"])
    assert found["loader_samples_per_s"] > 0
    assert len(found["operations"]) == 10
    assert found["config"] == cfg.flat(tiny(data__max_images=32))
    assert found["environment"] == environment.describe()
    assert found["command"].startswith("tunediff profile --config digits --steps 3")
    assert found["samples"] == {"name": "digits", "count": 32, "mib": 32 * 64 / 2**20}

    with gzip.open("here/trace.json.gz") as file:
        assert json.load(file)["traceEvents"]
    for title in (
        "profile", "where the step goes", "the ten longest operations", "memory", "what to try next",
    ):  # fmt: skip
        assert f"\n{title}:\n" in f"\n{out}"
    assert "alone, the loader gives" in out
    assert "report: here/profile.md\n" in out
    assert out.splitlines()[-1] == "trace: here/trace.json.gz (open it at ui.perfetto.dev)"
    assert re.search(r"^\[ *(\d+m)?\d+s\] the loader alone, and a trace of 2 steps$", err, re.M)


def test_options_of_a_profile(capsys, quick):
    """A name that is taken gets a number, one worker of several is measured, JSON is the file."""
    words = ["--config", "digits", "parallel.workers=4"]
    for name in ("profile-digits", "profile-digits-2"):
        assert profile.main(words) == 0
        assert f"report: ray_results/{name}/profile.md" in (out := capsys.readouterr().out)
    assert "one of 4 training workers" in out
    Path("empty").mkdir()
    assert profile.main([*words, "--json", "--out", "empty"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(Path("empty/profile.json").read_text())
    assert (found["config"]["parallel.workers"], found["config"]["loader.batch_size"]) == (1, 32)
    assert found["loader_samples_per_s"] == 310.0


# ------------------------------------------------------------------------------------------------------------- failures
def test_profile_is_copied_to_the_address_of_its_storage(tmp_path, capsys, quick):
    assert profile.main(["--config", "digits", "--storage", f"file://{tmp_path}/bucket"]) == 0
    assert (tmp_path / "bucket/profile-digits/profile.json").exists()


def test_error_of_a_users_workload_is_its_own_lines(tmp_path, capsys):
    text = (
        Path(plain.__file__)
        .read_text()
        .replace("    net = nn.Sequential(", '    raise ValueError("my own mistake")\n    net = nn.Sequential(')
    )
    (tmp_path / "mine.py").write_text(text)
    assert profile.main(["--config", "mine.py"]) == 1
    err = capsys.readouterr().err
    assert "ValueError: my own mistake" in err
    assert "mine.py" in err
    assert "tunediff/profiling" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 1), (NotFiniteError("the loss is not finite"), 1),
        (KeyboardInterrupt("interrupted"), 130), (cfg.ConfigError("loader.workers: no shared memory"), 2),
        (ZeroDivisionError("ours"), None),
    ],
)  # fmt: skip
def test_a_profile_that_fails_leaves_nothing(tmp_path, capsys, quick, monkeypatch, error, code):
    def fail(bench, config, path, step_s):
        (path.parent / ".training-x").mkdir()
        raise error

    monkeypatch.setattr(trace, "trace", fail)
    words = ["--config", "digits", "--out", "here"]
    if code is None:
        with pytest.raises(ZeroDivisionError):  # a fault of ours is not hidden
            profile.main(words)
    else:
        assert profile.main(words) == code
        assert str(error) in capsys.readouterr().err
    assert not (tmp_path / "here").exists()


def test_torchrun_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert profile.main(["--config", "digits", "--steps", "9"]) == 2
    assert capsys.readouterr().err.endswith("start it as tunediff profile --config digits --steps 9\n")
