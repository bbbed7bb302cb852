"""Rounds of configurations without a cluster: who runs when, and when it ends."""

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
from tests.tuning.asked import AskedBackend, pool
from tunediff import compare, search, search_space
from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.core import machine, trial_record
from tunediff.core.errors import Failure
from tunediff.core.journal import Journal, repeat_lost
from tunediff.core.listeners import Listener, Listeners
from tunediff.core.trial_record import End
from tunediff.report import reading, sentences
from tunediff.search_space import SearchBudget
from tunediff.tuning import at_once, confirming, experiment, rounds
from tunediff.tuning.trial_spec import TrialSpec


@pytest.fixture
def run(tmp_path):
    """Run rounds of so many configurations; (trials in the order in which they ran, what the listener heard)."""

    def run(rivals=2, most=3, ends=None, over=lambda: False, loses=()):
        ran, heard = [], []

        def events_of(spec):
            name, begun = spec.name, trial_record.read_begun(spec.folder)
            assert (spec.slot, spec.group.place.nodes) == (0, ("id0",))
            ran.append((name, begun.seed, begun.drawn["side"]))
            if (end := (ends or {}).get(name, End("ok"))) is OSError:
                raise OSError("no space left")
            journal, measured = Journal(spec.folder), point(1, frechet=2.0)
            journal.point(measured)
            yield measured
            if name in loses and [one for one, *_ in ran].count(name) == 1:
                yield Failure("its node died")
            journal.end(end)
            yield end

        config = cfg.override(cfg.baseline("digits"), {"seed": 1000})
        configs = [cfg.override(config, {"loader.batch_size": 32 * 2**place}) for place in range(rivals)]
        candidates = [(one, {"side": "ABC"[place]}) for place, one in enumerate(configs)]
        make = functools.partial(TrialSpec.of, tmp_path, budget=SearchBudget(20.0, 9), metric="frechet", mode="min")

        class Recorder(Listener):
            def start(self, trial, content):
                heard.append(("start", trial, content["seed"]))

            def point(self, trial, content):
                heard.append(("point", trial, 0))

            def end(self, trial, content):
                heard.append(("end", trial, content["seed"]))

        hub = Listeners()
        with hub.with_listeners(Recorder()):
            rounds.run(tmp_path, rounds.Rounds(candidates, most, make, over), AskedBackend(pool(), events_of), hub)
        return ran, heard

    return run


def test_every_other_round_runs_backwards_and_each_has_its_seed(run):
    ran, heard = run(rivals=3, most=2)
    assert ran == [
        ("t0000", 1000, "A"), ("t0001", 1000, "B"), ("t0002", 1000, "C"),
        ("t0005", 1001, "C"), ("t0004", 1001, "B"), ("t0003", 1001, "A"),
    ]  # fmt: skip
    assert heard[:3] == [("start", "t0000", 1000), ("point", "t0000", 0), ("end", "t0000", 1000)]


@pytest.fixture
def waves(tmp_path):
    """Run rounds of so many configurations on so many devices; returns {name: device} of each wave."""

    def waves(rivals, at_once, most, fails=(), breaks_after=None):
        config = cfg.override(cfg.baseline("digits"), {"seed": 1000})
        candidates = [(config, {"side": str(place)}) for place in range(rivals)]
        make = functools.partial(TrialSpec.of, tmp_path, budget=SearchBudget(20.0, 9), metric="frechet", mode="min")
        proposer = rounds.Rounds(candidates, most, make, lambda: False, at_once)
        found = []
        while wave := list(iter(proposer.ask, None)):
            found.append({spec.name: spec.run_device for spec in wave})
            for spec in wave:
                if breaks_after is not None and spec.name > breaks_after:
                    return found  # the others run
                Journal(spec.folder).end(End("oom" if spec.name in fails else "ok"))
                proposer.tell(spec, trial_record.read_trial(spec.folder))
        return found

    return waves


def test_pairs_on_several_devices_swap_from_wave_to_wave(waves):
    """Eight devices have four pairs at a time, of which neither side has all even devices; in the next wave each side
    has the other's device."""
    first, second = waves(2, 8, 8)
    assert [first[f"t{number:04d}"] for number in range(8)] == [0, 1, 3, 2, 4, 5, 7, 6]
    assert [second[f"t{number:04d}"] for number in range(8, 16)] == [1, 0, 2, 3, 5, 4, 6, 7]


