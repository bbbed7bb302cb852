"""What a worker does with a job, without a cluster."""

import contextlib
import dataclasses
import os
import statistics
import sys
import types

import pytest
import ray
import ray.train.v2.api.data_parallel_trainer
import torch
from safetensors import safe_open

from tests.helpers import shipped_toy, toy
from tests.toy.train import network
from tunediff import config as cfg
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget
from tunediff.core.journal import Journal
from tunediff.core.point import Point
from tunediff.core.target import TIME_TO_TARGET, Target
from tunediff.core.trial_record import NotFiniteError
from tunediff.distributed import alone
from tunediff.evaluation.distance import NonFiniteError
from tunediff.profiling import trace
from tunediff.ray_backend.slot import run_group
from tunediff.report import sentences
from tunediff.training import outcome, state, weights
from tunediff.tuning import worker
from tunediff.tuning.resources import Placement
from tunediff.tuning.trial_spec import TrialSpec, WorkerGroupSpec

CONFIG = cfg.override(
    cfg.baseline("digits"),
    {
        "data.max_images": 64, "loader.batch_size": 16, "model.multipliers": [1], "model.attention": [],
        "model.channels": 8, "evaluation.points": 2,
    },
)  # fmt: skip


class Parent:
    """Takes what a run sends and answers, as the connection to its parent does."""

    def __init__(self, folder, answer="go"):
        self.folder, self.heard, self.answer = folder, [], answer

    def send(self, event):
        self.heard.append((type(event).__name__, (self.folder / state.CHECKPOINT).exists()))
        self.last = event

    def recv(self):
        return self.answer() if callable(self.answer) else self.answer


def job_of(folder, config=CONFIG, samples=64, **changes):
    """A job whose trial has begun."""
    Journal(folder).start(*cfg.identity(config), {}, 1.0)
    job = TrialSpec(
        name=folder.name, folder=folder, budget=Budget(samples=samples),
        workload=config.schema.workload, points=config.evaluation.points,
        deadline_s=60.0, metric="frechet", mode="min", evaluates=False, attempt="a",
        group=WorkerGroupSpec(1, Placement(threads=torch.get_num_threads())),
    )  # fmt: skip
    return dataclasses.replace(job, **changes)


@pytest.fixture
def job(tmp_path):
    return job_of(tmp_path)


@pytest.fixture
def trains(monkeypatch):
    """Puts a function in the place of the training of a job."""
    return lambda train: monkeypatch.setattr(worker, "run", train)


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def kinds(folder):
    return [event["event"] for event in record.events(folder)]


def test_the_checkpoint_stays_until_the_end_is_written(tmp_path, job, monkeypatch):
    """A worker killed anywhere before has something to continue from."""
    parent, when = Parent(tmp_path), []
    write = Journal.write

    def watched(journal, event, **values):
        when.append((event, (tmp_path / state.CHECKPOINT).exists()))
        write(journal, event, **values)

    monkeypatch.setattr(Journal, "write", watched)
    worker.work(job, parent, alone())
    assert when == [("worker", False), ("about", False), ("point", True), ("point", True), ("end", True)]
    assert parent.heard == [("Point", True), ("Point", True), ("End", False)]
    assert (tmp_path / weights.NAME).exists()


def test_a_trial_ends_where_its_target_is_met_and_one_that_never_meets_it_fails(tmp_path):
    """Killed at that point it only ends when it goes on; what is kept are the weights that met it."""
    config = toy(evaluation__points=6)
    dies = []

    class Dying(Parent):
        def send(self, event):
            if isinstance(event, Point) and TIME_TO_TARGET in event:
                dies.append(event.index)
                raise KeyboardInterrupt
            super().send(event)

    def ran(name, target, parent=Parent):
        job = job_of(tmp_path / name, config, samples=8 * 30, metric=TIME_TO_TARGET, evaluates=True, target=target)
        with shipped_toy():
            worker.work(job, parent(job.folder), alone())
        return record.read_trial(job.folder)

    missed = ran("missed", Target("error", "<=", 0.0))
    assert (missed.status, missed.reason) == (
        "missed",
        "no mean of evaluations 5 % of the time apart met error<=0",
    )
    curve = [point["error"] for point in missed.points]
    assert len(curve) == 6
    between = (statistics.fmean(curve[:2]) + statistics.fmean(curve[:3])) / 2  # the first three fall
    with pytest.raises(KeyboardInterrupt):
        ran("met", Target("error", "<=", between), Dying)
    met = ran("met", Target("error", "<=", between))
    assert (met.status, len(met.points), dies) == ("ok", 3, [3])
    two_s, three_s = (statistics.fmean(point.train_s for point in met.points[:count]) for count in (2, 3))
    assert met.value(TIME_TO_TARGET) == pytest.approx((two_s + three_s) / 2, rel=0.01), "half way between the means"
    with safe_open(tmp_path / "met" / weights.NAME, "pt") as file:
        kept = {name: file.get_tensor(name) for name in network(config.knobs).state_dict()}
    assert weights.digest(kept) == met.points[-1]["weights_digest"]
    assert met.points[-1].steps == 15


