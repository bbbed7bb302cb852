"""What tests that train share: two tiny trainings, an observer that remembers, several processes as one training."""

import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import socket
import tempfile
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from unittest import mock

import torch

from tunediff import config as cfg
from tunediff.config import workload
from tunediff.core.clock import Budget, Clock
from tunediff.core.point import Point
from tunediff.distributed import World
from tunediff.training import hardware, state, trial
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.tuning import foreground

CPU = World(0, 1, torch.device("cpu"))
TINY = {
    "model.channels": 8, "model.norm_groups": 4, "model.multipliers": [1, 2], "model.attention": [],
    "loader.batch_size": 16, "data.max_images": 64, "optimizer.warmup": 0.2, "evaluation.points": 2,
    "process.steps": 50, "evaluation.steps": 5,
}  # fmt: skip


def _dotted(values):
    return {name.replace("__", "."): value for name, value in values.items()}


def digits(**values):
    """The digits baseline; knobs with two underscores for a dot."""
    return cfg.override(cfg.baseline("digits"), _dotted(values))


def tiny(**values):
    """Few digits, a tiny network: a training of a second."""
    return cfg.override(cfg.baseline("digits"), TINY | _dotted(values))


def toy(**values):
    """`tests.toy`: a training of milliseconds."""
    with shipped_toy():
        return cfg.override(cfg.baseline("toy"), _dotted(values))


def adapted_toy(**values):
    """The toy as other frameworks train it."""
    own = {"loader.batch_size": 8, "loader.accumulation": 2, "evaluation.points": 3, "dropout": 0.1}
    return toy(**own | values)


def shipped_toy():
    """`tests.toy` is among our own workloads, for a while."""
    return mock.patch.dict(workload.SHIPPED, toy="tests.toy")


class Told(Observer):
    """Remembers all it is told; asks to stop when `stop(self)` holds."""

    def __init__(self, stop=lambda told: False):
        self.points, self.values, self.facts, self.shown, self.steps, self.stop = [], [], {}, {}, 0, stop
        self.restarts = []

    def restarted(self, reason=""):
        self.restarts.append(reason)

    def point(self, point):
        self.points.append(point)
        return True

    def scalars(self, values):
        self.values.append(dict(values))

    def about(self, facts):
        self.facts |= facts

    def captured(self, outcome, reason):
        self.facts["capture"] = f"{outcome}: {reason}" if reason else str(outcome)

    def show(self, name, what):
        self.shown[name] = what

    def after_step(self):
        self.steps += 1

    def asks_to_stop(self):
        return self.stop(self)


class KilledError(Exception):
    """A training that ends in the middle."""


class Dies(Observer):
    """Is killed when it hears of its first point, which is saved by then."""

    def point(self, point):
        raise KilledError


def train(
    config=None, *, samples=None, seconds=None, open_ended=False, compile_charged=True, setup_charged=False, folder=None, world=CPU,
    observer=None, evaluates=False, body=None, **how,
):  # fmt: skip
    """The outcome of a training, of 20 steps of `tiny` without a budget. `body` takes the place of its `train`."""
    if samples is None and seconds is None:
        samples = 16 * 20
    config = config or tiny()
    budget = Budget(
        seconds, samples, compile_charged=compile_charged, setup_charged=setup_charged, open_ended=open_ended
    )
    one = Engine(config, budget, world, observer or Observer(), folder=folder, evaluates=evaluates, **how)
    with shipped_toy():
        code = cfg.of(config).code
        with mock.patch.object(code, "train", body or code.train):
            outcome = trial.run(one)
    # Rank 0 has all of them; the tests compare ranks.
    return dataclasses.replace(outcome, weights=state.broadcast(outcome.weights, world))


def weights(outcome):
    """A copy of what was learned."""
    return {name: tensor.clone() for name, tensor in outcome.weights.items()}


