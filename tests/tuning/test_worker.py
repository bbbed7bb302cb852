"""What a worker does with a job, without a cluster."""

import csv
import dataclasses
import gc
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import types
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from safetensors import safe_open

from tests.helpers import shipped_toy
from tests.toy import train as toy_train
from tunediff import config as cfg
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget
from tunediff.core.journal import Journal
from tunediff.core.point import Point
from tunediff.core.progress import DOING, Progress
from tunediff.core.trial_record import End, NotFiniteError
from tunediff.distributed import alone
from tunediff.evaluation.distance import NonFiniteError
from tunediff.profiling import trace
from tunediff.training import process_settings, run_trial, state, weights
from tunediff.tuning import group, worker
from tunediff.tuning.messages import Assignment, Lost
from tunediff.tuning.resources import Placement
from tunediff.tuning.trial_spec import TrialSpec, WorkerGroupSpec

ROOT = Path(__file__).resolve().parents[2]
CONFIG = cfg.override(
    cfg.baseline("digits"),
    {
        "data.max_images": 64, "loader.batch_size": 16, "model.multipliers": [1], "model.attention": [],
        "model.channels": 8, "evaluation.points": 2,
    },
)  # fmt: skip


class Slot:
    """Takes what the worker says, as the actor would."""

    def __init__(self, folder):
        self.folder, self.heard, self.answer, self.workers_end = folder, [], "go", False
        for name in ("post", "decision"):
            setattr(self, name, types.SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _post(self, serial, event, workers_end=False):
        self.heard.append((type(event).__name__, (self.folder / state.CHECKPOINT).exists()))
        self.last, self.workers_end = event, workers_end

    def _decision(self, serial, index):
        return self.answer


def job_of(folder, config=CONFIG, samples=64, **changes):
    """A job whose trial has begun."""
    Journal(folder).start(config, {}, 1.0)
    job = TrialSpec(
        name=folder.name, folder=folder, drawn={}, pickled=pickle.dumps(config), budget=Budget(samples=samples),
        deadline_s=60.0, metric="frechet", mode="min", evaluates=False, group=WorkerGroupSpec(1, True), attempt="a",
    )  # fmt: skip
    return dataclasses.replace(job, **changes)


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(worker.ray, "get", lambda answer: answer)
    return job_of(tmp_path)


def kinds(folder):
    return [event["event"] for event in record.events(folder)]


def test_the_checkpoint_stays_until_the_end_is_written(tmp_path, job, monkeypatch):
    """A worker killed anywhere before has something to continue from."""
    slot, when = Slot(tmp_path), []
    write = Journal.write

    def watched(journal, event, **values):
        when.append((event, (tmp_path / state.CHECKPOINT).exists()))
        write(journal, event, **values)

    monkeypatch.setattr(Journal, "write", watched)
    worker.work(job, "s1", slot, alone())
    assert when == [("worker", False), ("about", False), ("point", True), ("point", True), ("end", True)]
    assert slot.heard == [("Point", True), ("Point", True), ("End", False)]
    assert (tmp_path / weights.NAME).exists()


def test_weights_say_what_was_measured_and_how_they_came_to_be(tmp_path, job):
    Journal(tmp_path).start(job.config, {}, None)
    worker.work(job, "s1", Slot(tmp_path), alone())
    with safe_open(tmp_path / weights.NAME, "pt") as file:
        about = file.metadata()
    assert json.loads(about["config"]) == cfg.flat(job.config)
    assert json.loads(about["result"]) == record.read_trial(tmp_path).points[-1].flat


def test_a_worker_killed_before_the_end_measures_nothing_again(tmp_path, job, monkeypatch):
    class KilledError(BaseException):
        pass

    def die(*args):
        raise KilledError

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(worker, "_end", die)
        worker.work(job, "s1", Slot(tmp_path), alone())
    before = ["start", "worker", "about", "point", "point"]
    assert kinds(tmp_path) == before
    worker.work(job, "s2", Slot(tmp_path), alone())
    assert kinds(tmp_path) == [*before, "worker", "about", "end"]
    assert record.read_trial(tmp_path).status == "ok"


def test_a_final_evaluation_tells_how_far_it_is(tmp_path, job, monkeypatch):
    """It may take longer than all that was before."""
    told = []

    def evaluate(*_):
        with Progress("sampling", 4, "steps") as progress:
            progress.step()
            told.append(json.loads((tmp_path / DOING).read_text()))

    monkeypatch.setattr(worker, "evaluate_finally", evaluate)
    worker.work(dataclasses.replace(job, final={"evaluation.images": 64}), "s1", Slot(tmp_path), alone())
    assert [(one["part"], one["work"][:9]) for one in told] == [("evaluation", "sampling:")]
    assert not (tmp_path / DOING).exists()


def test_worker_that_prepares_a_trial_says_so(tmp_path, job, monkeypatch):
    """Its file may be of the time when its group was waited for."""
    (tmp_path / DOING).write_text(json.dumps({"part": "waiting", "since": 0.0, "work": "a node"}))
    parts = []

    def prepare(*_, **__):
        parts.append(json.loads((tmp_path / DOING).read_text())["part"])
        raise ValueError

    monkeypatch.setattr(worker, "run", prepare)
    with pytest.raises(ValueError):  # noqa: PT011
        worker.work(job, "s1", Slot(tmp_path), alone())
    assert parts == ["setup"]


def test_a_trial_that_an_orphan_ended_meanwhile_is_not_run_again(tmp_path, job):
    """A slot was killed, its workers lived on for a moment and wrote the end."""
    worker.work(job, "s1", Slot(tmp_path), alone())
    before, slot = kinds(tmp_path), Slot(tmp_path)
    worker.work(job, "s2", slot, alone())
    assert kinds(tmp_path) == before
    assert [kind for kind, _ in slot.heard] == ["End"]
    assert slot.last.status == "ok"


def test_a_probe_keeps_nothing(tmp_path, job):
    worker.work(dataclasses.replace(job, keeps=False), "s1", Slot(tmp_path), alone())
    assert sorted(path.name for path in tmp_path.iterdir()) == [record.JOURNAL]
    assert len(record.read_trial(tmp_path).points) == 2


def test_the_longest_operations_are_written_where_asked_for(tmp_path, job):
    worker.work(dataclasses.replace(job, profile_steps=3), "s1", Slot(tmp_path), alone())
    with open(tmp_path / "operations.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["operation", "calls", "self_s", "total_s", "share"]
    own = [float(row["self_s"]) for row in rows]
    assert own == sorted(own, reverse=True)
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1.0, abs=1e-3)
    backward = next(row for row in rows if row["operation"] == "aten::convolution_backward")
    assert int(backward["calls"]) % 3 == 0  # as often in each of the three steps
    assert kinds(tmp_path) == ["start", "worker", "about", "point", "point", "end"]  # profiling measures no point
    assert record.read_trial(tmp_path).points[-1]["samples"] == 64


def test_a_finished_trial_stays_ok_where_its_profile_fails(tmp_path, job, monkeypatch):
    """The group ends all the same: what failed may have harmed its processes."""

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trace, "write_operations", fail)
    slot = Slot(tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        worker.work(dataclasses.replace(job, profile_steps=3), "s1", slot, alone())
    assert (slot.last.status, slot.workers_end) == ("ok", True)
    assert kinds(tmp_path)[-2:] == ["point", "end"]
    ended = record.read_trial(tmp_path)
    assert ended.status == "ok"
    assert ended.remarks.startswith("its operations were not profiled: ")


def test_a_finished_trial_is_judged_once_more_at_full_protocol(tmp_path, job):
    config = cfg.override(CONFIG, {"evaluation.images": 16, "evaluation.steps": 2, "evaluation.validation_images": 0})
    final = {"evaluation.images": 32, "evaluation.steps": 3}
    wanted = dataclasses.replace(job, pickled=pickle.dumps(config), evaluates=True, final=final)
    worker.work(wanted, "s1", Slot(tmp_path), alone())
    assert kinds(tmp_path) == ["start", "worker", "about", "point", "point", "final", "end"]
    last = record.read_trial(tmp_path).points[-1]
    assert last["final_frechet"] != last["frechet"]
    assert last["final_label"] == last["label"] == "FD (classifier)"


def test_a_finished_trial_is_judged_so_only_once(tmp_path, job):
    """An attempt that was killed after it had come so far: identity is the model's steps."""
    Journal(tmp_path).write("final", steps=7, frechet=1.0)
    outcome = types.SimpleNamespace(steps=7)
    worker.evaluate_finally(CONFIG, {"evaluation.images": 32}, outcome, alone(), tmp_path)
    assert kinds(tmp_path) == ["start", "final"]


def test_a_stopped_trial_keeps_the_reason_that_the_search_has_written(tmp_path, job):
    slot = Slot(tmp_path)

    def stopped(serial, index):
        Journal(tmp_path).end(End("pruned", "stopped by asha after 1.0 s"))
        return "stop"

    slot.decision = types.SimpleNamespace(remote=stopped)
    worker.work(job, "s1", slot, alone())
    trial = record.read_trial(tmp_path)
    assert (trial.status, trial.reason, trial.end.steps) == ("pruned", "stopped by asha after 1.0 s", 2)
    assert slot.last == trial.end


def test_a_trial_that_its_scheduler_stops_is_pruned(tmp_path, job):
    slot = Slot(tmp_path)
    slot.answer = "stop"
    worker.work(job, "s1", slot, alone())
    known = record.read_trial(tmp_path)
    assert (known.status, len(known.points), known.end.steps) == ("pruned", 1, 2)
    assert slot.heard == [("Point", True), ("End", False)], "nobody goes on from its checkpoint"
    assert not (tmp_path / weights.NAME).exists()


def test_a_worker_whose_slot_was_restarted_leaves_the_trial_open(tmp_path, job):
    slot = Slot(tmp_path)
    slot.answer = "unknown"
    with pytest.raises(worker.SlotLostError, match="knows nothing of"):
        worker.work(job, "s1", slot, alone())
    assert not record.read_trial(tmp_path).finished


def test_a_trial_on_a_draining_node_leaves_with_a_checkpoint_and_goes_on(tmp_path, job, monkeypatch):
    """The notice comes after the first point; the second attempt, elsewhere, trains only what is left."""
    leaving, heard, slot = [], threading.Event(), Slot(tmp_path)
    monkeypatch.setattr(worker.cluster, "NOTICE_S", 0.001)
    monkeypatch.setattr(worker.cluster, "draining", lambda ids: heard.set() or ids if ids == leaving else [])

    def decision(serial, index):
        leaving[:] = ["n1"]
        assert heard.wait(30)
        return "go"

    slot.decision = types.SimpleNamespace(remote=decision)
    at = lambda node: dataclasses.replace(job, group=WorkerGroupSpec(1, True, Placement([node])))  # noqa: E731
    worker.work(at("n1"), "s1", slot, alone())
    assert slot.last == Lost("node n1 is draining")
    known, saved = record.read_trial(tmp_path), state.load(tmp_path)
    assert (known.finished, len(known.points), saved["pace"]["samples"]) == (False, 1, 48)
    worker.work(at("n2"), "s2", Slot(tmp_path), alone())
    known = record.read_trial(tmp_path)
    assert (known.status, [one.samples for one in known.points], known.end.steps) == ("ok", [32, 64], 4)


@pytest.mark.parametrize("error", [NotFiniteError("the loss"), NonFiniteError("non-finite features")])
def test_what_is_not_finite_is_the_trials_end_and_harms_no_process(tmp_path, job, monkeypatch, error):
    def fail(trial):
        raise error

    monkeypatch.setattr(worker, "run", fail)
    slot = Slot(tmp_path)
    worker.work(job, "s1", slot, alone())
    assert (slot.last.status, slot.last.reason) == ("nan", str(error))
    assert slot.last.peak["peak_memory_mib"] > 0
    assert record.read_trial(tmp_path).end == slot.last


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError("no"), "oom"), (RuntimeError("CUDA out of memory"), "oom"), (ZeroDivisionError("why"), "error"),
        (RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed."), None), (OSError(28, "full"), None),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_users_code")
