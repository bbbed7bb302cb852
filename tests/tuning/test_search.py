"""Whole searches, as a user runs them, and the faults they survive."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import yaml

import tunediff.search
from tests.tuning.conftest import all_gone, block, of_search, worker_pid
from tunediff import search_space
from tunediff.core import trial_record as record
from tunediff.ray_backend import connection
from tunediff.tuning import experiment, resources

pytestmark = pytest.mark.cluster

TRIALS = {
    "budget": {"per_trial": "3s"},
    "trials": [{}, {"loader.batch_size": 64}, {"loader.batch_size": 32}, {"loader.batch_size": 16}],
}


def has(search, name, points):
    return lambda: (found := search.trial(name)) is not None and len(found.points) >= points


WAITS = '''
"""Learns numbers, goes wrong in the way it is told to, or waits after the first evaluation of its process."""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from helper import Net
from tunediff import Metric


@dataclass(frozen=True)
class Knobs:
    fault: Literal["none", "nan", "oom", "waits"] = "none"
    lr: float = 1e-6


OBJECTIVE = Metric("error", "min")
BASELINE = {"loader.batch_size": 16, "loader.workers": 0, "evaluation.points": 2}
X = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def train(trial):
    net = trial.prepare(Net())
    optimizer, evaluations = torch.optim.AdamW(net.parameters(), trial.knobs.lr), []
    trial.keep(net=net, optimizer=optimizer)

    @torch.no_grad()
    def judge():
        evaluations.append(float((net(X) - Y).square().mean()))
        return {"error": evaluations[-1]}

    trial.evaluate_with(judge)
    for x, y in trial.batches((X, Y)):
        if trial.knobs.fault == "waits" and evaluations:
            time.sleep(10_000)
        if trial.knobs.fault == "oom":
            torch.empty(2**50)
        loss = (net(x) - y).square().mean()
        trial.step(loss * float("nan") if trial.knobs.fault == "nan" else loss, optimizer)
'''
HELPER = """
import torch


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
"""
RESUME = """
import signal, sys, ray, tunediff
numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
handlers = [signal.getsignal(number) for number in numbers]
tunediff.open_search("faults", "results").resume()
assert handlers == [signal.getsignal(number) for number in numbers]
assert not ray.is_initialized()
"""


@pytest.mark.usefixtures("another_cluster_was_here")
def test_faults_become_statuses_kills_lose_nothing_and_finalists_run_again(search, tmp_path, capfd):
    """Of a user's file: out of memory, not finite; kill -9 of a worker and of the search; then a call from Python
    resumes it. What is killed waits for that."""
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "helper.py").write_text(HELPER)
    one = search("faults")
    trials = [{}, {"lr": 0.01}, *({"fault": fault} for fault in ("oom", "nan", "waits"))]
    trials.append({"fault": "waits", "loader.batch_size": 32})
    confirm = {"of": 1, "seeds": 2}
    content = {"workload": "waits.py", "budget": {"per_trial": "0.3s"}, "trials": trials, "confirm": confirm}
    one.file.write_text(yaml.safe_dump(content))
    process = one.start(str(one.file), "--name", "faults")

    # What is edited or deleted meanwhile does not matter.
    one.wait_for(lambda: one.trial("t0000") is not None)
    (tmp_path / "waits.py").unlink()
    (tmp_path / "helper.py").write_text("raise ImportError")

    # A worker dies after its first point: a fresh group goes on from the checkpoint.
    one.wait_for(has(one, "t0004", 1))
    assert [one.trial(f"t000{i}").status for i in (2, 3)] == ["oom", "nan"], one.log
    assert "finite" in one.trial("t0003").reason
    os.kill(worker_pid(one, "t0004"), signal.SIGKILL)
    one.wait_for(lambda: one.trial("t0004").finished)
    killed = one.trial("t0004")
    assert (killed.status, len(killed.points), killed.attempts) == ("ok", 2, 2)
    assert len(one.events("t0004", "point")) == 2  # the first point was not measured again

    # The search dies while its worker waits. (Not both: Ray's controller, busy with a lost worker, may miss the other.)
    one.wait_for(has(one, "t0005", 1))
    family = of_search(process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert all_gone(family) == []
    before = one.journals

    # Resume measures what is left and leaves the process as it was; again, it does nothing twice.
    script = [sys.executable, "-c", RESUME]
    subprocess.run(script, cwd=tmp_path, check=True)
    after = one.journals
    assert all(after[name] == before[name] for name in before if name != "t0005")
    assert after["t0005"].startswith(before["t0005"])
    assert (one.trial("t0005").status, len(one.events("t0005", "point"))) == ("ok", 2)
    assert tunediff.search.main(["--resume", "faults", "--storage", str(one.storage)]) == 0
    assert one.journals == after

    # The finalist ran beside the baseline on new seeds.
    confirming = record.read_trials(one.folder / "confirm")
    assert [(run.status, run.drawn["seed"]) for run in confirming] == [("ok", 1000 + i // 2) for i in range(4)]

    # Optuna knows each as what it is: failures are bad, not unknown, and nothing stays RUNNING.
    study = one.study
    assert [t.state.name for t in study] == ["COMPLETE"] * 6
    assert [t.user_attrs["status"] for t in study] == ["ok", "ok", "oom", "nan", "ok", "ok"]
    ended = (0, 1, 4, 5)
    assert [study[i].value for i in ended] == [one.trial(f"t000{i}").points[-1]["error"] for i in ended]
    assert min(study[2].value, study[3].value) > study[0].value, "worse than all that was known then"

    # What a user reads and browses.
    summary = block(capfd.readouterr().out)
    assert (summary["trials"], summary["ok"], summary["oom"], summary["nan"]) == ("6", "4", "1", "1")
    assert (one.folder / "confirm" / "comparison.csv").read_text().splitlines()[2].startswith("lr=0.01,")
    assert not list(one.folder.glob("trials/*/checkpoint.pt"))
    assert list(one.folder.glob("tune/*/t0005*"))  # Tune's others may be lost with what was killed


@pytest.fixture
def another_cluster_was_here(monkeypatch):
    """`ray start` leaves its address in a file, and a kill leaves the file; this search has nothing to do with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Ray's sockets want a short path
        monkeypatch.setenv("RAY_TMPDIR", folder)
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        yield


