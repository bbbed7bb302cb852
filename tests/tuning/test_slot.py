"""What drivers and workers agree on in a slot, without a cluster: its group is a task that a test ends."""

import asyncio
import re
import types

import pytest
import torch

from tests.helpers import point, tiny
from tunediff.core.clock import Budget
from tunediff.core.trial_record import End
from tunediff.tuning import slot as slot_module
from tunediff.tuning import slots, trial
from tunediff.tuning.messages import Assignment, Lost
from tunediff.tuning.resources import Machine, Placement, ResourcePartition
from tunediff.tuning.trial_spec import TrialSpec, WorkerGroupSpec

ONE, GPU = WorkerGroupSpec(1, True), Placement(gpu=True)


def job(key="t0000/1", kind=ONE, folder=None, **more):
    return TrialSpec(
        name=key.partition("/")[0], folder=folder, drawn={}, pickled=b"", budget=Budget(1.0), deadline_s=60.0,
        metric="frechet", mode="min", group=kind, attempt=key, **more,
    )  # fmt: skip


@pytest.fixture
def slot(monkeypatch, tmp_path):
    """A slot whose groups are futures, in `slot.groups`."""
    monkeypatch.setattr(slot_module, "POLL_S", 0.05)

    def options(**_):
        return types.SimpleNamespace(remote=start)

    def start(*_):
        made.groups.append(asyncio.get_running_loop().create_future())
        return made.groups[-1]

    def cancel(group, force):
        group.set_exception(RuntimeError("cancelled"))

    monkeypatch.setattr(slot_module.ray, "remote", lambda function: types.SimpleNamespace(options=options))
    monkeypatch.setattr(slot_module.ray, "cancel", cancel)
    monkeypatch.setattr(slot_module, "beside", dict)
    monkeypatch.setattr(slot_module, "own_cluster", dict)
    made = slot_module.Slot("slot", str(tmp_path), str(tmp_path))
    made.groups = []
    return made


def test_a_job_is_taken_told_of_and_ended(slot):
    async def told():
        serial = await slot.submit(job())
        order = await slot.take(slot._generation, "")
        assert order == Assignment(serial, job())
        assert await slot.take(slot._generation, serial) is None  # nothing new
        assert await slot.event(serial, 0) is None
        await slot.post(serial, point(1))
        assert await slot.event(serial, 0) == point(1)
        assert await slot.decision(serial, 1) is None
        await slot.let_go_on(serial, 1)
        assert await slot.decision(serial, 1) == "go"
        await slot.post(serial, End("ok"))
        assert await slot.event(serial, 1) == End("ok")
        await slot.post(serial, point(2))  # after the end nothing is heard
        assert await slot.event(serial, 2) is None
        return len(slot.groups)

    assert asyncio.run(told()) == 1


class ControllerError(RuntimeError):
    """As Ray Train's: its message has the failure's, not its kind."""

    def __init__(self, failure):
        super().__init__(f"Training failed due to controller error:\n{failure}")
        self.controller_failure = failure


class RayTaskError(RuntimeError):
    def __init__(self, cause):
        super().__init__(f"ray::run_group() (pid=1)\n  File x.py, line 1\nray.train.{type(cause).__name__}: {cause}")
        self.cause = cause


def test_the_inner_fault_of_a_group_is_the_reason(slot):
    """What Ray said of a run whose name is not ASCII."""
    try:
        "grün".encode("ascii")
    except UnicodeEncodeError as error:
        failure = error

    async def lost():
        serial = await slot.submit(job())
        slot.groups[0].set_exception(RayTaskError(ControllerError(failure)))
        return await slot.event(serial, 0)

    said = trial._short(asyncio.run(lost()).reason)
    assert said == f"UnicodeEncodeError: {failure}"
    assert trial._short("x\nray.train.ControllerError: due to controller error:\nno room\n") == (
        "ray.train.ControllerError: due to controller error: no room"
    )


