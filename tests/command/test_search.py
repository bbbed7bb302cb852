"""Search files of commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import searches
from tests.command.test_comparison import NOISY
from tests.command.test_run import processes_of, wait_until
from tunediff import analysis, search, search_space
from tunediff import config as cfg
from tunediff.api import search_setup
from tunediff.api.options import SearchOptions
from tunediff.command import trial
from tunediff.config import ConfigError
from tunediff.core import trial_record
from tunediff.report import __main__ as report
from tunediff.tuning import experiment, resources
from tunediff.tuning.evaluated import needs_at_least

FILE = {
    "command": f"{sys.executable} train.py --lr {{lr}} --seed {{seed}} {{overrides}}",
    "objective": {"name": "loss", "mode": "min", "reduce": "mean:3"},
    "outcome": "final",
    "budget": {"per_trial": "10s", "trials": 4},
    "baseline": {"lr": 1, "model.width": 64},
    "search": {"lr": {"low": 0.1, "high": 10.0, "log": True}, "model": {"width": [32, 64, 128]}},
}


def parsed(folder, content):
    path = folder / "search.yaml"
    path.write_text(yaml.safe_dump(content))
    return search_space.parse(search_space.read(path), str(path), folder)


def test_a_command_is_searched_by_its_parameters(tmp_path):
    space = parsed(tmp_path, FILE)
    assert {dimension.name for dimension in space.dimensions} == {"lr", "model.width"}
    assert (space.metric, space.mode) == ("loss", "min")
    assert cfg.flat(space.baseline) | {"workload": ""} == {"workload": "", "lr": 1.0, "model.width": 64, "seed": 0}
    definition = space.workload.definition
    assert (definition.reduce, definition.outcome) == ("mean:3", "final")


def test_a_lack_of_memory_rules_out_the_same_parameters_alone(tmp_path):
    """Nobody knows which parameter of a command is its batch size."""
    config = cfg.flat(parsed(tmp_path, FILE).baseline)
    assert needs_at_least(config | {"seed": 5}, config)
    assert not needs_at_least(config | {"model.width": 128}, config)


def test_gpus_of_a_command_are_devices_of_its_trials(tmp_path):
    space = parsed(tmp_path, FILE | {"gpus": 2})
    partition = resources.share(space, resources.Machine(8, 4))
    assert partition.slots == 2
    assert partition.place(partition.machines, 2, space.baseline.parallel.together).resources["GPU"] == 2
    for machine, most in ((resources.Machine(8, 1), 1), (resources.Machine(8, 0), 0)):
        with pytest.raises(
            ConfigError, match=f"gpus: 2 GPUs of one machine are not allowed here; .* allowed: at most {most}"
        ):
            resources.share(space, machine)


def test_what_a_command_does_is_known_while_it_prints_nothing(tmp_path):
    """Else the console would say that it waits for its workers."""
    program = "import json, sys; print('loss:', float(json.load(open(sys.argv[1] + '/doing.json'))['part'] == 'train'))"
    space = parsed(
        tmp_path, FILE | {"command": [sys.executable, "-c", program, "{folder}", "{seed}", "{overrides}", "{lr}"]}
    )
    run = trial.run_of(space.baseline, tmp_path / "run", None)
    run.folder.mkdir()
    point, end = trial.run(run, lambda: False)
    assert (point["loss"], end.status) == (1.0, "ok")
    assert not (run.folder / "doing.json").exists()


def test_the_report_does_not_explain_a_winner_by_the_values_that_a_command_prints(tmp_path):
    (folder := tmp_path / "file").mkdir()
    content = FILE | {"noise": 2}
    experiment.create(tmp_path / "x", parsed(folder, content), search_space.read(folder / "search.yaml"))
    wanted = analysis.read(tmp_path / "x").space
    for number, drawn, value in ((0, {}, 4.0), (1, {"seed": 1}, 4.1), (2, {"lr": 3.0}, 1.0), (3, {"lr": 2.0}, 3.9)):
        searches.write(tmp_path / "x", wanted, number, curve=((5.0, 10, 5.0), (20.0, 40, value)), drawn=drawn)
    assert report.main(["x", "--storage", str(tmp_path)]) == 0
    page = (tmp_path / "x/report.html").read_text()
    assert "Every trial" in page
    assert "values per step" not in page
    assert "values per second" not in page


def test_a_search_does_not_go_on_with_another_program_under_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(NOISY)
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(FILE))
    options = SearchOptions(words=[str(path)], name="x", storage=tmp_path / "kept", check=False)
    request = search_setup.requested(options)
    search_setup.create(request, options, print, None)
    resume = ["--resume", "x", "--storage", "kept"]
    Path("train.py").write_text(NOISY + "\n# edited")
    assert search.main(resume) == 2
    assert "kept/x: train.py changed since its first run" in capsys.readouterr().err


REFUSED = {
    "objective": {"objective": "loss"},
    r"objective: modus: no such key; did you mean mode\?": {"objective": {"name": "loss", "modus": "min"}},
    "model.width": {"baseline": {"lr": 1.0}},
    "lr": {"command": "python train.py {seed}"},
    "workload": {"workload": "digits"},
    "outcome": {"outcome": "best"},
    "grace": {"grace": "long"},
    "timeout": {"timeout": "0s"},
    "outcom: no such key; did you mean outcome": {"outcom": "final"},
    "objective: mode: is missing: more of val_acc is better": {"objective": {"name": "val_acc"}},
    "early_stopping: 'asha' is not allowed with a target": {
        "objective": {"name": "loss", "target": "loss<=1"},
        "outcome": "time",
        "early_stopping": "asha",
    },
}


@pytest.mark.parametrize("key", REFUSED)
def test_bad_files_are_refused_with_their_key(tmp_path, key):
    with pytest.raises(ConfigError, match=rf"search\.yaml: {key}"):
        parsed(tmp_path, FILE | REFUSED[key])
    if key == "objective":
        with pytest.raises(ConfigError, match=r"search\.yaml: serach: no such key; did you mean search"):
            parsed(tmp_path, {key: value for key, value in FILE.items() if key != "search"} | {"serach": {}})
        with pytest.raises(ConfigError, match=r"search\.yaml: search: is missing"):
            parsed(tmp_path, {key: value for key, value in FILE.items() if key != "search"})


@pytest.mark.nightly
@pytest.mark.cluster
def test_a_search_that_was_killed_leaves_no_process_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        NOISY + "\nimport os, time\nwhile os.path.exists('wait') and options.lr > 1: time.sleep(0.1)\n"
    )
    Path("wait").touch()
    content = FILE | {
        "command": f"{sys.executable} train.py --lr {{lr}} --seed {{seed}}",
        "baseline": {"lr": 1.0},
        "search": {"lr": [1.0, 0.1, 10.0]},
        "objective": {"name": "loss", "mode": "min"},
        "first": [{"lr": 10.0}],
    }
    Path("s.yaml").write_text(yaml.safe_dump(content))
    words = [sys.executable, "-m", "tunediff.search", "s.yaml", "--name", "killed", "--no-check"]
    process = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})
    folder = tmp_path / "ray_results" / "killed"
    wait_until(lambda: processes_of(folder / "trials" / "t0001") or process.poll() is not None)
    before = trial_record.read_trial(folder / "trials" / "t0000").value("loss")
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(folder / "trials" / "t0001"))
    Path("wait").unlink()
    assert search.main(["--resume", "killed"]) == 0
    trials = trial_record.read_trials(folder)
    assert {trial.status for trial in trials} == {"ok"}
    assert (trials[0].value("loss"), trials[0].attempts) == (before, 1)
    assert "interrupted" in trials[1].remarks
    assert "came before their first value" in capsys.readouterr().out


STEPS = """
import argparse, os, pathlib, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--seed", type=int)
options = parser.parse_args()
state = pathlib.Path(os.environ["TUNEDIFF_FOLDER"], "state.txt")
first = int(state.read_text()) if os.environ["TUNEDIFF_RESUME"] == "1" else 0
for step in range(first, 40):
    if options.lr > 1 and step == 25:
        while os.path.exists("wait"): time.sleep(0.05)
    with open(f"steps-{options.lr}", "a") as log: log.write(f"{step}\\n")
    if CHECKPOINTS and step % 10 == 9:
        state.write_text(str(step + 1))
        print(f"CHECKPOINT {state}")
    print(f"loss: {1 / (step + 1 + options.seed / 1000)}")
