"""What a worker does with a job, without a cluster."""

import csv
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tunediff import config as cfg
from tunediff import record
from tunediff.training import checkpoint
from tunediff.distributed import alone
from tunediff.tuning import worker

ROOT = Path(__file__).resolve().parents[2]
CONFIG = cfg.override(
    cfg.workload("digits"),
    {
        "data.max_images": 64, "loader.batch_size": 16, "model.multipliers": [1], "model.attention": [],
        "model.channels": 8, "evaluation.points": 2,
    },
)  # fmt: skip


class Slot:
    """Takes what the worker says, as the actor would."""

    def __init__(self, folder):
        self.folder, self.heard = folder, []
        for name in ("post", "decision"):
            setattr(self, name, types.SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _post(self, serial, message):
        self.heard.append((message["kind"], (self.folder / checkpoint.NAME).exists()))

    def _decision(self, serial, index):
        return "go"


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(worker.ray, "get", lambda answer: answer)
    record.Journal(tmp_path).write(
        "start", name="t0000", number=0, config=cfg.flat(CONFIG), drawn={}, budget_s=1.0,
        fingerprint=cfg.fingerprint(CONFIG),
    )  # fmt: skip
    return {
        "name": "t0000", "folder": str(tmp_path), "config": cfg.to_dict(CONFIG), "evaluate": False,
        "budget": {"images": 64},
    }  # fmt: skip


def kinds(folder):
    return [event["event"] for event in record.events(folder)]


def test_the_checkpoint_stays_until_the_end_is_written(tmp_path, job, monkeypatch):
    """A worker killed anywhere before has something to continue from."""
    slot, when = Slot(tmp_path), []
    write = record.Journal.write

    def watched(journal, event, **values):
        when.append((event, (tmp_path / checkpoint.NAME).exists()))
        write(journal, event, **values)

    monkeypatch.setattr(record.Journal, "write", watched)
    worker.work(job, "s1", slot, alone())
    assert when == [("worker", False), ("point", True), ("point", True), ("end", True)]
    assert slot.heard == [("point", True), ("point", True), ("end", False)]
    assert (tmp_path / checkpoint.WEIGHTS).exists()


def test_a_worker_killed_before_the_end_measures_nothing_again(tmp_path, job, monkeypatch):
    class KilledError(BaseException):
        pass

    def die(*args):
        raise KilledError

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(worker, "_end", die)
        worker.work(job, "s1", Slot(tmp_path), alone())
    assert kinds(tmp_path) == ["start", "worker", "point", "point"]
    worker.work(job, "s2", Slot(tmp_path), alone())
    assert kinds(tmp_path) == ["start", "worker", "point", "point", "worker", "end"]
    assert record.read_trial(tmp_path).status == "ok"


def test_a_trial_that_an_orphan_ended_meanwhile_is_not_run_again(tmp_path, job):
    """A slot was killed, its workers lived on for a moment and wrote the end."""
    worker.work(job, "s1", Slot(tmp_path), alone())
    before, slot = kinds(tmp_path), Slot(tmp_path)
    worker.work(job, "s2", slot, alone())
    assert kinds(tmp_path) == before
    assert [kind for kind, _ in slot.heard] == ["end"]


def test_a_probe_keeps_nothing(tmp_path, job):
    worker.work(job | {"keep": False}, "s1", Slot(tmp_path), alone())
    assert sorted(path.name for path in tmp_path.iterdir()) == [record.JOURNAL]
    assert len(record.read_trial(tmp_path).points) == 2


def test_the_longest_operations_are_written_where_asked_for(tmp_path, job):
    worker.work(job | {"profile_steps": 3}, "s1", Slot(tmp_path), alone())
    with open(tmp_path / "operations.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["operation", "calls", "self_s", "total_s", "share"]
    own = [float(row["self_s"]) for row in rows]
    assert own == sorted(own, reverse=True)
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1.0, abs=1e-3)
    backward = next(row for row in rows if row["operation"] == "aten::convolution_backward")
    assert int(backward["calls"]) % 3 == 0  # as often in each of the three steps
    assert kinds(tmp_path) == ["start", "worker", "point", "point", "end"]  # profiling measures no point
    assert record.read_trial(tmp_path).points[-1]["images"] == 64


def test_compiled_trials_find_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    with worker.cold_compile_cache(CONFIG):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"  # nothing is compiled
    with worker.cold_compile_cache(cfg.override(CONFIG, {"compile.mode": "default"})):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert list(folder.iterdir()) == []
        assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert not folder.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_finished_trial_is_judged_once_more_at_full_protocol(tmp_path, job):
    config = cfg.override(CONFIG, {"evaluation.images": 16, "evaluation.steps": 2, "evaluation.validation_images": 0})
    wanted = job | {
        "config": cfg.to_dict(config), "evaluate": True, "final": {"evaluation.images": 32, "evaluation.steps": 3},
    }  # fmt: skip
    worker.work(wanted, "s1", Slot(tmp_path), alone())
    assert kinds(tmp_path) == ["start", "worker", "point", "point", "final", "end"]
    last = record.read_trial(tmp_path).points[-1]
    assert last["final_frechet"] != last["frechet"]
    assert last["final_label"] == last["label"] == "FD (classifier)"


CURVE = """
import json, sys, types
import torch
torch.set_num_threads(1)
from pathlib import Path
from tests.tuning import test_worker
from tunediff.tuning import worker
worker.ray = types.SimpleNamespace(get=lambda answer: answer)
for folder, job in json.load(sys.stdin):
    worker.work(job, "serial", test_worker.Slot(Path(folder)), test_worker.alone())
"""


def test_a_warm_process_gives_the_curve_of_a_fresh_one(tmp_path):
    """Other trials before it, of another precision, number of threads, order of channels and seed, leave no trace."""
    mine = cfg.override(CONFIG, {"evaluation.images": 64, "evaluation.steps": 3, "evaluation.validation_images": 16})
    changes = {
        "precision.amp": "bf16", "precision.matmul": "medium", "model.channels_last": True, "seed": 7,
        "model.dropout": 0.3, "timesteps.name": "loss_second_moment", "loader.batch_size": 32,
    }  # fmt: skip
    jobs = []
    for name, config in (("fresh", mine), ("other", cfg.override(mine, changes)), ("warm", mine)):
        folder = tmp_path / name
        record.Journal(folder).write(
            "start", name=name, number=0, config=cfg.flat(config), drawn={}, budget_s=1.0,
            fingerprint=cfg.fingerprint(config),
        )  # fmt: skip
        job = {"name": name, "folder": str(folder), "config": cfg.to_dict(config), "evaluate": True}
        jobs.append((str(folder), job | {"budget": {"images": 128}}))
    for together in (jobs[:1], jobs[1:]):
        subprocess.run([sys.executable, "-c", CURVE], input=json.dumps(together), text=True, check=True, cwd=ROOT)
    fresh, other, warm = (record.read_trial(tmp_path / name) for name in ("fresh", "other", "warm"))
    kept = ("frechet", "loss", "validation_loss", "images", "steps")
    curves = [[{key: point[key] for key in kept if key in point} for point in t.points] for t in (fresh, warm, other)]
    assert [t.status for t in (fresh, other, warm)] == ["ok"] * 3
    assert len(curves[0]) == 2
    assert "frechet" in curves[0][0]
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


@pytest.mark.parametrize(("keep", "gpu"), [(True, False), (False, False), (True, True)])
def test_a_group_is_started_with_what_its_kind_asks_for(monkeypatch, tmp_path, keep, gpu):
    """Ray Train trains in a thread, where keeping freed memory must be in the environment from the start."""
    import ray.train.torch

    from tunediff.training import memory
    from tunediff.tuning.slot import Kind

    started = []
    trainer = types.SimpleNamespace(fit=lambda: None)
    monkeypatch.setattr(ray.train.torch, "TorchTrainer", lambda loop, **given: started.append(given) or trainer)
    share = {"gpu": gpu, "threads": {"2": 1}, "per_worker": {"2": {"CPU": 0.9}}}
    worker.run_group("slot", "g", Kind(2, keep), str(tmp_path), share)
    (given,) = started
    assert given["scaling_config"].num_workers == 2
    environment = given["run_config"].worker_runtime_env["env_vars"]
    assert environment == (memory.KEEPING if keep and not gpu else {})