def test_a_worker_killed_before_the_end_measures_nothing_again(tmp_path, job, monkeypatch):
    class KilledError(BaseException):
        pass

    def die(*args):
        raise KilledError

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(worker, "_end", die)
        worker.work(job, Parent(tmp_path), alone())
    before = ["start", "worker", "about", "point", "point"]
    assert kinds(tmp_path) == before
    worker.work(job, Parent(tmp_path), alone())
    assert kinds(tmp_path) == [*before, "worker", "about", "end"]
    assert record.read_trial(tmp_path).status == "ok"


def test_a_trial_that_an_orphan_ended_meanwhile_is_not_run_again(tmp_path, job):
    """A slot was killed, its workers lived on for a moment and wrote the end."""
    worker.work(job, Parent(tmp_path), alone())
    before, parent = kinds(tmp_path), Parent(tmp_path)
    worker.work(job, parent, alone())
    assert kinds(tmp_path) == before
    assert [kind for kind, _ in parent.heard] == ["End"]
    assert parent.last.status == "ok"


def test_a_probe_keeps_nothing(tmp_path, job):
    worker.work(dataclasses.replace(job, keeps=False), Parent(tmp_path), alone())
    assert sorted(path.name for path in tmp_path.iterdir()) == [record.JOURNAL]
    assert len(record.read_trial(tmp_path).points) == 2


def test_a_finished_trial_stays_ok_where_its_profile_fails(tmp_path, job, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trace, "write_operations", fail)
    parent = Parent(tmp_path)
    worker.work(dataclasses.replace(job, profile_steps=3), parent, alone())
    assert parent.last.status == "ok"
    assert kinds(tmp_path)[-2:] == ["point", "end"]
    ended = record.read_trial(tmp_path)
    assert ended.status == "ok"
    assert sentences.of_trial(ended).startswith("its operations were not profiled: ")


@pytest.mark.nightly  # trains a classifier
def test_a_finished_trial_is_judged_once_more_at_full_protocol(tmp_path):
    config = cfg.override(CONFIG, {"evaluation.images": 16, "evaluation.steps": 2, "evaluation.validation_images": 0})
    final = {"evaluation.images": 32, "evaluation.steps": 3}
    worker.work(job_of(tmp_path, config, evaluates=True, final=final), Parent(tmp_path), alone())
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


def test_a_trial_that_its_scheduler_stops_is_pruned(tmp_path, job):
    parent = Parent(tmp_path, "stop")
    worker.work(job, parent, alone())
    known = record.read_trial(tmp_path)
    assert (known.status, len(known.points), known.end.steps) == ("pruned", 1, 2)
    assert parent.heard == [("Point", True), ("End", False)], "nobody goes on from its checkpoint"
    assert not (tmp_path / weights.NAME).exists()


def test_a_run_whose_parent_is_gone_leaves_the_trial_open(tmp_path, job):
    def gone():
        raise EOFError

    with pytest.raises(worker.ParentLostError):
        worker.work(job, Parent(tmp_path, gone), alone())
    assert not record.read_trial(tmp_path).finished


@pytest.mark.parametrize("error", [NotFiniteError("the loss"), NonFiniteError("non-finite features")])
def test_what_is_not_finite_is_the_trials_end_and_harms_no_process(tmp_path, job, trains, error):
    trains(raising(error))
    parent = Parent(tmp_path)
    worker.work(job, parent, alone())
    assert (parent.last.status, parent.last.reason) == ("nan", str(error))
    assert parent.last.peak["peak_memory_mib"] > 0
    assert record.read_trial(tmp_path).end == parent.last


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError("no"), "oom"), (RuntimeError("CUDA out of memory"), "oom"), (ZeroDivisionError("why"), "error"),
        (RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed."), None), (OSError(28, "full"), None),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_users_code")