@pytest.mark.parametrize("name", ["grün", "日本", "a b%?'", "x" * 200])
def test_ray_gets_names_that_it_can_carry(monkeypatch, tmp_path, name):
    """Ray Train refuses what is not ASCII; the run's folder is named after the slot and its group."""
    monkeypatch.setattr(slots, "_create", lambda *_: types.SimpleNamespace(close=types.SimpleNamespace(remote=None)))
    share = ResourcePartition((Machine(2, 2),), (1,), True, False)
    made = [slots.opened(tmp_path / name, share, None).__enter__() for _ in range(2)]
    names = [f"{one.prefix}{number}" for one in made for number in range(2)]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", one) for one in names)
    assert len(set(names)) == 4, "several searches may share a cluster"


def test_workers_that_left_a_draining_node_end_the_attempt(slot):
    async def left():
        serial = await slot.submit(job())
        await slot.post(serial, Lost("node n1 is draining"))
        again = await slot.submit(job("t0000/1.1"))
        return await slot.event(again, 0), serial != again

    assert asyncio.run(left()) == (None, True)


def test_a_driver_that_was_restarted_finds_its_job_running(slot):
    async def submitted():
        serial = await slot.submit(job())
        assert await slot.submit(job()) == serial

    asyncio.run(submitted())


def test_a_slot_that_was_restarted_knows_nothing(slot):
    async def asked():
        assert await slot.event("before", 0) == Lost("its slot was restarted")
        assert await slot.decision("before", 1) == "unknown"
        assert await slot.take("a group of before", "") == Assignment()

    asyncio.run(asked())


def test_a_job_goes_down_with_its_group(slot):
    async def died():
        serial = await slot.submit(job())
        slot.groups[0].set_exception(RuntimeError("worker died"))
        return await slot.event(serial, 0)

    assert asyncio.run(died()) == Lost("worker died")


def test_a_group_that_was_killed_is_told_why(slot):
    async def killed():
        serial = await slot.submit(job())
        await slot.kill("past its deadline")
        return await slot.event(serial, 0), slot._group

    assert asyncio.run(killed()) == (Lost("past its deadline"), None)


@pytest.mark.parametrize(
    ("first", "end", "second", "groups"),
    [
        (job(), End("ok"), job("t0001/1"), 1),
        (job(), End("pruned"), job("t0001/1"), 1),
        (job(), End("nan"), job("t0001/1"), 1),
        (job(), End("oom"), job("t0001/1"), 2),
        (job(), End("error"), job("t0001/1"), 2),
        (job(), End("ok"), job("t0001/1", WorkerGroupSpec(2, True)), 2),
        (job(), End("ok"), job("t0001/1", WorkerGroupSpec(1, False)), 2),
        (job(kind=WorkerGroupSpec(1, False, GPU)), End("ok"), job("t0001/1", WorkerGroupSpec(1, True, GPU)), 1),
        (
            job(kind=WorkerGroupSpec(1, False, GPU)),
            End("ok"),
            job("t0001/1", WorkerGroupSpec(1, False, GPU, cudnn_benchmark=True)),
            2,
        ),
        (
            job(kind=WorkerGroupSpec(1, False, GPU, True)),
            End("ok"),
            job("t0001/1", WorkerGroupSpec(1, False, GPU, True)),
            1,
        ),
        (job(), End("ok"), job("t0001/1", WorkerGroupSpec(1, True, cudnn_benchmark=True)), 1),
        (job(), End("ok"), job("t0001/1", fresh=True), 2),
        (job(fresh=True), End("ok"), job("t0001/1"), 2),
    ],
)
def test_which_job_needs_another_group(slot, first, end, second, groups):
    async def both():
        serial = await slot.submit(first)
        await slot.post(serial, end)
        old = slot._generation

        async def leave():  # as workers do that are told so
            while await slot.take(old, serial) != Assignment():
                pass
            slot.groups[0].set_result(None)

        leaving = asyncio.ensure_future(leave())
        again = await slot.submit(second)
        leaving.cancel()
        assert (await slot.take(slot._generation, serial)).serial == again
        return len(slot.groups)

    assert asyncio.run(both()) == groups