def test_what_breaks_ends_trial_and_group_unless_it_was_no_fault_of_it(tmp_path, job, monkeypatch, error, status):
    checkpoint, torn = tmp_path / state.CHECKPOINT, tmp_path / f".{state.CHECKPOINT}.x7y"

    def fail(trial):
        checkpoint.touch()
        torn.touch()  # by a worker that was killed while it wrote
        if isinstance(error, OSError):
            error.filename = str(checkpoint)
        raise error

    shares = {"total_mib": 100.0, "demand_mib": 20.0, "others_mib": 10.0}
    monkeypatch.setattr(worker, "run", fail)
    monkeypatch.setattr(worker.memory, "shares_mib", lambda *_: shares)
    slot = Slot(tmp_path)
    with pytest.raises(type(error)):
        worker.work(job, "s1", slot, alone())
    assert record.read_trial(tmp_path).status == status
    assert status is None or slot.last.memory == (shares if status == "oom" else {})
    assert [checkpoint.exists(), torn.exists()] == [status is None] * 2, (
        "only what may be run again has one to go on from"
    )
    assert (tmp_path / "traceback-rank0.txt").exists() == (status is not None)
    if status is not None:
        assert slot.last.reason == f"{type(error).__name__}: {error}"


def test_lack_of_memory_is_judged_by_how_many_trials_share_the_gpu(tmp_path, job, monkeypatch):
    def fail(trial):
        raise torch.OutOfMemoryError("CUDA out of memory")

    asked = []
    monkeypatch.setattr(worker, "run", fail)
    monkeypatch.setattr(worker.memory, "shares_mib", lambda error, *how: asked.append(how[2:]) or {})
    job = dataclasses.replace(job, group=WorkerGroupSpec(1, True, Placement(gpu=True, per_gpu=4)))
    with pytest.raises(torch.OutOfMemoryError):
        worker.work(job, "s1", Slot(tmp_path), alone())
    assert asked == [(4,)]


