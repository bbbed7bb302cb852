"""What drivers and workers agree on in a slot, without a cluster: its group is a task that a test ends."""

import asyncio
import re
import types

import pytest

from tests.helpers import point
from tunediff.core.clock import Budget
from tunediff.core.trial_record import End
from tunediff.tuning import slot as slot_module
from tunediff.tuning import slots, trial
from tunediff.tuning.messages import Assignment, Lost
from tunediff.tuning.resources import Machine, ResourcePartition
from tunediff.tuning.trial_spec import TrialSpec, WorkerGroupSpec

ONE = WorkerGroupSpec(1)


def job(key="t0000/1", kind=ONE, folder=None, **more):
    return TrialSpec(
        name=key.partition("/")[0], folder=folder, drawn={}, pickled=b"", budget=Budget(1.0), deadline_s=60.0,
        workload="digits", points=2, metric="frechet", mode="min", group=kind, attempt=key, **more,
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
    ("end", "workers_end", "size", "groups"),
    [
        (End("ok"), False, 1, 1), (End("oom"), False, 1, 1), (Lost("its process died"), False, 1, 1),
        (End("error"), True, 1, 2), (End("ok"), False, 2, 2),
    ],
)  # fmt: skip
def test_which_job_needs_another_group(slot, end, workers_end, size, groups):
    async def both():
        serial = await slot.submit(job())
        await slot.post(serial, end, workers_end)
        old = slot._generation

        async def leave():  # as workers do that are told so
            while await slot.take(old, serial) != Assignment():
                pass
            slot.groups[0].set_result(None)

        leaving = asyncio.ensure_future(leave())
        again = await slot.submit(job("t0001/1", WorkerGroupSpec(size)))
        leaving.cancel()
        assert (await slot.take(slot._generation, serial)).serial == again
        return len(slot.groups)

    assert asyncio.run(both()) == groups


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
        await slot.warm(ONE, "digits")
        await slot.warm(ONE, "digits")
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
