"""Trials on this machine without Ray."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.tuning.test_search import HELPER, WAITS
from tests.tuning.test_worker import CONFIG, job_of
from tunediff import compare
from tunediff import config as cfg
from tunediff.core import trial_record as record
from tunediff.tuning import local
from tunediff.tuning.resources import Machine, ResourcePartition


@pytest.fixture(scope="module")
def slots(tmp_path_factory):
    share = ResourcePartition((Machine(2, 0),), (1, 2), False, True)
    with local.opened(tmp_path_factory.mktemp("runs"), share, []) as made:
        yield made
        job = placed(made, job_of(tmp_path_factory.mktemp("left")))
        slot = made.slot(job)
        serial = slot.start(job)
        while slot.event(serial, 0) is None:  # its first point, after which it waits
            pass
        (process,) = (psutil.Process(one["pid"]) for one in record.events(job.folder) if one["event"] == "worker")
    assert not psutil.wait_procs([process], timeout=600)[1], "what runs ends with the backend"


def placed(slots, job):
    """The job on the slot, as the loop places it."""
    job = dataclasses.replace(job, metric="samples_per_s", deadline_s=3600.0)  # nothing is judged here
    allocation = slots.devices.take(job.group.size)
    slots.devices.give(allocation.slot)
    return job.on(allocation)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_trial_runs_to_its_end_in_processes_of_its_own(slots, tmp_path, ranks):
    job = placed(slots, job_of(tmp_path / "t0", cfg.override(CONFIG, {"parallel.workers": ranks})))
    reported = list(slots.run(job))
    found = record.read_trial(job.folder)
    assert (found.status, len(reported), len(found.points)) == ("ok", 2, 2)
    assert found.points[-1].device_s == pytest.approx(ranks * found.points[-1].train_s)


def test_a_run_that_is_killed_begins_again_from_its_checkpoint(slots, tmp_path):
    job = placed(slots, job_of(tmp_path / "t0"))
    points = slots.run(job)
    next(points)
    psutil.Process(next(e["pid"] for e in record.events(job.folder) if e["event"] == "worker")).kill()
    list(points)
    found = record.read_trial(job.folder)
    assert (found.status, [point.index for point in found.points]) == ("ok", [1, 2])
    assert found.attempts == 2


WITHOUT_RAY = {
    "training": """
from tunediff import train
sizes = ["data.max_images=64", "model.channels=8", "evaluation.images=16", "evaluation.points=1", "evaluation.steps=2"]
assert train.main(["--config", "digits", *sizes, "--samples", "64", "--out", "run"]) == 0
""",
    "imports, ask and tell": """
from tunediff.api import run, train_run
from tunediff.tuning import confirming, foreground, local, worker
from pathlib import Path
import tunediff
Path("s.yaml").write_text("{workload: digits, budget: {per_trial: 8s, trials: 3}, early_stopping: asha, noise: 1, search: {loader.batch_size: [64, 128]}}")
with tunediff.open_study("s.yaml") as study:
    stops = []
    for loss in (1.0, 30.0):
        trial = study.ask()
        stops.append(trial.report(loss, time_s=4.0))
        study.tell(trial, loss)
assert stops == [False, True], stops
""",
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.nightly] * (what == "training")) for what in WITHOUT_RAY]
)
def test_works_without_ray(what, tmp_path):
    """Ray cannot be imported there."""
    code = f"import sys; sys.modules['ray'] = None\n{WITHOUT_RAY[what]}"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# ------------------------------- what comes after a search: its finalists on new seeds, and two configurations compared
@pytest.mark.training
def test_two_configurations_are_compared(capsys, at_tmp_path):
    """Three pairs of runs of a user's file, in processes of their own, and again from what they left."""
    Path("waits.py").write_text(WAITS)
    Path("helper.py").write_text(HELPER)
    words = ["waits.py", "lr=0.01", "--budget", "0.2s", "--pairs", "3", "--name", "two", "--no-check", "--json"]
    code, told = compare.main(words), json.loads(capsys.readouterr().out)
    assert code == {"better": 0, "no_difference": 10, "worse": 11}[told["verdict"]]
    assert (told["rule"]["rounds"], told["runs"]) == (3, 6)
    low, ratio, high = (told["candidates"][1]["effect"][key] for key in ("low", "value", "high"))
    assert low < ratio < high
    assert compare.main(["--resume", "two", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["candidates"][1]["effect"]["value"] == ratio
