"""Real faults, one search each: it goes on or resumes, nothing measured is lost, and no process is left behind.

Minutes each, so they run when asked for: `pytest -m "cluster and nightly" tests/tuning/test_faults.py`. With
TUNEDIFF_FAULTS=FILE the table of what happened is written there.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.tuning.conftest import WAIT_S, all_gone, of_search, ray_process, worker_pid
from tests.tuning.test_search import TRIALS, has

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

TABLE = []


@pytest.fixture(scope="module", autouse=True)
def table():
    """The table of all faults, in the order of the tests."""
    yield
    if target := os.environ.get("TUNEDIFF_FAULTS"):
        head = ["| fault | injected by | what happened | lost | left behind |", "|---|---|---|---|---|"]
        Path(target).write_text("\n".join(head + [f"| {' | '.join(row)} |" for row in TABLE]) + "\n")


def settle(one, process, fault, how, statuses, before=None, resumed=True):
    """Wait for the end; resume a search that had to stop (`resumed`), and check that all trials ended as expected and
    that nothing was lost or left."""
    family = one.family | set(of_search(process))
    code = process.wait()
    left = all_gone(family)
    assert left == [], left
    happened = f"exit {code}"
    assert bool(code) == resumed, one.log
    if code:
        measured = one.journals
        assert one.run("--resume", one.name) == 0
        assert all(one.journals[name].startswith(text) or before for name, text in measured.items())
        happened += ", resumed"
    names = [f"t{i:04d}" for i in range(len(statuses))]
    assert [one.trial(name).status for name in names] == statuses, one.log
    assert not [t for t in one.study if t.state.name == "RUNNING"]
    points = {name: [e["index"] for e in one.events(name, "point")] for name in names}
    twice = {name: found for name, found in points.items() if len(found) != len(set(found))}
    assert before or twice == {}
    finished = ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses))
    TABLE.append([fault, how, f"{happened}; {finished}", "nothing", "nothing"])


def begin(search, name, **changes):
    """A search with everything it started so far in `family`, refreshed by `watch`."""
    one = search(name, **(TRIALS | changes))
    process = one.start(str(one.file), "--name", name)
    one.family = set()
    return one, process


@pytest.mark.parametrize("who", ["ray::TrainController", "ray::Slot", "ray::Driver"])
def test_killed_actors_are_replaced(search, who):
    """kill -9 of the controller of the workers, of the slot, of the trial driver."""
    one, process = begin(search, "actor")
    one.wait_for(has(one, "t0000", 1))
    ray_process(process, who).kill()
    one.wait_for(has(one, "t0001", 1))
    one.family = set(of_search(process))
    settle(one, process, f"{who[5:]} dies", "kill -9", ["ok"] * 4, resumed=False)


SPAWNS = """
import subprocess
from dataclasses import dataclass
import torch
from tunediff import Metric

@dataclass(frozen=True)
class Knobs:
    lr: float = 0.01

OBJECTIVE = Metric("error", "min")
BASELINE = {"loader.batch_size": 16, "loader.workers": 1, "evaluation.points": 2}
X = torch.randn(4096, 4)