def test_job_after_a_failed_profile_gets_other_workers(slot):
    """The trial before is `ok`, but its workers end with the failure, which must not count against the next trial."""

    async def both():
        serial = await slot.submit(job())
        await slot.post(serial, End("ok", "its operations were not profiled: …"), workers_end=True)
        failing = asyncio.get_running_loop().call_later(
            0.05, slot.groups[0].set_exception, RuntimeError("torch.OutOfMemoryError: CUDA out of memory")
        )
        serial = await slot.submit(job("t0001/1"))
        assert failing.when() <= asyncio.get_running_loop().time()
        return await slot.event(serial, 0), len(slot.groups), await slot.take(slot._generation, "")

    event, groups, order = asyncio.run(both())
    assert (event, groups, order.job) == (None, 2, job("t0001/1"))


def test_a_job_is_not_forgotten_where_changed_workers_leave_early(slot):
    """Their group ends before the slot gets to replace it."""

    async def renewed():
        serial = await slot.submit(job())
        await slot.post(serial, End("ok"))
        serial, old = await slot.submit(job("t0001/1")), slot._generation
        async with slot._turn:
            await slot.renew(old)
            slot.groups[0].set_result(None)
            while slot._group is not None:
                await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return await slot.event(serial, 0), await slot.take(slot._generation, "")

    lost, order = asyncio.run(renewed())
    assert (lost, order.job) == (None, job("t0001/1"))


@pytest.mark.parametrize("waits", [True, False], ids=["a job waits", "none waits"])
def test_workers_that_a_trial_has_changed_are_replaced(slot, waits):
    """Also where the next job was handed to them already."""

    async def renewed():
        serial = await slot.submit(job())
        await slot.post(serial, End("ok"))
        old = slot._generation
        if waits:
            serial = await slot.submit(job("t0001/1"))
        await slot.renew(old)
        assert await slot.take(old, "") in (Assignment(), None)
        await asyncio.sleep(0)
        assert await slot.take(old, "") == Assignment()
        slot.groups[0].set_result(None)
        if not waits:
            serial = await slot.submit(job("t0001/1"))
        order = await slot.event(serial, 0)
        assert order is None, "the job is not lost"
        return slot._generation != old, len(slot.groups), await slot.take(slot._generation, "")

    fresh, groups, order = asyncio.run(renewed())
    assert (fresh, groups, order.job) == (True, 2, job("t0001/1"))


def test_a_trial_that_was_stopped_early_leaves_its_workers_to_the_next(slot):
    """Its driver is gone, and they wait for a decision."""

    async def stopped():
        serial = await slot.submit(job())
        await slot.post(serial, point(1))
        await slot.submit(job("t0001/1"))
        return await slot.decision(serial, 1), len(slot.groups)

    assert asyncio.run(stopped()) == ("stop", 1)


def test_workers_that_are_busy_with_a_trial_that_nobody_wants_are_killed(slot):
    async def given_up():
        await slot.submit(job())
        await slot.submit(job("t0001/1"))
        return len(slot.groups)

    assert asyncio.run(given_up()) == 2


def test_a_group_is_warmed_once(slot):
    async def warmed():
        await slot.warm(ONE)
        await slot.warm(ONE)
        await slot.submit(job())
        return len(slot.groups)

    assert asyncio.run(warmed()) == 1


@pytest.mark.parametrize("end", [End("ok"), None], ids=["ended", "stopped early"])
def test_a_slot_without_a_job_gives_its_devices_back(slot, end):
    """Also where a scheduler stopped the trial: its workers still wait for a decision."""

    async def freed():
        serial = await slot.submit(job())
        await slot.post(serial, end or point(1))

        async def leave():  # as workers do that are told so
            while await slot.take(slot._generation, serial) != Assignment():
                pass
            slot.groups[0].set_result(None)

        leaving = asyncio.ensure_future(leave())
        await slot.free(0.0)
        await leaving
        return slot._group, await slot.decision(serial, 1) if end is None else "stop"

    assert asyncio.run(freed()) == (None, "stop")