def assert_equal(a, b, **tolerance):
    """Equal states, bit for bit unless told otherwise; nested."""
    assert type(a) is type(b) or isinstance(a, dict) == isinstance(b, dict)
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, equal_nan=True, **(tolerance or {"rtol": 0, "atol": 0}))
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_equal(a[name], b[name], **tolerance)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other, **tolerance)
    else:
        assert a == b


class Hands:
    """A clock moved by hand."""

    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


def timed(seconds, hands, **how):
    return Clock(Budget(seconds, **how), now=hands)


@contextlib.contextmanager
def commands_in_this_process():
    """Let commands train and profile in this process: another one takes seconds of imports."""

    def call(function, content, workload, lines):
        return function(content, lines)

    with mock.patch.object(foreground, "call", call):
        yield


# ------------------------------------------------------------------------------------------------------------- ranks
_PAIR: list[ProcessPoolExecutor] = []


def pair(work, *args):
    """Call `work(rank, port, *args)`, a function of a module, in two processes at once: in this folder, with this
    environment, one thread each. They stay for the next call, since a start costs seconds of imports."""
    if not _PAIR:
        spawn = multiprocessing.get_context("spawn")
        _PAIR.extend(ProcessPoolExecutor(1, spawn) for _ in range(2))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = os.getcwd(), dict(os.environ)
    calls = [one.submit(_there, *here, work, rank, port, *args) for rank, one in enumerate(_PAIR)]
    done, _ = wait(calls, return_when=FIRST_EXCEPTION)
    failed = [call for call in done if call.exception()]
    if failed:
        end_pair()  # the other may wait for it for ever
        failed[0].result()


def end_pair():
    for one in _PAIR:
        for process in one._processes.values():
            process.kill()
    _PAIR.clear()


def _there(folder, environment, work, *args):
    torch.set_num_threads(1)
    from torch import _dynamo  # noqa: F401 - as the first optimizer does

    gc.collect()
    gc.freeze()  # as in conftest: a training is three times as fast
    os.chdir(folder)
    with mock.patch.dict(os.environ, environment, clear=True), mock.patch.object(hardware, *measured_once()):
        work(*args)


@functools.cache
def measured_once():
    """How fast a machine multiplies is measured before every training; here before the first alone."""
    return "fastest_product", functools.cache(hardware.fastest_product)


def ranks(work, folder, *args):
    """What `work(world, *args)` returns in each of two processes that train together; a function of a module."""
    pair(_rank, folder, work, args)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


def _rank(rank, port, folder, work, args):
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.save(work(World(rank, 2, torch.device("cpu")), *args), folder / f"rank-{rank}.pt")
    gc.collect()  # wrapped models are freed before their process group
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------ records
def point(index=1, train_s=1.0, **values):
    """A point of a curve; what is not a field of it was found by an evaluation."""
    names = {field.name for field in dataclasses.fields(Point)}
    fields = {field.name: 0.0 for field in dataclasses.fields(Point) if field.default is field.default_factory}
    fields |= {"loss": 0.5, "peak_memory_mib": 1.0, "peak_host_memory_mib": 1.0}
    fields |= {"index": index, "fraction": index / 4, "train_s": train_s, "samples": 16 * index, "steps": index}
    own = {name: value for name, value in values.items() if name in names}
    return Point(**fields | own, metrics={name: value for name, value in values.items() if name not in names})


def measure_here(monkeypatch, seconds=0.01):
    """Let a dry run measure in this process, where an evaluation takes `seconds`."""
    from tunediff.distributed import alone
    from tunediff.inspector import probe, rehearsal

    def measured(config, evaluates, prepare=True, finals=None, prepared=None):
        return rehearsal.measured(config, alone(), evaluates, finals)

    for module, name, replaced in ((probe, "before_search", measured), (rehearsal, "evaluation_s", lambda *_: seconds)):
        monkeypatch.setattr(module, name, replaced)


def check_here(config):
    """Check a workload in this process; its report."""
    from tunediff.inspector import check, watched_run

    with tempfile.TemporaryDirectory() as folder:
        return check.check(config, lambda *job: watched_run.train(*job, CPU), Path(folder))