def test_traceback_with_a_name_that_is_not_utf8_does_not_lose_the_end(tmp_path, job, monkeypatch):
    """Python has such a byte of a file's name as a surrogate, which no encoding of text takes."""

    def fail(trial):
        raise ValueError(os.fsdecode(b"caf\xe9.png") + " is no image")

    monkeypatch.setattr(worker, "run", fail)
    with pytest.raises(ValueError, match="is no image"):
        worker.work(job, "s1", Slot(tmp_path), alone())
    assert record.read_trial(tmp_path).status == "error"
    assert "caf\\udce9.png" in (tmp_path / "traceback-rank0.txt").read_text(encoding="utf-8")


def test_a_full_disk_that_hides_behind_another_error_is_no_end(tmp_path, job, monkeypatch):
    def fail(trial):
        raise ValueError("could not be written")

    monkeypatch.setattr(worker, "run", fail)
    monkeypatch.setattr(worker.environment, "unwritable", lambda folder: "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        worker.work(job, "s1", Slot(tmp_path), alone())
    assert not record.read_trial(tmp_path).finished


def test_a_process_is_as_it_was_after_a_trial(tmp_path, job):
    config = cfg.override(CONFIG, {"precision.matmul": "medium", "seed": 3})
    worker.work(dataclasses.replace(job, pickled=pickle.dumps(config)), "s1", Slot(tmp_path), alone())
    drawn = torch.rand(3).tolist(), numpy.random.rand(), random.random()
    assert torch.get_float32_matmul_precision() == "highest"
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    assert drawn == (torch.rand(3).tolist(), numpy.random.rand(), random.random())


SETTINGS = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "gradients": lambda: torch.set_grad_enabled(False),
    "cuDNN": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "attention kernels": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "reduced precision of products": lambda: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "garbage collector": gc.disable,
    "working directory": lambda: os.chdir("/"),
    "environment": lambda: os.environ.update(SET_BY_A_TRIAL="1", HOME="/elsewhere"),
}


