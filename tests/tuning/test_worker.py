"""What a worker does with a job, without a cluster."""

import types

import pytest

from tunediff import config as cfg
from tunediff import record
from tunediff.training import checkpoint
from tunediff.training.parallel import alone
from tunediff.tuning import worker

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