@pytest.mark.nightly  # waits for a deadline
def test_a_hanging_worker_times_out_and_ctrl_c_prints_how_to_resume(search):
    one = search("hang", **(TRIALS | {"budget": {"per_trial": "4s", "deadline": "90s"}}))
    one.start(str(one.file), "--name", "hang")
    one.wait_for(has(one, "t0000", 2))
    one.wait_for(lambda: one.events("t0001", "worker"))
    psutil.Process(worker_pid(one, "t0001")).suspend()
    one.wait_for(lambda: one.trial("t0001").finished)
    assert (one.trial("t0001").status, "90 s" in one.trial("t0001").reason) == ("timeout", True)

    # The next trial gets a fresh group; Ctrl-C while it trains.
    one.wait_for(has(one, "t0002", 1))
    one.interrupt()
    assert not one.trial("t0002").finished
    one.run("--resume", "hang")
    assert [one.trial(f"t000{i}").status for i in range(4)] == ["ok", "timeout", "ok", "ok"]
    assert [t.user_attrs["status"] for t in one.study] == ["ok", "timeout", "ok", "ok"]


@pytest.mark.nightly
def test_two_workers_and_early_stopping(search):
    """World size as a knob changes the group; ASHA stops bad trials, which are recorded as pruned."""
    one = search(
        "asha",
        objective="samples_per_s",
        budget={"per_trial": "2s", "trials": 4},
        early_stopping="asha",
        seed=3,
        search={"parallel.workers": [1, 2], "loader.batch_size": [4, 128]},
        first=[{"loader.batch_size": 4}, {"parallel.workers": 2}],
    )
    one.run()
    trials = [one.trial(f"t000{i}") for i in range(4)]
    # The second has a fraction of the speed, beyond any noise, and is stopped at half of the budget; others may be.
    assert [t.status for t in trials[:2]] == ["ok", "pruned"], one.log
    assert [len(t.points) for t in trials[:2]] == [2, 1]
    assert all(t.status in ("ok", "pruned") for t in trials), one.log
    assert [t.environment["threads"] for t in trials[1:3]] == [os.cpu_count(), max(1, round(os.cpu_count() / 2))]
    states = {"ok": "COMPLETE", "pruned": "PRUNED"}
    drawn = [t.state.name for t in one.study if "trial" in t.user_attrs]  # and not drawn twice
    assert drawn == [states[t.status] for t in trials]
    assert block(one.log)["pruned"] == str(sum(t.status == "pruned" for t in trials))


def test_sigterm_interrupts_although_ray_has_a_handler_of_its_own(tmp_path, monkeypatch):
    content = {"workload": "digits", **TRIALS}
    loaded = search_space.parse(content, "x.yaml")
    experiment.create(tmp_path / "night", loaded, content)

    @contextlib.contextmanager
    def cluster(address):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # as ray.init does
        yield None

    monkeypatch.setattr(connection, "cluster", cluster)
    share = functools.partial(resources.share, loaded)
    ends = lambda _: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), connection.workers(tmp_path / "night", share, None, ends):
        pass
    assert signal.getsignal(signal.SIGTERM) == before