def train(trial):
    net = trial.prepare(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(lambda: {"error": 1.0})
    for (batch,) in trial.batches((X,)):
        trial.step(net(batch).square().mean(), optimizer)
        subprocess.run(["sleep", "3600"])
"""


def spawning_run(one, earlier):
    """Wait for a run that has started a process of its own; add its pid to the earlier ones."""

    def found():
        for worker in [event for trial in one.journals for event in one.events(trial, "worker")]:
            with contextlib.suppress(psutil.NoSuchProcess):
                run = psutil.Process(worker["pid"])
                if run.pid not in earlier and any(child.name() == "sleep" for child in run.children()):
                    return run
        return None

    run = one.wait_for(found)
    earlier.append(run.pid)
    return run


def last_to_end(processes):
    """Seconds until all of these processes have ended, and the last."""
    begin, ended = time.monotonic(), []
    left = psutil.wait_procs(processes, WAIT_S, lambda one: ended.append((time.monotonic() - begin, one)))[1]
    assert not [one.cmdline() for one in left if one.is_running()]
    return max(ended, key=lambda one: one[0])


@pytest.mark.parametrize(
    "killed", [["run", "template", "worker", "ray::TrainController", "ray::Slot", "ray::ResourceTrainable", "search"], ["raylet"]],
    ids=lambda killed: killed[-1],
)  # fmt: skip
def test_nothing_survives_its_parent(search, tmp_path, killed):
    """kill -9 of any process of a search, one after the other: what it and its run have started ends."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    one, runs = search("spawns"), []
    trials = [{}, *({"lr": 0.02 + 0.01 * number} for number in range(len(killed)))]
    content = {"workload": str(tmp_path / "spawns.py"), "budget": {"per_trial": "3s"}, "trials": trials}
    one.file.write_text(yaml.safe_dump(content))
    process = one.start(str(one.file), "--name", "spawns", "--no-check")
    for who in killed:
        run = spawning_run(one, runs if who != "search" else [])
        template, worker = run.parent(), ray_process(process, "ray::RayTrainWorker")
        chain = {"run": run, "template": template, "worker": worker, "search": psutil.Process(process.pid)}
        victim = chain.get(who) or ray_process(process, who)
        alone = who in ("run", "template", "ray::ResourceTrainable")
        above = [victim] if alone else [victim if who == "raylet" else worker, template]
        below = {child for one in above for child in (one, *one.children(recursive=True))}
        if who not in (
            "template",
            "raylet",
            "search",
        ):  # a shared one goes on where the next worker comes before it ends
            below -= {template, *template.children(recursive=True)} - {run, *run.children(recursive=True)}
        if who == "search":
            below |= {victim, *of_search(process)}
        names = {child: " ".join(child.cmdline())[:60] for child in below}
        victim.kill()
        if who == "search":
            process.wait()
        last_s, last = last_to_end(below)
        seconds = f"{len(below)} processes gone after {last_s:.1f} s, the last `{names[last]}`"
        print(who, seconds)
        TABLE.append([f"{who} dies", "kill -9", seconds, "nothing", "nothing"])


def test_a_killed_search_resumes(search):
    """kill -9 of the search itself and of the worker, as in a power cut."""
    one, process = begin(search, "killed")
    one.wait_for(has(one, "t0001", 1))
    one.family = set(of_search(process))
    for pid in (worker_pid(one, "t0001"), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    settle(one, process, "search and worker die", "kill -9", ["ok"] * 4)


def loaders_of(one):
    """The loader processes of the first trial: its template's server forks them."""

    def found():
        template = psutil.Process(worker_pid(one, "t0000")).parent()
        return [child for child in template.children(recursive=True) if child.name() == "pt_data_worker"]

    return one.wait_for(found)


def test_a_hung_loader_times_out(search):
    """A loader process stands still, as on a file system that does not answer."""
    one, process = begin(
        search, "stuck", budget={"per_trial": "3s", "deadline": "60s"}, trials=[{}, {"loader.batch_size": 64}],
        fixed={"loader.workers": 1, "loader.resident": False},
    )  # fmt: skip
    one.wait_for(has(one, "t0000", 1))
    loaders, one.family = loaders_of(one), set(of_search(process))

    def finished():
        for loader in loaders:  # again and again: after an evaluation its training lets it go on
            with contextlib.suppress(psutil.NoSuchProcess):
                loader.suspend()
        return one.trial("t0000").finished

    one.wait_for(finished)
    settle(one, process, "a loader process stands still", "SIGSTOP", ["timeout", "ok"], resumed=False)


JUMP = """
import os, time
wall = time.time
time.time = lambda: wall() - (3600 if os.path.exists(os.environ["TUNEDIFF_JUMP"]) else 0)
"""


def test_a_clock_that_jumps_changes_no_training(search, tmp_path, monkeypatch):
    """The wall clock of every process goes back by an hour in the middle of a trial, as after a time correction."""
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text(JUMP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "early"), prepend=os.pathsep)
    monkeypatch.setenv("TUNEDIFF_JUMP", str(tmp_path / "now"))
    one, process = begin(search, "clock")
    one.wait_for(has(one, "t0000", 1))
    (tmp_path / "now").touch()
    one.wait_for(has(one, "t0001", 1))
    assert one.events("t0001", "start")[0]["time"] < one.events("t0000", "start")[0]["time"]
    one.family = set(of_search(process))
    settle(one, process, "clock jumps", "wall clock of all processes − 1 h", ["ok"] * 4, resumed=False)
    assert all(3.0 <= one.trial(f"t000{i}").points[-1]["train_s"] < 1800 for i in range(4))


def test_a_killed_raylet_loses_nothing(search):
    """The search ends and says so, since Ray waits for ever, and resumes."""
    one, process = begin(search, "raylet")
    one.wait_for(has(one, "t0000", 2))
    one.wait_for(has(one, "t0001", 1))
    one.family = set(of_search(process))
    ray_process(process, "raylet").kill()
    settle(one, process, "raylet dies", "kill -9", ["ok"] * 4)
    assert "a process of Ray was killed; everything measured is in" in one.log


def test_a_killed_loader_process_costs_one_attempt(search):
    """The out-of-memory killer takes loader processes first: no fault of the configuration."""
    one, process = begin(search, "loader", fixed={"loader.workers": 1, "loader.resident": False})
    one.wait_for(has(one, "t0000", 1))
    for loader in loaders_of(one):
        loader.kill()
    one.wait_for(lambda: one.trial("t0000").finished)
    assert (one.trial("t0000").status, one.trial("t0000").attempts) == ("ok", 2)
    one.family = set(of_search(process))
    settle(one, process, "loader process dies", "kill -9", ["ok"] * 4, resumed=False)


def test_a_hung_collective_times_out(search):
    """One of two ranks stands still while the other waits for it."""
    one, process = begin(
        search, "collective", budget={"per_trial": "3s", "deadline": "70s"}, fixed={"parallel.workers": 2}, trials=[{}, {"loader.batch_size": 64}]
    )  # fmt: skip
    one.wait_for(has(one, "t0000", 1))
    one.family = set(of_search(process))
    psutil.Process(worker_pid(one, "t0000")).suspend()
    one.wait_for(lambda: one.trial("t0000").finished)
    settle(one, process, "a rank stands still", "SIGSTOP of one of two", ["timeout", "ok"], resumed=False)


def test_one_name_once_and_two_searches_side_by_side(search):
    one, process = begin(search, "first")
    one.wait_for(lambda: one.events("t0000", "worker"))
    refused = subprocess.run(
        [sys.executable, "-m", "tunediff.search", "--resume", "first", "--storage", str(one.storage)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (refused.returncode, "running in another process" in refused.stderr) == (2, True)
    two = search("second", **TRIALS)
    second = two.start(str(two.file), "--name", "second")
    two.family = set()
    settle(two, second, "two searches on one machine", "started together", ["ok"] * 4, resumed=False)
    settle(one, process, "two searches under one name", "--resume of a running one", ["ok"] * 4, resumed=False)


@pytest.fixture
def disk(tmp_path, request):
    """The folder of results on a file system of its own, of 64 MiB or as many as the test asks for."""
    folder = tmp_path / "results"
    folder.mkdir()
    size = f"size={getattr(request, 'param', 64)}m"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    while os.path.ismount(folder):  # a test may have mounted it once more
        subprocess.run(["umount", "-l", folder], check=True)


def stopped(one, process, why):
    """The search ended by itself and said why."""
    assert process.wait(WAIT_S) == 1
    last = one.log.rstrip().splitlines()[-2:]  # below Tune's tracebacks
    assert last[0].startswith("error: "), one.log
    assert f"cannot be written: {why}" in last[0], one.log
    assert last[1].startswith("resume: "), one.log
    assert all_gone(one.family) == []


def test_a_full_disk_ends_it_cleanly(search, disk):
    """A file system of 64 MiB runs full in the second trial; with room again, the search resumes."""
    one, process = begin(search, "full")
    one.wait_for(has(one, "t0001", 1))
    one.family = set(of_search(process))
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    stopped(one, process, "No space left on device")
    (disk / "filler").unlink()
    settle(one, process, "disk full", "a file system of 64 MiB", ["ok"] * 4)


@pytest.mark.parametrize("disk", [512], indirect=True)
def test_disk_that_fits_all_but_a_checkpoint_ends_it_cleanly(search, disk):
    """20 MiB are free, and a checkpoint takes more; a probe of the disk finds room."""
    one, process = begin(search, "checkpoint", fixed={"model.channels": 128})
    one.wait_for(lambda: one.events("t0000", "start"))
    one.family = set(of_search(process))
    with open(disk / "filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(disk).free - 20 * 2**20)
    stopped(one, process, "No space left on device")
    assert not one.trial("t0000").finished
    assert (disk / "filler").stat().st_size > 400 * 2**20
    (disk / "filler").unlink()
    settle(one, process, "disk fits all but a checkpoint", "20 MiB left of 512", ["ok"] * 4, before=True)
    assert max(path.stat().st_size for path in one.folder.glob("trials/*/weights.safetensors")) > 5 * 2**20


LOCKLESS = """
import errno, fcntl, os
flock, lockf = fcntl.flock, fcntl.lockf
def without(lock):
    def refuse(file, *how):
        number = file if isinstance(file, int) else file.fileno()
        if os.readlink(f"/proc/self/fd/{number}").startswith(os.environ["TUNEDIFF_LOCKLESS"]):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return lock(file, *how)
    return refuse
fcntl.flock, fcntl.lockf = without(flock), without(lockf)
"""


def test_file_system_without_locks_works_with_a_warning(search, tmp_path, monkeypatch):
    """As NFS without its lock daemon: Python's locks are refused."""
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text(LOCKLESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "early"), prepend=os.pathsep)
    monkeypatch.setenv("TUNEDIFF_LOCKLESS", str(tmp_path / "results"))
    one, process = begin(search, "lockless")
    one.wait_for(has(one, "t0001", 1))
    one.family = set(of_search(process))
    assert "WARNING: --storage: no file can be locked" in one.log
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(WAIT_S) == 130
    settle(one, process, "file system without locks", "flock and lockf raise ENOLCK", ["ok"] * 4)
    assert "is running in another process" not in one.log
