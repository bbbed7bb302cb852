"""Part C: what each trial of the search must become, and that it is noticed when one becomes something else."""

import json
import subprocess
import sys

import pytest
import yaml

from tests.helpers import point
from tunediff import machine, record, search
from tunediff.doctor import whole
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
    assert "exit code None" in whole.search(site).found


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


def test_energy_and_strategies(site, monkeypatch):
    found = six()
    monkeypatch.setattr(whole, "searched", lambda: (0, found, True, ""))
    assert whole.search(site).state == "ok"
    assert whole.energy(site).found == "0.02 Wh for the baseline"
    assert whole.several(site).state == "skipped"
    monkeypatch.setattr(machine, "gpus", lambda: ["0", "1"])
    found |= {"t0006": trial("t0006"), "t0007": trial("t0007"), "t0008": trial("t0008")}
    assert whole.several(site).found == "ddp 100 images/s, fsdp 100 images/s, pipeline 100 images/s; one GPU 100"
    found["t0007"] = trial("t0007", "error")
    assert whole.several(site).found == "fsdp: why"
    assert whole.several(site).state == "missing"
    found["t0000"] = trial("t0000")
    assert whole.energy(site).state == "missing"


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_here_the_search_survives_what_goes_wrong(tmp_path):
    whole.searched.cache_clear()
    found = whole.search(Site(tmp_path, "cpu"))
    assert found.state == "ok", found
