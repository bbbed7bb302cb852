"""What a driver makes of what it hears, without a cluster."""

import dataclasses
import errno
import itertools
import os
import pickle

import pytest

from tests.helpers import point
from tunediff import config as cfg
from tunediff import search_space
from tunediff.core import disk
from tunediff.core import trial_record as record
from tunediff.core.errors import Failure
from tunediff.core.journal import Journal
from tunediff.core.progress import DOING
from tunediff.core.trial_record import End
from tunediff.tuning import trial
from tunediff.tuning.resources import Allocation, Placement
from tunediff.tuning.trial_spec import TrialSpec, WorkerGroupSpec

CONTENT = {"workload": "digits", "budget": {"per_trial": "9s", "trials": 2}, "search": {"loader.batch_size": [64, 128]}}
PLACE = Placement(cpus=1.9, threads=2)
DRAWN = {"loader.batch_size": 64}


def spec_of(folder, drawn=DRAWN, **changes):
    space = search_space.parse(CONTENT | changes, "x.yaml")
    config = space.config(drawn)
    spec = TrialSpec.of_space(space, folder, "t0003", config)
    if record.read_trial(spec.folder) is None:
        spec.begin(config, drawn)
    return spec


class Slot:
    """Answers as the actor does: every job gets the next list of events; None: nothing yet.

    `submitted` is called with every job. An event may be a function that returns it.
    """

    def __init__(self, *events, submitted, missing):
        self.events, self.jobs, self.went_on, self.killed = list(events), [], [], []
        self.submitted, self.missing = submitted, missing

    def start(self, job):
        self.jobs.append(job)
        self.submitted()
        return str(len(self.jobs))

    def event(self, serial, cursor):
        events = self.events[int(serial) - 1]
        event = events[cursor] if events[cursor] is not None else events.pop(cursor)
        return event() if callable(event) else event

    def go_on(self, serial, index):
        self.went_on.append(index)

    def missing_s(self):
        return self.missing

    def stop(self, reason):
        self.killed.append(reason)

    def gone(self, nodes):
        return [node for node in nodes if node == "dead"]


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Drive the trial through a slot with these events; (slot, what Tune got, record).

    `late_s`: what passes once the job is submitted.
    """

    def drive(*events, nodes=(), missing=0.0, submitted=lambda: None, late_s=0.0, **changes):
        times = itertools.chain([0.0], itertools.repeat(late_s))
        slot = Slot(*events, submitted=submitted, missing=missing)
        if late_s:
            monkeypatch.setattr(trial.time, "monotonic", lambda: next(times))
        place = dataclasses.replace(PLACE, nodes=tuple(nodes))
        spec = spec_of(tmp_path, **changes).on(Allocation(0, place, "slot-0"))
        return (slot, list(trial.run_trial_on_slot(spec, slot)), record.read_trial(tmp_path / "trials" / "t0003"))

    return drive


def test_a_trial_that_runs_to_its_end(drive):
    slot, told, read_back = drive([point(1, 1.0, frechet=5.0), None, point(2, 2.0, frechet=4.0), End("ok", steps=2)])
    assert [one["objective"] for one in told] == [5.0, 4.0]
    assert [one["train_s"] for one in told] == [1.0, 2.0]
    assert slot.went_on == [1, 2]
    assert (read_back.status, read_back.number, read_back.drawn, read_back.budget_s) == (
        "ok",
        3,
        {"loader.batch_size": 64},
        9.0,
    )
    (job,) = slot.jobs
    assert (job.attempt, job.group) == ("t0003/1", WorkerGroupSpec(1, PLACE))
    assert (job.evaluates, job.keeps, job.profile_steps) == (True, True, 0)
    assert (job.workload, job.points) == ("diffusion", 4)
    assert cfg.configuration_of(record.read_begun(job.folder)).loader.batch_size == 64
    assert job.budget.seconds == 9.0


def test_an_end_that_its_worker_wrote_is_not_written_again(drive, tmp_path):
    folder = tmp_path / "trials" / "t0003"
    _, _, read_back = drive([End("nan", "diverged")], submitted=lambda: Journal(folder).end(End("nan", "diverged")))
    assert [event["event"] for event in record.events(folder)] == ["start", "end"]
    assert read_back.status == "nan"


def test_what_its_driver_gives_up_keeps_no_checkpoint(drive, tmp_path):
    checkpoint = tmp_path / "trials" / "t0003" / record.CHECKPOINT
    lost = Failure("the node ran low on memory", "OutOfMemoryError")
    _, _, read_back = drive([lost], submitted=checkpoint.touch)
    assert read_back.status == "oom"
    assert not checkpoint.exists()


def test_progress_of_an_earlier_attempt_is_gone_when_the_next_begins(drive, tmp_path):
    """Of a search that was killed; the heartbeat reads it."""
    doing, left = tmp_path / "trials" / "t0003" / DOING, []
    doing.parent.mkdir(parents=True)
    doing.write_text("{}")
    drive([End("ok")], submitted=lambda: left.append(doing.exists()))
    assert left == [False]


def test_a_trial_that_has_ended_is_told_from_its_journal(drive):
    drive([point(1, frechet=5.0), End("ok")])
    slot, told, read_back = drive()
    assert slot.jobs == []
    assert read_back.attempts == 1
    assert told == []  # the made-up worker wrote none


@pytest.mark.parametrize(
    ("reasons", "status", "reason"),
    [
        ([Failure("its slot was restarted"), None], "ok", ""),
        (
            [Failure("x\n  y", "NameError"), Failure("no room")],
            "error",
            "the workers died 2 times: NameError: x y; then: no room",
        ),
        ([Failure("16 GiB", "OutOfMemoryError")], "oom", "OutOfMemoryError: 16 GiB"),
    ],
)
def test_what_it_means_that_the_workers_died(drive, tmp_path, reasons, status, reason):
    slot, _, read_back = drive(*([why] if why is not None else [End("ok")] for why in reasons))
    assert (read_back.status, read_back.reason, read_back.attempts) == (status, reason, len(reasons))
    assert read_back.end.process_died == (status == "error")
    assert [job.attempt for job in slot.jobs] == [f"t0003/{i + 1}" for i in range(len(reasons))]
    faults = [line for line in record.events(tmp_path / "trials" / "t0003") if line["event"] == "fault"]
    assert [(line["kind"], line["error"]) for line in faults] == [("process", why.error) for why in reasons[:-1]]


def test_end_that_was_written_before_the_loss_stands(drive, tmp_path):
    """A second start would void it, and train the whole trial again without its checkpoint."""
    folder = tmp_path / "trials" / "t0003"
    slot, _, read_back = drive(
        [lambda: Journal(folder).end(End("ok", steps=7)) or Failure("its slot was restarted")], []
    )
    assert (len(slot.jobs), read_back.attempts, read_back.status, read_back.end.steps) == (1, 1, "ok", 7)


def full(path):
    return Failure.of(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path))


def test_a_full_disk_is_no_end_and_its_errno_and_file_arrive(drive, tmp_path):
    """Its file names the disk: no probe, which is smaller than a checkpoint, and no look for words in a text."""
    folder = tmp_path / "trials" / "t0003"
    with pytest.raises(OSError, match="No space left on device") as caught:
        drive([full(str(folder / "checkpoint.pt"))])
    assert not record.read_trial(folder).finished
    noted = disk.recorded_fault(folder)
    expected = errno.ENOSPC, str(folder / "checkpoint.pt")
    assert [(error.errno, error.filename) for error in (caught.value, noted)] == [expected] * 2


def test_a_full_disk_of_a_node_does_not_stop_the_search(drive):
    """Ray cannot start workers where `/tmp` is full; the folder of the results can be written."""
    slot, _, read_back = drive(*[[full("/dev/no-such-folder/logs")]] * 2)  # a file system of its own
    assert (len(slot.jobs), read_back.status, read_back.end.process_died) == (2, "error", True)


def test_a_trial_past_its_deadline_is_given_up_but_for_an_end(drive):
    slot, told, read_back = drive([point(1, frechet=5.0)], late_s=1e6)
    assert (told, slot.killed, read_back.status) == ([], ["past its deadline"], "timeout")
    assert read_back.reason == f"not done after {4 * 9 + 3600} s of wall-clock"


def test_an_end_in_the_journal_is_no_timeout(drive, tmp_path):
    """The worker has written it a moment before its deadline, and it is on its way to the driver."""
    folder = tmp_path / "trials" / "t0003"
    written = lambda: Journal(folder).end(End("ok", steps=7))  # noqa: E731
    slot, _, read_back = drive([None, End("timeout")], submitted=written, late_s=1e6)
    assert (slot.killed, read_back.status, read_back.end.steps) == ([], "ok", 7)
    assert [event["event"] for event in record.events(folder)] == ["start", "end"]


def test_a_probe_of_the_speed_is_neither_judged_nor_kept(drive):
    slot, _, _ = drive([End("ok")], objective="samples_per_s")
    assert (slot.jobs[0].evaluates, slot.jobs[0].keeps) == (False, False)


def test_a_lost_node_is_no_fault_of_the_trial(drive, tmp_path):
    """It has no end, so that it gets another seat; on that it is another job, and goes on."""
    folder = tmp_path / "trials" / "t0003"
    slot, told, read_back = drive([point(1, frechet=5.0), Failure("its node died", "ActorDiedError")], nodes=["dead"])
    assert (len(told), read_back.status, record.was_lost(folder)["nodes"]) == (1, None, ["dead"])
    slot, _, read_back = drive([None, None], nodes=["alive", "dead"])
    assert (slot.killed, slot.jobs[0].attempt, read_back.status) == (["node dead is gone"], "t0003/1.1", None)
    slot, _, read_back = drive([End("ok")], nodes=["alive"])
    assert (slot.jobs[0].attempt, read_back.status, record.was_lost(folder)) == ("t0003/2.1", "ok", None)


def test_a_trial_that_ended_as_its_node_went_is_not_run_again(drive, tmp_path):
    """Workers outlive their raylet by seconds."""
    folder = tmp_path / "trials" / "t0003"
    event = lambda: Journal(folder).end(End("ok")) or Failure("node died")  # noqa: E731
    assert drive([event], nodes=["dead"])[2].status == "ok"
    assert not record.was_lost(folder)


def test_a_trial_that_loses_node_after_node_ends(drive):
    """It may be what kills them."""
    for _ in range(2):
        assert drive([Failure("node died")], nodes=["dead"])[2].status is None
    read_back = drive([Failure("node died")], [Failure("node died")], nodes=["dead"])[2]
    assert (read_back.status, read_back.reason) == ("error", "the workers died 2 times: node died")


def test_the_deadline_of_a_group_that_waits_for_its_workers_waits_with_it(drive):
    """The deadline of a trial of 9 s is less than what passes."""
    _, _, read_back = drive([None, None, End("ok")], nodes=["b"], missing=61.0, late_s=5000.0)
    assert read_back.status == "ok"


def test_workers_that_never_start_on_this_machine_are_no_timeout_of_the_configuration(drive):
    """They are started again, and then the trial ends as one whose workers died, of which nothing is learned."""
    slot, _, read_back = drive([None, None], [None, None], missing=trial.START_S + 1)
    assert (len(slot.jobs), len(slot.killed), read_back.status) == (2, 2, "error")
    assert read_back.reason == "the workers died 2 times: its workers did not start within 600 s"
    slot, _, read_back = drive([None, End("ok")], nodes=["alive"], missing=trial.START_S + 1)
    assert slot.killed == [], "a cluster may bring a node"


def test_four_workers_get_a_quarter_of_the_device_seconds(tmp_path):
    """The job, and the journal of what was begun."""
    content = CONTENT | {"budget": {"per_trial": "8s", "trials": 2, "unit": "device", "price_per_device_hour": 3}}
    content |= {"fixed": {"parallel.workers": 4}}
    spec = spec_of(tmp_path, **content).on(Allocation(0, Placement()))
    assert (spec.budget.seconds, spec.budget.price_per_device_hour, spec.group.size) == (2.0, 3.0, 4)


def test_specification_is_passed_on_without_its_configuration(tmp_path):
    """A slot imports no torch, which a user's file may import; the trial's own processes read the journal."""
    spec = spec_of(tmp_path)
    assert not any(name.encode() in pickle.dumps(spec) for name in cfg.baseline("digits").schema.knobs if "." in name)
    assert cfg.configuration_of(record.read_begun(spec.folder)).loader.batch_size == 64


def test_a_disk_that_is_full_is_known_by_the_file_that_was_tried(tmp_path, monkeypatch):
    """A fault that names no file of the trial would count as its own, twice, and end it."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    fault = disk.unwritable(tmp_path)
    assert fault is not None
    assert os.path.dirname(fault.filename) == str(tmp_path)