"""


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.parametrize(("checkpoints", "again_from"), [(True, 20), (False, 0)])
def test_a_killed_trial_goes_on_from_its_checkpoint_or_begins_again(tmp_path, monkeypatch, checkpoints, again_from):
    """Killed in its step 25, of 40."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(f"CHECKPOINTS = {checkpoints}\n{STEPS}")
    Path("wait").touch()
    content = FILE | {
        "command": f"{sys.executable} train.py --lr {{lr}} --seed {{seed}}",
        "budget": {"per_trial": "600s", "trials": 2},
        "baseline": {"lr": 1.0},
        "search": {"lr": [1.0, 10.0]},
        "objective": {"name": "loss", "mode": "min"},
        "first": [{"lr": 10.0}],
    }
    Path("s.yaml").write_text(yaml.safe_dump(content))
    words = [sys.executable, "-m", "tunediff.search", "s.yaml", "--name", "killed", "--no-check"]
    process = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})
    trial = tmp_path / "ray_results" / "killed" / "trials" / "t0001"
    steps = Path("steps-10.0")
    journal = trial / "journal.jsonl"
    wait_until(lambda: process.poll() is not None or (steps.exists() and "24\n" in steps.read_text()))
    wait_until(lambda: journal.read_text().count('"checkpoint"') == 2 * checkpoints)  # what was printed is noted
    assert process.poll() is None
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(trial))
    Path("wait").unlink()
    assert search.main(["--resume", "killed"]) == 0
    made = [int(line) for line in steps.read_text().split()]
    assert made == [*range(25), *range(again_from, 40)]
    assert [int(line) for line in Path("steps-1.0").read_text().split()] == list(range(40)), "it ran once"
    again = trial_record.read_trial(trial)
    assert (again.status, again.value("loss")) == ("ok", pytest.approx(1 / 40))
    assert ("interrupted" in again.remarks) == (not checkpoints)


FALLING = """
import sys
for epoch in range(1, 41):
    print("METRIC seconds=%.3f" % (epoch / 10), flush=True)
    print("loss:", 2 / (epoch * float(sys.argv[1])) + int(sys.argv[2]) * 1e-6, flush=True)
"""
