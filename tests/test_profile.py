"""The profile command: what it leaves behind, what it prints, what it refuses."""

import gzip
import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml

from tests.helpers import CPU, TINY, tiny
from tests.profiling.conftest import PHASES
from tests.test_models import SPACE
from tests.users import plain
from tunediff import analysis, profile, search_space
from tunediff import config as cfg
from tunediff.core import environment
from tunediff.core import trial_record as record
from tunediff.core.trial_record import NotFiniteError
from tunediff.export import provenance
from tunediff.profiling import measure, trace
from tunediff.profiling import run as profiling_run
from tunediff.profiling.measure import Bench

WORDS = [f"{name}={json.dumps(value)}" for name, value in TINY.items()]
FILES = {"profile.json", "profile.md", "operations.csv", "trace.json.gz"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of its own; one thread, no matter what the machine has, and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "HOST_SHARE", 0.5)
    monkeypatch.setattr(profiling_run, "alone", lambda: CPU)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.fixture
def quick(monkeypatch):
    """Numbers as if measured, in no time."""
    made = {
        "samples_per_s": 100.0, "samples_per_s_sd": 1.0, "step_s": 0.16, "parts_s": dict.fromkeys(
            (*PHASES, "other"), 0.02
        ), "compile_s": 0.0, "disturbed": False, "peak_memory_mib": 100.0, "peak_host_memory_mib": 100.0, "first_step_s": 0.2, "flops_per_sample": 1e6,
        "peak_flops_per_s": 1e9, "peak_share": 0.1, "steps": 3, "batch_size": 16,
    }  # fmt: skip
    traced = {
        "operations": trace.operations([], 4), "traced_steps": 4,
        "memory": {"static": {"parameters": 1.0}, "peak": None},
    }  # fmt: skip
    loaded = {"samples_per_s": 310.0, "samples": 100, "seconds": 0.3}
    monkeypatch.setattr(Bench, "speed", lambda bench, config, steps, segments=3: dict(made))
    monkeypatch.setattr(trace, "trace", lambda bench, config, path, step_s: dict(traced))
    monkeypatch.setattr(Bench, "loader_alone", lambda bench, config: dict(loaded))
    return made


def test_profile_of_the_digits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trace, "TRACED", 2)
    words = [
        "--config",
        "digits",
        "--steps",
        "3",
        "--out",
        "here",
        *(word for word in WORDS if "max_images" not in word),
        "data.max_images=32",
    ]
    assert profile.main(words) == 0
    out, err = capsys.readouterr()
    assert {path.name for path in (tmp_path / "here").iterdir()} == FILES, "and no checkpoint of a training"
    assert os.listdir() == ["here"]

    found = json.loads((tmp_path / "here" / "profile.json").read_text())
    step = found["step"]
    assert step["steps"] == 3
    assert sum(step["parts_s"].values()) == pytest.approx(step["step_s"], rel=0.05)
    assert step["samples_per_s"] == pytest.approx(16 / step["step_s"])
    assert found["feed_ratio"] == pytest.approx(
        found["loader_alone"]["samples_per_s"] / found["model_alone"]["samples_per_s"]
    )
    assert found["config"] == cfg.flat(tiny(data__max_images=32))
    assert found["environment"] == environment.describe()
    assert found["command"].startswith("python -m tunediff.profile --config digits --steps 3")
    assert found["samples"] == {"name": "digits", "count": 32, "mib": 32 * 64 / 2**20}
    assert found["snapshot"] is None
    assert isinstance(found["advice"], list)

    with gzip.open("here/trace.json.gz") as file:
        assert json.load(file)["traceEvents"]
    for title in (
        "profile", "where the step goes", "the ten longest operations", "the loader and the model", "memory",
        "what to try next",
    ):  # fmt: skip
        assert f"\n{title}:\n" in f"\n{out}"
    assert "× what the model takes" in out
    assert "report: here/profile.md\n" in out
    assert out.splitlines()[-1] == "trace: here/trace.json.gz (open it at ui.perfetto.dev)"
    assert re.search(r"^\[ *(\d+m)?\d+s\] trace of 2 steps$", err, re.M)


def test_profile_of_an_export(tmp_path, capsys, quick):
    """What `export` writes: provenance in comments, then the whole configuration."""
    trial = record.TrialRecord("t0003", 3, cfg.flat(tiny()), {}, "f")
    found = analysis.Results(tmp_path / "night", search_space.parse(SPACE, "night.yaml"), [trial])
    (tmp_path / "best.yaml").write_text(cfg.dump(tiny(), provenance(found, trial, tmp_path / "best.yaml")))
    assert profile.main(["--config", "best.yaml", "loader.resident=true"]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "ray_results" / "profile-best" / "profile.json").read_text())
    assert found["name"] == "best"
    assert found["config"] == cfg.flat(tiny(loader__resident=True))
    assert (found["loader_alone"], found["feed_ratio"]) == (None, None)
    assert "the loader plays no part" in out


