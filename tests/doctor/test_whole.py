"""Part C: what each trial of the search must become, and that it is noticed when one becomes something else."""

import json
import subprocess
import sys

import pytest
import yaml

from tests.helpers import point
from tunediff import machine, record, search
from tunediff.doctor import apart, whole
from tunediff.doctor.finding import Site
from tunediff.record import End, TrialRecord


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [])
    cached = whole.searched
    cached.cache_clear()
    yield Site(tmp_path, "cpu")
    cached.cache_clear()


def trial(name, status="ok", attempts=1, **values):
    points = [point(1, 4.0, samples_per_s=100.0, **values)] if status == "ok" else []
    end = End(status, reason="" if status == "ok" else "why")
    return TrialRecord(name, int(name[1:]), {}, {}, "", attempts=attempts, points=points, end=end)


def six(**changes):
    """The trials as they should end, but for those that are given."""
    well = {f"t000{index}": trial(f"t000{index}", energy_wh=0.02) for index in range(6)}
    well |= {"t0002": trial("t0002", "oom"), "t0003": trial("t0003", attempts=2)}
    return well | {"t0004": trial("t0004", compiled_graphs=2)} | changes


@pytest.mark.parametrize(
    ("changes", "killed", "words"),
    [
        ({"t0000": trial("t0000", "error")}, True, "t0000 should be ok (why)"),
        ({"t0002": trial("t0002")}, True, "t0002 should be oom"),
        ({"t0003": trial("t0003")}, True, "t0003 did not go on"),
        ({}, False, "could not be killed"),
        ({"t0004": trial("t0004", compiled_graphs=0)}, True, "t0004 compiled nothing"),
        ({"t0004": trial("t0004", "error")}, True, "t0004 should be ok (why)"),
    ],
)
def test_a_trial_that_becomes_something_else_is_told(changes, killed, words):
    assert whole.judged(six(), True, 6).state == "ok"
    found = whole.judged(six(**changes), killed, 6)
    assert found.state == "wrong"
    assert words in found.found
    assert "t0006 should be ok" in whole.judged(six(), True, 7).found


