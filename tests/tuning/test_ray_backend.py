"""The slots of Ray's backend and the groups that they start, without a cluster: a group is an event that a test sets."""

import errno
import logging
import os
import re
import stat
import sys
import threading
import time
import types
import typing
from pathlib import Path
from unittest import mock

import pytest
from ray.exceptions import OutOfMemoryError
from ray.train import ControllerError, WorkerGroupError

from tests.helpers import point
from tunediff import config as cfg
from tunediff import search_space
from tunediff.core.clock import Budget
from tunediff.core.errors import Failure
from tunediff.core.journal import Journal
from tunediff.core.template import TemplateError
from tunediff.core.trial_record import End
from tunediff.ray_backend import backend, connection, slot
from tunediff.ray_backend.backend import RayDashboardReporter
from tunediff.tuning import mailbox as mailboxes
from tunediff.tuning.mailbox import Mailbox
from tunediff.tuning.resources import Machine, ResourcePartition
from tunediff.tuning.sessions import NotStartedError
from tunediff.tuning.trial_spec import TrialSpec, WorkerGroupSpec


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


# ------------------------------------------------------------ ray on this machine: its token, and what it leaves behind
NAMES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path, tmp_path_factory):
    """Nothing of Ray's is set, and the home folder is empty."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("tmp")))


def test_every_cluster_has_a_random_token_that_only_its_user_can_read(monkeypatch, tmp_path):
    tokens = []
    for _ in range(2):
        with connection.random_token():
            tokens.append(os.environ["RAY_AUTH_TOKEN"])
            file = Path(connection.dashboard("127.0.0.1:8265").partition("token: cat ")[2].rstrip(")"))
            assert file.read_text() == tokens[-1]
            assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)] == [0o600, 0o700]
        assert "RAY_AUTH_TOKEN" not in os.environ
        assert not file.exists()
    assert len(set(tokens)) == 2
    assert all(len(token) == 64 for token in tokens)
    assert not (tmp_path / ".ray").exists(), "others may read what Ray keeps there"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RAY_AUTH_TOKEN", "mine", "token: RAY_AUTH_TOKEN)"),
        ("RAY_AUTH_TOKEN_PATH", "elsewhere", "token: RAY_AUTH_TOKEN_PATH)"),
        ("RAY_AUTH_MODE", "disabled", "token: none)"),
    ],
)
def test_token_of_the_user_is_left_alone(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with connection.random_token():
        assert {name: os.environ[name] for name in NAMES if name in os.environ} == {name: value}
        assert connection.dashboard("127.0.0.1:8265").endswith(said)


@pytest.fixture
def session(tmp_path, monkeypatch):
    """The folder of the session that `ray.init` is said to have started, beside another one."""
    for name in ("session_1", "session_2"):
        (tmp_path / name / "logs").mkdir(parents=True)
    context = types.SimpleNamespace(
        address_info={"session_dir": str(tmp_path / "session_1")}, dashboard_url="10.0.0.5:8265"
    )
    for name, replaced in (
        ("ray.init", lambda **_: logging.getLogger("ray").setLevel(logging.ERROR) or context),
        ("ray.shutdown", lambda: None), ("tunediff.ray_backend.cluster.runtime_env", dict),
    ):  # fmt: skip
        monkeypatch.setattr(name, replaced)
    return tmp_path


def test_session_folder_of_a_search_is_removed_at_its_end(session):
    with connection.cluster("auto"):
        pass
    with connection.cluster(None):
        assert sorted(path.name for path in session.iterdir()) == ["session_1", "session_2"]
    assert [path.name for path in session.iterdir()] == ["session_2"]


def test_sigterm_while_ray_starts_is_an_interruption(monkeypatch):
    """`ray.init` sets a handler of SIGTERM that ends the process without a word."""
    monkeypatch.setattr("ray.init", lambda **_: sys.exit(15))
    with pytest.raises(KeyboardInterrupt), connection.cluster(None):
        pass


def test_ray_gets_more_time_than_its_own_30_s_to_start(monkeypatch):
    from ray._private import services

    late = [RuntimeError("no node yet"), "node"]

    def get_node(*_):
        if isinstance(answer := late.pop(0), Exception):
            raise answer
        return answer

    init = lambda **_: services.get_node("gcs", "id")  # noqa: E731
    for name, replaced in (("ray._private.services.get_node", get_node), ("ray.init", init)):
        monkeypatch.setattr(name, replaced)
    with connection.cluster(None) as context:
        assert context == "node"
    assert services.get_node is get_node
    monkeypatch.setattr(connection, "START_S", 0.0)
    late += [RuntimeError("never")]
    with pytest.raises(NotStartedError, match="never"), connection.cluster(None):
        pass


# ---------------------------------------------------------- what Ray's pages are told about a search, without a cluster
CONTENT = {
    "workload": "digits",
    "budget": {"per_trial": "9s", "trials": 4},
    "search": {"loader.batch_size": [64, 128, 256], "precision.amp": ["none", "bf16"]},
}


SPACE = search_space.parse(CONTENT, "here")


class Gauge:
    said: typing.ClassVar = []

    def __init__(self, name, description, tag_keys):
        self.name = name

    def set(self, value, tags):
        Gauge.said.append((self.name, value, tags["trial"]))


@pytest.fixture
def board(tmp_path, monkeypatch):
    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    Gauge.said.clear()
    shown = []
    show = lambda slot, line: shown.append((slot, line))  # noqa: E731
    return RayDashboardReporter(tmp_path, SPACE, show), shown


def test_a_trial_is_named_with_its_knobs_and_its_latest_numbers(board, tmp_path):
    told, shown = board
    drawn = {"loader.batch_size": 256, "precision.amp": "none"}
    journal = Journal(tmp_path / "trials" / "t0003")
    journal.start(*cfg.identity(SPACE.config(drawn)), drawn, 9.0, 3)
    told.start("t0003", {"slot": 1})
    made = point(1, 4.5, frechet=23.44, samples_per_s=4012.7, label="FD (classifier)")
    journal.point(made)
    told.point("t0003", {**made.flat, "objective": 23.44, "slot": 1})
    journal.end(End("oom", "16 GiB wanted"))
    told.end("t0003", {"slot": 1})
    assert shown == [
        (1, "t0003  start  loader.batch_size=256"),
        (1, "t0003  FD (classifier) 23.4  at 4.5 s, 4,013 images/s  loader.batch_size=256"),
        (1, "t0003  oom  FD (classifier) 23.4  at 4.5 s, 4,013 images/s  16 GiB wanted  loader.batch_size=256"),
    ]
    assert ("tunediff_objective", 23.44, "t0003") in Gauge.said
    assert ("tunediff_samples_per_s", 4012.7, "t0003") in Gauge.said


# ------------------------------------------------- what the driver of a trial and its ranks agree on, without processes
WAIT_S = 600


def job(attempt="t0000/1", **more):
    return TrialSpec(
        name=attempt.partition("/")[0], folder=None, budget=Budget(1.0), deadline_s=60.0,
        workload="digits", points=2, metric="frechet", mode="min", attempt=attempt,
        **{"group": WorkerGroupSpec(1), **more},
    )  # fmt: skip


@pytest.fixture
def mailbox(monkeypatch):
    monkeypatch.setattr(mailboxes, "POLL_S", 0.05)
    return Mailbox()


def test_a_job_is_taken_reported_and_ended(mailbox):
    serial = mailbox.start(job())
    assert mailbox.take("") == (serial, job())
    assert mailbox.take(serial) is mailbox.event(serial, 0) is None
    mailbox.post(serial, point(1))
    assert mailbox.event(serial, 0) == point(1)
    assert mailbox.command(serial, 0) is None
    mailbox.go_on(serial, 1)
    assert (mailbox.command(serial, 0), mailbox.command(serial, 1)) == (1, None)
    mailbox.post(serial, End("ok"))
    mailbox.post(serial, point(2))  # after the end nothing counts
    assert (mailbox.event(serial, 1), mailbox.event(serial, 2)) == (End("ok"), None)


def test_a_driver_that_was_restarted_finds_its_job_running(mailbox):
    serial = mailbox.start(job())
    mailbox.post(serial, point(1))
    mailbox.go_on(serial, 1)
    assert mailbox.start(job()) == serial
    mailbox.go_on(serial, 1)  # said twice, it is done once
    assert mailbox.command(serial, 1) is None


def test_a_slot_that_was_restarted_knows_nothing(mailbox):
    assert mailbox.event("before", 0) == Failure("its slot was restarted")
    assert mailbox.command("before", 1) == "kill", "its trial goes on from its checkpoint"
    assert mailbox.take("before") is None


@pytest.mark.parametrize(("waits", "command"), [(True, "stop"), (False, "kill")], ids=["for a decision", "busy"])
@pytest.mark.parametrize("how", [lambda box: box.start(job("t0001/1")), Mailbox.give_up], ids=["next", "released"])
def test_job_that_nobody_wants_ends_at_the_point_that_it_has_reported_or_at_once(mailbox, waits, command, how):
    serial = mailbox.start(job())
    mailbox.post(serial, point(1))
    if not waits:
        mailbox.go_on(serial, 1)
    how(mailbox)
    assert mailbox.command(serial, 1) == command


def test_a_driver_whose_job_was_stopped_learns_of_it(mailbox):
    serial = mailbox.start(job())
    mailbox.stop("past its deadline")
    assert mailbox.event(serial, 0) == Failure("past its deadline")
    again = mailbox.start(job("t0000/2"))
    assert (mailbox.event(again, 0), again != serial) == (None, True)


@pytest.mark.parametrize("end", [Failure("its process was killed"), End("error"), End("oom")])
def test_when_a_rank_fails_the_others_end(mailbox, end):
    serial = mailbox.start(job())
    mailbox.post(serial, end)
    assert mailbox.command(serial, 0) == "kill"


def test_how_long_workers_have_been_missing(mailbox):
    assert mailbox.missing_s() == 0.0
    mailbox.start(job())
    assert mailbox.missing_s() > 0.0
    mailbox.take("")
    assert mailbox.missing_s() == 0.0


class HangingRank:
    """Templates whose run ends only when it is killed."""

    def __init__(self):
        self.killed, self.sent, self.ends_when_asked = threading.Event(), [], False

    def train(self, job, variables, take, started):
        started(self)
        take(self, point(1))
        assert self.killed.wait(WAIT_S)
        raise TemplateError(Failure("the process of the run was killed by SIGKILL"))

    def send(self, message):
        self.sent.append(message)
        if message == "stop" and self.ends_when_asked:
            self.killed.set()

    def kill(self):
        self.killed.set()


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_hangs_is_killed_and_takes_the_next_job(mailbox, waits):
    """Also one that was asked to end first, after a while."""
    serial, rank = mailbox.start(job()), HangingRank()
    mailbox.take("")
    thread = threading.Thread(target=mailboxes.train, args=(job(), serial, mailbox, rank, {}))
    thread.start()
    while mailbox.event(serial, 0) is None:
        pass
    if not waits:
        mailbox.go_on(serial, 1)
    rank.ends_when_asked = waits
    mailbox.give_up()
    thread.join(WAIT_S)
    assert rank.killed.is_set()
    assert rank.sent[-1:] == (["stop"] if waits else rank.sent[-1:])
    again = mailbox.start(job("t0001/1"))
    assert mailbox.take(serial) == (again, job("t0001/1"))


def test_a_rank_whose_mailbox_is_gone_ends_its_process(mailbox):
    class Gone:
        def post(self, serial, event):
            pass

        def command(self, serial, seen):
            raise ConnectionError

    mailboxes.train(job(), "serial", Gone(), rank := HangingRank(), {})
    assert rank.killed.is_set()