def test_a_name_that_is_taken_gets_a_number(tmp_path, capsys, quick):
    for name in ("profile-digits", "profile-digits-2"):
        assert profile.main(["--config", "digits"]) == 0
        assert f"report: ray_results/{name}/profile.md" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert profile.main(["--config", "digits", "--out", "empty"]) == 0


def test_json(tmp_path, capsys, quick):
    assert profile.main(["--config", "digits", "--json", "--out", "here"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) == json.loads((tmp_path / "here" / "profile.json").read_text())
    assert json.loads(out)["feed_ratio"] == 3.1


def test_advice_is_tried_when_asked_for(capsys, quick, monkeypatch):
    tried = []

    def attempt(bench, config, change, steps):
        tried.append(change)
        return {"gain": 1.25, "within_noise": False, "samples_per_s": 125.0, "peak_memory_mib": 100.0}

    monkeypatch.setattr(Bench, "attempt", attempt)
    assert profile.main(["--config", "digits", "--try", "optimizer.implementation=foreach"]) == 0
    assert {"optimizer.implementation": "fused"} in tried
    assert "; tried: 1.25×" in capsys.readouterr().out


def test_one_worker_of_several_is_measured(tmp_path, capsys, quick):
    assert profile.main(["--config", "digits", "--out", "here", "parallel.workers=4"]) == 0
    found = json.loads((tmp_path / "here" / "profile.json").read_text())
    assert (found["config"]["parallel.workers"], found["config"]["loader.batch_size"]) == (1, 32)
    assert "one of 4 training workers" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such file, and no baseline of that name"),
        (["--config", "digits", "loader.wrkers=2"], "command line: loader.wrkers: no such knob; did you mean"),
        (["--config", "digits", "ema.half_life=7"], "ema.half_life: 7 is not allowed"),
        (["--config", "digits", "--steps", "2"], "--steps: 2 is not allowed; allowed: a whole number of at least 3"),
        (["--config", "digits", "data.name=images", "data.split=all", "data.path=gone"], "data.path"),
        (["--config", "wrong.yaml"], "wrong.yaml: budget"),
        (["--config", "digits", "--out", "full"], "--out: full exists and is not empty; allowed: a new or an empty"),
        (["--config", "digits", "--out", "file"], "--out: file exists and is not empty"),
        (["--config", "digits", "--out", "file/in"], "--out: file/in cannot be written"),
    ],
)
def test_refusals(tmp_path, capsys, words, message):
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({"workload": "diffusion", "budget": {"trials": 3}}))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    assert profile.main(words) == 2
    assert message in capsys.readouterr().err
    assert sorted(os.listdir()) == ["file", "full", "wrong.yaml"], "a refused profile leaves nothing behind"
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_profile_is_copied_to_the_address_of_its_storage(tmp_path, capsys, quick):
    assert profile.main(["--config", "digits", "--storage", f"file://{tmp_path}/bucket"]) == 0
    assert (tmp_path / "bucket/profile-digits/profile.json").exists()
    (tmp_path / "file").write_text("")
    assert profile.main(["--config", "digits", "--storage", f"file://{tmp_path}/file/prefix"]) == 2
    assert f"--storage: file://{tmp_path}/file/prefix cannot be written: " in capsys.readouterr().err


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


def test_torchrun_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert profile.main(["--config", "digits", "--steps", "9"]) == 2
    said = "profile runs in one process; start it as python -m tunediff.profile --config digits --steps 9\n"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            1,
            "error: out of memory with a batch of 128: CUDA out of memory",
        ),
        (NotFiniteError("the loss is not finite"), 1, "error: the loss is not finite"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (cfg.ConfigError("loader.workers: no shared memory"), 2, "error: loader.workers: no shared memory"),
    ],
)
def test_failures(tmp_path, capsys, quick, monkeypatch, error, code, message):
    def fail(bench, config, path, step_s):
        (path.parent / ".training-x").mkdir()
        raise error

    monkeypatch.setattr(trace, "trace", fail)
    assert profile.main(["--config", "digits", "--out", "here"]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "here").exists(), "nothing was found"


def test_a_fault_of_ours_is_not_hidden(quick, monkeypatch):
    def fail(bench, config, path, step_s):
        raise ZeroDivisionError

    monkeypatch.setattr(trace, "trace", fail)
    with pytest.raises(ZeroDivisionError):
        profile.main(["--config", "digits", "--out", "here"])