@pytest.mark.parametrize(("rivals", "at_once"), [(2, 2), (3, 3), (3, 2), (4, 2), (3, 8), (5, 4), (4, 4)])
def test_every_device_is_used_and_every_configuration_has_each_as_often(waves, rivals, at_once):
    most, groups = 12, max(1, at_once // rivals)
    found = waves(rivals, at_once, most)
    used = {}
    for wave in found:
        assert len(set(wave.values())) == len(wave), "a device has one run at a time"
        assert len(wave) == (at_once if at_once < rivals else groups * rivals), "every run has neighbours"
        for name, device in wave.items():
            number, candidate = divmod(int(name[1:]), rivals)
            group = number % groups
            assert at_once < rivals or device // rivals == group, "a round stays on the devices of its group"
            used.setdefault((candidate, group), []).append(device)
    for (_, group), devices in used.items():
        allowed = range(at_once) if at_once < rivals else range(group * rivals, (group + 1) * rivals)
        counts = [devices.count(device) for device in allowed]
        assert max(counts) - min(counts) <= 1


def test_neighbours_change_where_a_round_has_more_runs_than_devices(waves):
    """With two devices each of baseline and finalists is beside each other one as often, and none has no neighbour."""
    found = [sorted(int(name[1:]) % 3 for name in wave) for wave in waves(3, 2, 12)]
    assert [found.count(list(pair)) for pair in ((0, 1), (0, 2), (1, 2))] == [6, 6, 6]


def test_runs_that_are_left_close_ranks_where_a_round_has_too_few_devices(waves):
    found = [list(wave) for wave in waves(3, 2, 4, fails=["t0001"])]
    assert found == [["t0000", "t0001"], ["t0002"], ["t0003", "t0005"], ["t0008", "t0006"], ["t0011", "t0009"]]


def test_a_wave_that_was_interrupted_begins_again_as_a_wave(waves, tmp_path):
    assert waves(3, 2, 2, breaks_after="t0002") == [{"t0000": 0, "t0001": 1}, {"t0002": 0, "t0003": 1}]
    assert waves(3, 2, 2) == [{"t0002": 0, "t0003": 1}, {"t0004": 0, "t0005": 1}]
    events = {one.name: [event["event"] for event in trial_record.events(tmp_path / "trials" / one.name)]
              for one in trial_record.read_trials(tmp_path)}  # fmt: skip
    assert events["t0002"] == ["start", "end", "restarted", "start", "end"]
    assert events["t0003"] == ["start", "restarted", "start", "end"], "it had begun with its neighbour"
    assert "restarted" not in events["t0000"] + events["t0001"]


def test_journals_say_what_ran(run, tmp_path):
    run(most=2)
    known = {one.name: one for one in trial_record.read_trials(tmp_path)}
    assert [known[name].number for name in sorted(known)] == [0, 1, 2, 3]
    assert (known["t0003"].drawn, known["t0003"].config["seed"]) == ({"side": "B", "seed": 1001}, 1001)


def test_what_is_finished_does_not_run_again(run):
    run(most=1)
    ran, heard = run(most=2)
    assert [name for name, *_ in ran] == ["t0003", "t0002"]
    assert not any(name in ("t0000", "t0001") for _, name, _ in heard)


def test_a_rival_that_fails_is_out_and_stays_out(run):
    ran, _ = run(rivals=3, most=3, ends={"t0001": End("oom", "too large")})
    assert [name for name, *_ in ran] == ["t0000", "t0001", "t0002", "t0005", "t0003", "t0006", "t0008"]
    assert run(rivals=3, most=4)[0] == [("t0011", 1003, "C"), ("t0009", 1003, "A")]  # it failed before the kill


def test_run_whose_workers_died_runs_again_on_resume(run, tmp_path):
    died = End("error", "the workers died 2 times: killed", process_died=True)
    assert [name for name, *_ in run(rivals=3, most=2, ends={"t0001": died})[0]] == [
        "t0000",
        "t0001",
        "t0002",
        "t0005",
        "t0003",
    ]
    repeat_lost(tmp_path)
    ran, _ = run(rivals=3, most=2, loses=["t0001"])  # and loses its node then
    assert [name for name, *_ in ran] == ["t0001", "t0001", "t0004"]
    again = trial_record.read_trial(tmp_path / "trials" / "t0001")
    assert (again.status, sentences.of_trial(again)) == ("ok", f"started from the beginning: {died.reason}")


@pytest.mark.parametrize(
    ("rivals", "failing", "names"),
    [
        (3, "t0000", ["t0000"]),  # nothing to compare with
        (2, "t0001", ["t0000", "t0001"]),  # nobody to compare
        (2, "t0002", ["t0000", "t0001", "t0003", "t0002"]),
        (2, "t0003", ["t0000", "t0001", "t0003"]),
    ],
)
def test_no_run_starts_after_the_baseline_or_the_last_rival_has_failed(run, rivals, failing, names):
    assert [name for name, *_ in run(rivals=rivals, ends={failing: End("nan")})[0]] == names


def test_it_is_asked_before_every_round(run):
    answers = [False, False, True]
    assert len(run(most=9, over=lambda: answers.pop(0))[0]) == 4
    assert answers == []
    assert run(most=9, over=lambda: True)[0] == []


def test_a_run_whose_node_was_lost_runs_again(run, tmp_path, monkeypatch):
    ran, heard = run(most=1, loses={"t0001"})
    assert [event for event, name, _ in heard if name == "t0001"] == ["start", "point", "point", "end"]
    assert [name for name, *_ in ran] == ["t0000", "t0001", "t0001"]
    assert [one.status for one in trial_record.read_trials(tmp_path)] == ["ok", "ok"]


# ---------------- both sides of a pair at the same time: which device of the machine a run gets, and what a kill leaves
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
def program(monkeypatch, at_tmp_path):
    """A program whose runs end only beside each other."""
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


@pytest.mark.nightly  # two searches; their waves are tested above
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


def test_a_failure_ends_it_though_the_other_side_has_no_result(capsys, at_tmp_path):
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