def test_what_breaks_ends_the_trial_unless_it_was_no_fault_of_it(tmp_path, job, trains, error, status):
    checkpoint, torn = tmp_path / state.CHECKPOINT, tmp_path / f".{state.CHECKPOINT}.x7y"

    def fail(trial):
        checkpoint.touch()
        torn.touch()  # by a worker that was killed while it wrote
        if isinstance(error, OSError):
            error.filename = str(checkpoint)
        raise error

    trains(fail)
    parent = Parent(tmp_path)
    with pytest.raises(type(error)) if status is None else contextlib.nullcontext():
        worker.work(job, parent, alone())
    assert record.read_trial(tmp_path).status == status
    assert [checkpoint.exists(), torn.exists()] == [status is None] * 2, (
        "only what may be run again has one to go on from"
    )
    assert (tmp_path / "traceback-rank0.txt").exists() == (status is not None)
    if status is not None:
        assert parent.last.reason == f"{type(error).__name__}: {error}"


def test_a_point_beyond_the_curve_waits_for_no_decision(tmp_path, job):
    """A command that ends by itself may print more values than a curve has points; its driver answers none of them."""
    observer = worker.ReportingObserver(job, Parent(tmp_path, answer="stop"))
    point = Point(index=1, train_s=1.0, samples=16, steps=1)
    assert not observer.point(point)
    for index in (job.points, job.points + 1, 3 * job.points):
        assert observer.point(dataclasses.replace(point, index=index))


def started(monkeypatch, tmp_path, *specs):
    """What Ray Train is given for groups of these kinds."""
    given = []
    trainer = types.SimpleNamespace(fit=lambda: None)
    monkeypatch.setattr(
        ray.train.v2.api.data_parallel_trainer, "DataParallelTrainer",
        lambda loop, **options: given.append({"loop": loop, **options}) or trainer,
    )  # fmt: skip
    for spec in specs:
        run_group("slot", "g", spec, "digits", str(tmp_path), os.getcwd())
    return given


def test_a_group_is_started_where_its_trials_have_their_devices(monkeypatch, tmp_path):
    specs = [
        WorkerGroupSpec(2, Placement((), 0.9, False, 1)), WorkerGroupSpec(2, Placement(("a1", "b2"), 0.9, True, 1)),
        WorkerGroupSpec(4, Placement(("a1",), 7.92, True, 8, 4)),
    ]  # fmt: skip
    given = started(monkeypatch, tmp_path, *specs)
    scalings = [one["scaling_config"] for one in given]
    assert [(one.num_workers, one.resources_per_worker) for one in scalings] == [
        (2, {"CPU": 0.9}), (2, {"CPU": 0.9, "GPU": 1.0}), (1, {"CPU": 7.92, "GPU": 4.0}),
    ]  # fmt: skip
    assert [one.label_selector for one in scalings[:2]] == [None, {"ray.io/node-id": "in(a1,b2)"}]
    assert [one.placement_strategy for one in scalings[:2]] == ["STRICT_PACK", "PACK"]
    assert given[0]["train_loop_config"] == {
        "name": "slot", "generation": "g", "workload": "digits", "here": os.getcwd(), "shared": "",
    }  # fmt: skip


def test_a_worker_whose_imports_fail_fails_in_its_training(monkeypatch, tmp_path):
    """Where unpickling the function fails, Ray keeps the place of the workers for ever."""
    (given,) = started(monkeypatch, tmp_path, WorkerGroupSpec(1, Placement((), 0.9, False, 1)))
    sent = ray.cloudpickle.dumps(given["loop"])
    monkeypatch.setitem(sys.modules, "tunediff.ray_backend.slot", None)
    serve = ray.cloudpickle.loads(sent)
    with pytest.raises(ImportError):
        serve({"name": "slot"})


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
    assert outcome.lost_a_process(RuntimeError(said), 2) == lost
    assert not outcome.lost_a_process(RuntimeError(said), 1), "one rank has nobody to lose"