def toy_job(folder):
    with shipped_toy():
        return job_of(folder, cfg.baseline("toy"), samples=32)


@pytest.mark.parametrize("name", SETTINGS)
def test_reset_puts_back_what_a_training_sets(tmp_path, job, name, capfd):
    """Its next trial is not measured with another's settings; the trial itself is as good as any."""
    toy, before, train = toy_job(tmp_path / "toy"), process_settings.read(), toy_train.train

    def changing(trial):
        train(trial)
        SETTINGS[name]()

    with shipped_toy(), mock.patch.object(toy_train, "train", changing):
        assert worker.work(toy, "s1", Slot(toy.folder), alone())
    assert process_settings.read() == before
    assert record.read_trial(toy.folder).status == "ok"
    more = " (HOME, SET_BY_A_TRIAL)" if name == "environment" else ""
    assert f"toy: train(trial) has changed the process: {name}{more};" in capfd.readouterr().err


@pytest.mark.parametrize("stays", [True, False])
def test_workers_leave_when_a_trial_has_changed_their_process(tmp_path, job, monkeypatch, stays):
    orders, renewed = [Assignment("s1", job), Assignment()], []
    slot = types.SimpleNamespace(
        take=types.SimpleNamespace(remote=lambda generation, done: orders.pop(0)),
        renew=types.SimpleNamespace(remote=renewed.append),
    )
    context = types.SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr(worker.ray.train, "get_context", lambda: context)
    monkeypatch.setattr(worker.ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(worker, "get", lambda name: slot)
    monkeypatch.setattr(worker, "work", lambda *_: not stays)
    worker.serve({"slot": "s", "generation": "g1", "threads": torch.get_num_threads(), "here": os.getcwd()})
    assert renewed == ([] if stays else ["g1"])
    assert len(orders) == (0 if stays else 1), "they take no other job"


def test_what_a_file_sets_when_it_is_imported_stays(tmp_path, job, monkeypatch):
    """It is imported once in a process, for all trials of its workload: put back, it would be missing in the second."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("SET_BY_A_FILE", "0")
    text = (ROOT / "tests" / "users" / "plain.py").read_text()
    copies = tmp_path / "t0000" / "workload"
    copies.mkdir(parents=True)
    for name, more in (("plain_one", ""), ("plain_two", "import os\nos.environ['SET_BY_A_FILE'] = '1'\n")):
        (copies / f"{name}.py").write_text(f"{text}{more}")
    config = cfg.baseline(str(copies / "plain_one.py"))
    one = job_of(tmp_path / "t0000", config, samples=32)
    one = dataclasses.replace(one, pickled=one.pickled.replace(b"plain_one.py", b"plain_two.py"))
    assert not worker.work(one, "s1", Slot(one.folder), alone())
    assert (record.read_trial(one.folder).status, os.environ["SET_BY_A_FILE"]) == ("ok", "1")


def test_a_point_travels_whole(tmp_path, job):
    """Jobs and events go from process to process."""
    worker.work(job, "s1", Slot(tmp_path), alone())
    (point, _) = record.read_trial(tmp_path).points
    assert pickle.loads(pickle.dumps(point)) == point
    assert isinstance(point, Point)
    assert pickle.loads(pickle.dumps(job)) == job


CURVE = """
import pickle, sys, types
import torch
torch.set_num_threads(1)
from tests.tuning import test_worker
from tunediff.tuning import worker
worker.ray = types.SimpleNamespace(get=lambda answer: answer)
for job in pickle.load(sys.stdin.buffer):
    changed = worker.work(job, "serial", test_worker.Slot(job.folder), test_worker.alone())
    assert not changed, "our own trainings leave their process to the next"
"""


def test_a_warm_process_gives_the_curve_of_a_fresh_one(tmp_path):
    """Other trials before it, of another precision, number of threads, order of channels and seed, leave no trace."""
    judged = {"evaluation.images": 64, "evaluation.steps": 3, "evaluation.validation_images": 16}
    mine = cfg.override(CONFIG, judged | {"evaluation.extractor": "random"})
    changes = {
        "precision.amp": "bf16", "precision.matmul": "medium", "memory.channels_last": True, "seed": 7,
        "model.dropout": 0.3, "timesteps.name": "loss_second_moment", "loader.batch_size": 32,
    }  # fmt: skip
    jobs = [
        job_of(tmp_path / name, config, samples=128, evaluates=True)
        for name, config in (("fresh", mine), ("other", cfg.override(mine, changes)), ("warm", mine))
    ]
    processes = [subprocess.Popen([sys.executable, "-c", CURVE], stdin=subprocess.PIPE, cwd=ROOT) for _ in range(2)]
    for process, its_jobs in zip(processes, (jobs[:1], jobs[1:]), strict=True):
        with process.stdin:
            process.stdin.write(pickle.dumps(its_jobs))
    assert [process.wait() for process in processes] == [0, 0]
    fresh, other, warm = (record.read_trial(tmp_path / name) for name in ("fresh", "other", "warm"))
    kept = ("frechet", "loss", "validation_loss", "samples", "steps")
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

    started = []
    trainer = types.SimpleNamespace(fit=lambda: None)
    monkeypatch.setattr(ray.train.torch, "TorchTrainer", lambda loop, **given: started.append(given) or trainer)
    place = Placement(("a1", "b2") if gpu else (), 0.9, gpu, 1)
    group.run_group("slot", "g", WorkerGroupSpec(2, keep, place), str(tmp_path), os.getcwd())
    (given,) = started
    scaling = given["scaling_config"]
    assert (scaling.num_workers, scaling.resources_per_worker) == (2, {"CPU": 0.9, **({"GPU": 1.0} if gpu else {})})
    assert scaling.label_selector == ({"ray.io/node-id": "in(a1,b2)"} if gpu else None)
    assert scaling.placement_strategy == ("PACK" if gpu else "STRICT_PACK")
    assert given["train_loop_config"] == {"slot": "slot", "generation": "g", "threads": 1, "here": os.getcwd()}
    environment = given["run_config"].worker_runtime_env["env_vars"]
    assert environment == (memory.KEEPING if keep and not gpu else {})
    group.run_group(
        "slot", "g", WorkerGroupSpec(4, keep, Placement(("a1",), 7.92, True, 8, 4)), str(tmp_path), os.getcwd()
    )
    scaling = started[-1]["scaling_config"]
    assert (scaling.num_workers, scaling.resources_per_worker) == (1, {"CPU": 7.92, "GPU": 4.0}), "one for four GPUs"


def test_a_worker_whose_imports_fail_fails_in_its_training(monkeypatch, tmp_path):
    """Where unpickling the function fails, Ray keeps the place of the workers for ever."""
    import ray.train.torch
    from ray import cloudpickle

    sent = []
    trainer = types.SimpleNamespace(fit=lambda: None)
    monkeypatch.setattr(
        ray.train.torch, "TorchTrainer", lambda loop, **_: sent.append(cloudpickle.dumps(loop)) or trainer
    )
    group.run_group("slot", "g", WorkerGroupSpec(1, False, Placement((), 0.9, False, 1)), str(tmp_path), os.getcwd())
    monkeypatch.setitem(sys.modules, "tunediff.tuning.worker", None)
    serve = cloudpickle.loads(sent[0])
    with pytest.raises(ImportError):
        serve({})


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:9", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version "
         "2.29.3\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
         "prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer node-2<41234>", True),
        ("NCCL communicator was aborted on rank 1.", True),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 1800 s", True),
        ("ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ", True),
        ("ncclUnhandledCudaError: Call to CUDA library failed.\nLast error:\nCuda failure 2 'out of memory'", False),
        ("mat1 and mat2 shapes cannot be multiplied (4x5 and 4x5)", False),
    ],
)  # fmt: skip
def test_what_collectives_say_of_a_lost_process(said, lost):
    """The words are those of libnccl.so.2 (2.29) and libtorch_cuda.so (2.15)."""
    assert run_trial.lost_a_process(RuntimeError(said), 2) == lost
    assert not run_trial.lost_a_process(RuntimeError(said), 1), "one rank has nobody to lose"
