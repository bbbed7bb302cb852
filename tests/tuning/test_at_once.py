"""Both sides of a pair at the same time: which device of the machine a run gets, and what a kill leaves."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.command.test_run import processes_of, wait_until
from tests.comparisons import made, told
from tests.helpers import point
from tunediff import compare, search, search_space
from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.core import machine, trial_record
from tunediff.core.journal import Journal
from tunediff.report import reading
from tunediff.tuning import at_once, confirming, experiment

PAIR = """
import os, pathlib, sys, time
seed, value = sys.argv[1:]
here = pathlib.Path("../here")  # beside the working folder, in which runs at a time may share nothing
here.mkdir(exist_ok=True)
(here / f"{seed}-{value}").touch()
while len(list(here.glob(f"{seed}-*"))) < 2:  # until the other side of the pair runs
    time.sleep(0.01)
print("core", *os.sched_getaffinity(0), os.environ["OMP_NUM_THREADS"])
print("loss:", float(value) + int(seed) % 7 / 100)
if os.path.exists("waits"):
    time.sleep(3600)
"""
WORDS = ("lr=1", "lr=2", "--objective", "loss", "--outcome", "final", "--no-check", "--quiet", "--parallel")
TWO_CORES = pytest.mark.skipif(machine.cores() < 2, reason="two runs at a time need two cores")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program whose runs end only beside each other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TUNEDIFF_CPUS", "2")
    Path("train.py").write_text(PAIR)
    return ["--run", f"{sys.executable} train.py {{seed}} {{lr}}"]


@TWO_CORES
def test_both_sides_run_at_the_same_time_on_cores_that_they_swap(program, capsys):
    assert compare.main([*program, *WORDS, "--name", "x", "--json"]) == 11
    result = json.loads(capsys.readouterr().out)
    assert (result["verdict"], result["rule"]["rounds"], result["rule"]["at_once"]) == ("worse", 3, 2)
    said = [Path(f"ray_results/x/trials/t{i:04d}/output.log").read_text().split()[:3] for i in range(6)]
    assert "2 runs were at the same time." in result["summary"]
    first, second = sorted(os.sched_getaffinity(0))[:2]
    cores = [first, second, second, first, first, second]
    assert said == [["core", str(core), "1"] for core in cores]


@TWO_CORES
def test_a_pair_that_was_killed_begins_again_as_a_pair(program, capsys):
    """One that goes on alone would have no neighbour."""
    Path("waits").touch()
    command = [sys.executable, "-m", "tunediff.compare", *program, *WORDS, "--name", "x"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        trials = [Path(f"ray_results/x/trials/t000{i}") for i in range(2)]
        logs = [trial / "output.log" for trial in trials]
        wait_until(lambda: all(log.is_file() and "loss" in log.read_text() for log in logs))
        process.send_signal(signal.SIGTERM)  # who starts us in the background lets SIGINT be ignored
        assert "resume: tunediff compare --resume x" in process.stderr.read()
    assert process.returncode == 130
    wait_until(lambda: not processes_of("train.py"))
    assert not any(trial_record.read_trial(trial).finished for trial in trials)

    # the one side had ended, the other had not
    end = {"event": "end", "status": "ok", "reason": "", "time": 1.0, "seconds": {"train": 1.0}}
    with open(trials[0] / "journal.jsonl", "a") as journal:
        journal.write(json.dumps(end) + "\n")
    Path("waits").unlink()
    assert compare.main(["--resume", "x"]) == 11
    assert all("runs at the same time were interrupted" in (trial / "journal.jsonl").read_text() for trial in trials)
    assert not capsys.readouterr().err


@pytest.fixture
def searched(program):
    """A search of the program whose two trials have ended: lr=1 is ahead of the baseline."""
    content = {
        "command": program[1],
        "objective": {"name": "loss", "mode": "min"},
        "outcome": "final",
        "budget": {"per_trial": "20s", "trials": 2},
        "baseline": {"lr": 2},
        "search": {"lr": [2, 1]},
        "first": [{"lr": 1}],
        "noise": 1,
        "confirm": {"of": 1, "seeds": 4, "parallel": True},
    }
    Path("s.yaml").write_text(yaml.safe_dump(content))
    content = search_space.read(Path("s.yaml"))
    space = search_space.parse(content, "s.yaml", Path().absolute())
    folder = Path("ray_results/s").absolute()
    space = experiment.create(folder, space, content)
    for number, drawn in enumerate(space.candidates):
        journal = Journal(folder / "trials" / f"t{number:04d}")
        journal.start(*cfg.identity(space.config(drawn)), drawn, 20.0, number)
        journal.write("worker", device="cpu", threads=2)
        journal.point(point(1, 20.0, loss=float(drawn["lr"])))
        journal.end(trial_record.End("ok"))
    return folder


@pytest.mark.nightly  # two searches; the waves are those of test_rounds.py
@TWO_CORES
def test_finalists_are_confirmed_at_the_same_time_and_again_together_after_an_interruption(searched, capsys):
    Path("waits").touch()
    command = [sys.executable, "-m", "tunediff.search", "--resume", "s"]
    trials = [searched / "confirm" / "trials" / f"t{number:04d}" for number in range(6)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        logs = [trial / "output.log" for trial in trials[:2]]
        wait_until(lambda: all(log.is_file() and "loss" in log.read_text() for log in logs))
        process.send_signal(signal.SIGTERM)
        assert "resume: tunediff search --resume s" in process.stderr.read()
    assert process.returncode == 130
    wait_until(lambda: not processes_of("train.py"))

    Journal(trials[0]).end(trial_record.End("ok"))  # the baseline had ended, the finalist had not
    Path("waits").unlink()
    capsys.readouterr()
    assert search.main(["--resume", "s", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["verdict"], result["best"], result["confirmations"][0]["rule"]["at_once"]) == ("better", "lr=1", 2)
    restarted = ["runs at the same time were interrupted" in (one / "journal.jsonl").read_text() for one in trials]
    assert restarted == [True, True, False, False, False, False]
    first, second = sorted(os.sched_getaffinity(0))[:2]
    cores = [(trial / "output.log").read_text().split()[-5:-2] for trial in trials]
    assert cores == [["core", str(core), "1"] for core in (first, second, second, first, first, second)]
    assert "2 runs were at the same time." in reading.of_folder(searched).summary


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--parallel", "--confirm", "0"], "--parallel: True is not allowed; allowed: with confirm:"),
        (["--parallel", "--address", "localhost:1"], "--address"),
    ],
)
def test_bad_ways_to_ask_for_it_are_refused(program, capsys, words, named):
    assert search.main(["digits", "--dry-run", *words]) == 2
    assert named in capsys.readouterr().err


def test_gpus_of_a_machine_confirm_at_the_same_time_unless_the_file_says_no():
    """Cores only where it is asked for, and runs of several workers never."""
    file = {"workload": "digits", "budget": {"per_trial": "20s", "trials": 4}, "search": {"optimizer.lr": [1e-4, 1e-3]}}
    for gpus, confirm, workers, is_here, expected in (
        (4, {}, 1, True, 4),
        (4, {"parallel": False}, 1, True, 1),
        (0, {}, 1, True, 1),
        (0, {"parallel": True}, 1, True, 2),
        (4, {"parallel": True}, 2, True, 1),
        (4, {"parallel": True}, 1, False, 1),
    ):
        space = search_space.parse(file | {"confirm": confirm}, "s.yaml")
        find = functools.partial(at_once.equal_devices, 2, range(2), 1, list("0123")[:gpus], [])
        assert confirming.runs_at_once(space, workers, is_here, find) == expected


def test_a_failure_ends_it_though_the_other_side_has_no_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = made({"A": [2.0, 2.1], "B": [1.0]}, statuses=[(("A", 2), "oom")], devices=2)
    before = (folder / "trials/t0002/journal.jsonl").read_text()
    assert told(capsys)[0] == 12
    assert (folder / "trials/t0002/journal.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("threads", "cores", "count"), [(1, 2, 2), (1, 9, 8), (4, 9, 2), (None, 16, 2), (2, 3, 0), (None, 1, 0)]
)
def test_shares_are_as_many_as_the_threads_of_a_run_allow(threads, cores, count):
    if not count:
        with pytest.raises(ConfigError, match="--parallel: there are no two equal devices"):
            at_once.equal_devices(cores, range(cores), threads, [], [])
        return
    run_devices = at_once.equal_devices(cores, range(cores), threads, [], [])
    assert [device.threads for device in run_devices] == [threads or cores // 2] * count
    used = [core for device in run_devices for core in device.cores]
    assert len(used) == len(set(used)) == count * run_devices[0].threads


def test_a_gpu_of_the_most_frequent_model_is_a_share():
    run_devices = at_once.equal_devices(16, range(16), None, list("01234"), ["H200", "A100", "H200", "H200", "H200"])
    assert [device.variables["CUDA_VISIBLE_DEVICES"] for device in run_devices] == ["0", "2", "3", "4"]
    assert {device.threads for device in run_devices} == {4}