def test_workers_stay_where_another_job_comes_soon(slot):
    async def reused():
        serial = await slot.submit(job())
        await slot.post(serial, End("ok"))
        freeing = asyncio.ensure_future(slot.free(0.05))
        await asyncio.sleep(0)
        await slot.submit(job("t0001/1"))
        await freeing
        return len(slot.groups), slot._group is not None

    assert asyncio.run(reused()) == (1, True)


def test_a_trial_that_continues_at_once_on_its_slot_is_not_freed(slot):
    """Its slot is freed later; by then its driver is back with the same attempt, and its workers train."""

    async def continued():
        serial = await slot.submit(job())
        await slot.post(serial, point(1))
        freeing = asyncio.ensure_future(slot.free(0.05))
        await asyncio.sleep(0)
        again = await slot.submit(job())
        await slot.let_go_on(again, 1)
        decision = await slot.decision(serial, 1)
        await freeing
        await slot.post(serial, End("ok"))
        return serial == again, decision, await slot.event(again, 1)

    assert asyncio.run(continued()) == (True, "go", End("ok"))


@pytest.mark.parametrize("waits", [True, False], ids=["for a decision", "for nothing"])
def test_a_driver_whose_job_was_dropped_learns_of_it(slot, waits):
    """It would ask for events until its deadline."""

    async def dropped():
        serial = await slot.submit(job())
        if waits:
            await slot.post(serial, point(1))
        freeing = asyncio.ensure_future(slot.free(0.0))
        lost = await slot.event(serial, int(waits))
        freeing.cancel()
        return lost

    assert asyncio.run(dropped()) == Lost("its trial was given up")


def test_how_long_workers_have_been_missing(slot):
    async def missing():
        before = await slot.missing_s()
        serial = await slot.submit(job())
        await asyncio.sleep(0.01)
        waited = await slot.missing_s()
        await slot.take(slot._generation, serial)
        return before, waited, await slot.missing_s()

    before, waited, after = asyncio.run(missing())
    assert (before, after) == (0.0, 0.0)
    assert waited >= 0.01


@pytest.mark.parametrize("benchmark", [True, False])
def test_workers_that_are_warmed_have_the_cudnn_benchmark_of_the_baseline(monkeypatch, tmp_path, benchmark):
    """Else the first trial would wait for other workers."""
    config, warmed = tiny(precision__cudnn_benchmark=benchmark), []
    actor = types.SimpleNamespace(
        **{
            name: types.SimpleNamespace(remote=remote)
            for name, remote in (("warm", warmed.append), ("free", lambda _: 0))
        }
    )
    monkeypatch.setattr(slots, "_create", lambda *_: actor)
    share = ResourcePartition((Machine(2, 1),), (1,), True, False)
    slots.Slots(tmp_path, share).warm(config)
    (kind,) = warmed
    assert kind.cudnn_benchmark == benchmark
    assert kind == WorkerGroupSpec.of(config, kind.place)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cudnn_plans_outlive_the_setting():
    """Why a group of workers serves one `precision.cudnn_benchmark`: a shape that was met without it is never tried."""

    def kernels(benchmark, width):
        flags = torch.backends.cudnn.flags(enabled=True, benchmark=benchmark)
        x, weight = torch.randn(8, width, 32, 32, device="cuda"), torch.randn(width, width, 3, 3, device="cuda")
        with flags, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.nn.functional.conv2d(x, weight, padding=1)
            torch.cuda.synchronize()
        return len(profile.events())

    kernels(False, 8)  # libraries are loaded
    fixed, late, tried = kernels(False, 48), kernels(True, 48), kernels(True, 56)
    assert late <= fixed < tried
