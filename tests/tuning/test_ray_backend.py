"""The slots of Ray's backend and the groups that they start, without a cluster: a group is an event that a test sets."""

import errno
import re
import threading
import time
import types
from unittest import mock

import pytest
from ray.exceptions import OutOfMemoryError
from ray.train import ControllerError, WorkerGroupError

from tests.helpers import point
from tests.tuning.test_mailbox import job
from tunediff.core.errors import Failure
from tunediff.core.trial_record import End
from tunediff.ray_backend import backend, slot
from tunediff.tuning.resources import Machine, ResourcePartition
from tunediff.tuning.trial_spec import WorkerGroupSpec


class Group(threading.Event):
    error = None


class Ray:
    """What a slot calls of Ray."""

    def __init__(self):
        self.groups, self.names = [], []

    def remote(self, what):
        return types.SimpleNamespace(options=self.options)

    def options(self, name, **_):
        self.names.append(name)
        return types.SimpleNamespace(remote=lambda *_: self.groups.append(Group()) or self.groups[-1])

    def get(self, group):
        group.wait()
        if group.error is not None:
            raise group.error

    def cancel(self, group, force):
        group.set()

    def wait(self, groups, timeout):
        assert groups[0].wait(timeout)


@pytest.fixture
def ray():
    with (
        mock.patch.multiple(slot, ray=(made := Ray()), beside=dict, own_cluster=dict),
        mock.patch.multiple(backend, ray=made, beside=dict),
    ):
        yield made
        for group in made.groups:
            group.set()


@pytest.fixture
def actor(ray):
    return slot.SlotActor("slot", "storage", "here")


def until(holds):
    end = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def alive(ray):
    return [not group.is_set() for group in ray.groups]


ONE, TWO = WorkerGroupSpec(1), WorkerGroupSpec(2)


@pytest.mark.parametrize(
    ("event", "go_on", "spec", "groups"),
    [(End("ok"), False, ONE, [True]), (End("oom"), False, ONE, [True]), (Failure("its process was killed"), False, ONE, [True]),
     (point(1), False, ONE, [True]), (point(1), True, ONE, [True]), (End("ok"), False, TWO, [False, True])],
    ids=["ended", "out of memory", "killed", "stopped early", "given up while it trains", "needs other devices"],
)  # fmt: skip
def test_next_job_runs_in_the_group_of_the_last_one_unless_it_needs_others(ray, actor, event, go_on, spec, groups):
    serial = actor.start(job())
    actor.post(serial, event)
    if go_on:
        actor.go_on(serial, 1)
    actor.start(job("t0001/1", group=spec))
    assert alive(ray) == groups


def test_a_job_goes_down_with_its_group(ray, actor):
    serial = actor.start(job())
    ray.groups[0].error = RuntimeError("worker died")
    ray.groups[0].set()
    assert actor.event(serial, 0) == Failure("worker died", "RuntimeError")
    actor.start(job("t0000/2"))
    assert alive(ray) == [False, True]


@pytest.mark.parametrize("taken", [True, False])
def test_group_that_does_not_take_a_job_ends_with_it(ray, actor, taken):
    serial = actor.start(job())
    if taken:
        actor.take("")
    actor.stop_job("past its deadline")
    assert actor.event(serial, 0) == Failure("past its deadline")
    assert alive(ray) == [taken]


@pytest.mark.parametrize("event", [End("ok"), point(1)], ids=["ended", "stopped early"])
def test_a_slot_without_a_job_gives_its_devices_back(ray, actor, event):
    serial = actor.start(job())
    actor.post(serial, event)
    actor.release("t0000", 0.01)
    actor.has_idle_rank = True  # as a worker that asks for its next job
    until(lambda: alive(ray) == [False])


def test_workers_stay_where_another_job_comes_soon(ray, actor):
    actor.post(actor.start(job()), End("ok"))
    actor.release("t0000", 0.01)
    actor.start(job("t0001/1"))
    actor.release("t0000", 0.01)  # said once more, late
    time.sleep(0.1)
    assert (alive(ray), actor.running) == ([True], True)


@pytest.mark.parametrize("name", ["grün", "日本", "a b%?'", "x" * 200])
def test_ray_gets_names_that_it_can_carry(ray, tmp_path, name):
    """Ray Train refuses what is not ASCII; the run's folder is named after the slot and its group."""
    share = ResourcePartition((Machine(2, 2),), (1,), True, False)
    made = [backend.RayBackend(tmp_path / name, share) for _ in range(2)]
    names = [one.devices.take(1).actor for one in made for _ in range(2)]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", one) for one in names)
    assert len(set(names)) == 4, "several searches may share a cluster"
    assert names == ray.names


class RayTaskError(RuntimeError):
    def __init__(self, cause):
        super().__init__(f"ray::run_group() (pid=1)\n  File x.py, line 1\nray.train.{type(cause).__name__}: {cause}")
        self.cause = cause


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (ControllerError(UnicodeEncodeError("ascii", "grün", 2, 3, "no")), "UnicodeEncodeError: 'ascii' codec", None),
        (WorkerGroupError("", {0: OSError(errno.ENOSPC, "full", "/tmp/x")}), "OSError: [Errno 28] full", errno.ENOSPC),
        (WorkerGroupError("", {0: RuntimeError("peer"), 1: OutOfMemoryError("low")}), "OutOfMemoryError: low", None),
    ],
    ids=["the controller's", "a worker's, with its errno", "of several workers"],
)
def test_the_inner_fault_of_a_group_is_the_reason(error, words, code):
    """Not Ray's report of it, of many lines."""
    failure = slot.failure_of(RayTaskError(error))
    assert (str(failure).startswith(words), failure.errno) == (True, code)
