"""What the driver of a trial and its ranks agree on, without processes."""

import threading

import pytest

from tests.helpers import point
from tunediff.core.clock import Budget
from tunediff.core.errors import Failure
from tunediff.core.template import TemplateError
from tunediff.core.trial_record import End
from tunediff.tuning import mailbox as mailboxes
from tunediff.tuning.mailbox import Mailbox
from tunediff.tuning.trial_spec import TrialSpec, WorkerGroupSpec

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