def test_the_search_file_is_one_that_a_search_takes(site, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(whole.asked()))
    assert search.main(["whole.yaml", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert len(whole.trials()) == 6
    monkeypatch.setattr(machine, "gpus", lambda: ["0", "1"])
    assert [one["parallel.strategy"] for one in whole.trials()[6:]] == ["ddp", "fsdp", "pipeline"]


def test_a_search_that_fails_is_told_with_its_last_words(site, tmp_path, monkeypatch):
    script = "import sys; print('error: no room', file=sys.stderr); sys.exit(1)"
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda line, **how: popen([sys.executable, "-c", script], **how))
    found = whole.search(site)
    assert (found.state, found.stops) == ("missing", True)
    assert "exit code 1: error: no room" in found.found
    assert whole.energy(site).state == "missing"
    whole.searched.cache_clear()
    monkeypatch.setattr(whole, "WITHIN_S", 1.0)
    script = "import time; time.sleep(60)"
    assert "not done after 1 s" in whole.search(site).found


def test_the_worker_is_killed_once_its_trial_was_measured(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert not whole.kill(tmp_path / "none")
    journal = record.Journal(tmp_path)
    journal.write("worker", pid=sleeper.pid)
    assert not whole.kill(tmp_path)
    journal.point(point())
    assert sleeper.poll() is None
    assert whole.kill(tmp_path)
    assert sleeper.wait(10) == -9
    assert not whole.kill(tmp_path)  # it is gone: nobody else is killed


def test_energy_is_told_or_why_not(site, monkeypatch):
    found = six()
    monkeypatch.setattr(whole, "searched", lambda: (0, found, True, ""))
    assert whole.search(site).state == "ok"
    assert whole.energy(site).found == "0.02 Wh for the baseline"
    found["t0000"] = trial("t0000")
    assert "pip install tunediff[energy]" in whole.energy(site).found
    found["t0000"] = trial("t0000", "error")
    assert whole.energy(site).found == "the baseline has no point"


def asked(monkeypatch, answers):
    """Stands in for processes of their own; what was asked, with how many ranks."""
    heard = []

    def ask(module, *words, ranks=1, **how):
        heard.append((*words, ranks))
        found = answers.get(words[-1], {"apart": 1e-6, "loss_apart": 0.0, "images_per_s": 150.0})
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(apart, "ask", ask)
    return heard


ONE = {"apart": 0.0, "loss_apart": 0.0, "images_per_s": 100.0}


def test_two_ranks_are_asked_where_there_are_two(site, monkeypatch):
    heard = asked(monkeypatch, {"single": ONE})
    gpus = Site(site.storage, "cuda")
    monkeypatch.setattr(machine, "cores", lambda: 1)
    assert [whole.two_ranks(site).found, whole.killed_rank(site).found] == ["1 CPU core"] * 2
    monkeypatch.setattr(machine, "gpus", lambda: ["0"])
    assert [whole.two_ranks(gpus).found, whole.killed_rank(gpus).found] == ["1 GPU"] * 2
    assert not heard
    monkeypatch.setattr(machine, "cores", lambda: 2)
    plain = [("together", "single", 1), *(("together", name, 2) for name in ("ddp", "fsdp", "pipeline"))]
    assert whole.two_ranks(site).state == "ok"
    assert heard == plain
    heard.clear()
    monkeypatch.setattr(machine, "gpus", lambda: list("01234"))
    assert "ddp on 4 GPUs 1.50 times as fast" in whole.two_ranks(gpus).found
    assert heard == [*plain, ("together", "dp", 1), ("together", "ddp", 4)]


@pytest.mark.parametrize(
    ("fsdp", "state", "words"),
    [
        (ONE | {"apart": 0.01}, "wrong", "too far: fsdp"),
        (ONE | {"loss_apart": 0.01}, "wrong", "too far: fsdp"),
        (ONE | {"apart": float("nan")}, "wrong", "too far: fsdp"),
        (ONE | {"loss_apart": float("nan")}, "wrong", "too far: fsdp"),
        (RuntimeError("NCCL error"), "missing", "fsdp: NCCL error"),
        (TimeoutError("no answer within 180 s"), "missing", "fsdp: no answer"),
        (ONE, "ok", "ddp 1.50 times as fast, 1.0e-06 and 0.0e+00 apart; fsdp 1.00 times"),
    ],
)
def test_ranks_that_learn_something_else_or_fail_are_named(site, monkeypatch, fsdp, state, words):
    asked(monkeypatch, {"single": ONE, "fsdp": fsdp})
    monkeypatch.setattr(machine, "cores", lambda: 2)
    found = whole.two_ranks(site)
    assert (found.state, found.stops) == (state, False)
    assert words in found.found
    assert json.dumps(found.numbers)
    asked(monkeypatch, {"single": ONE | {"images_per_s": 150.0}, "fsdp": ONE})
    assert whole.two_ranks(site).state == "weak"


def test_the_words_of_a_lost_rank_are_known():
    said = "RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1234"
    assert whole.noticed(0.2, said).state == "ok"
    assert whole.noticed(0.2, "RuntimeError: something broke").state == "wrong"
    assert whole.noticed(60.0, "").state == "weak"


@pytest.mark.slow
def test_here_two_ranks_are_one_and_one_that_is_killed_is_missed(tmp_path):
    """Really two processes each."""
    for check in (whole.two_ranks, whole.killed_rank):
        found = check(Site(tmp_path, "cpu"))
        assert found.state in ("ok", "weak"), found


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_here_the_search_survives_what_goes_wrong(tmp_path):
    whole.searched.cache_clear()
    found = whole.search(Site(tmp_path, "cpu"))
    assert found.state == "ok", found
