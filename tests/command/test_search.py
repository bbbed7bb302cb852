"""Search files of commands."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.command.test_comparison import NOISY, compared
from tests.command.test_run import processes_of, wait_until
from tunediff import compare, search, search_space
from tunediff import config as cfg
from tunediff.api import search_setup
from tunediff.api.options import SearchOptions
from tunediff.command import trial
from tunediff.config import ConfigError
from tunediff.core import trial_record
from tunediff.report import sentences
from tunediff.tuning import resources
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


def test_a_search_does_not_go_on_with_another_program_under_its_name(tmp_path, capsys, at_tmp_path):
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
def test_a_search_that_was_killed_leaves_no_process_and_goes_on(tmp_path, capsys, at_tmp_path):
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
    assert "interrupted" in sentences.of_trial(trials[1])
    assert "came before their first value" in capsys.readouterr().out


# ------------------------------------------------------- a training of two processes that torchrun starts, as a command
TRAIN = """
import argparse, os, time
import torch
import torch.distributed as dist
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--seed", type=int)
parser.add_argument("--steps", type=int, default=30)
options = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(options.seed)
net = nn.parallel.DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), options.lr)
data = torch.Generator().manual_seed(2 * options.seed + dist.get_rank())
for step in range(options.steps):
    x = torch.randn(32, 16, generator=data)
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    dist.all_reduce(mean := loss.detach().clone())
    if dist.get_rank() == 0:
        print(f"METRIC loss={mean.item() / dist.get_world_size():.6f}", flush=True)
dist.barrier()  # gloo aborts where its peer has gone
dist.destroy_process_group()
"""
LAUNCH = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --master-port {{port}} train.py"
RUN = f"{LAUNCH} --lr {{lr}} --seed {{seed}}"


@pytest.fixture
def program(tmp_path, at_tmp_path):
    Path("train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.nightly
def test_equal_sides_of_two_processes_do_not_differ_and_a_harm_is_found(program, capsys):
    code, result = compared(capsys, "--run", RUN, "--run", f"{LAUNCH} --lr {{lr}} --seed 9{{seed}}", "lr=0.05",
        "--pairs", "6", "--name", "equal", "--seed", "100")  # fmt: skip
    assert (code, result["verdict"]) == (10, "no_difference")
    assert len({*result["candidates"][0]["values"], *result["candidates"][1]["values"]}) == 2 * result["rule"]["rounds"]
    code, result = compared(capsys, "--run", RUN, "lr=0.05", "lr=0.0005", "--name", "harm")
    assert (code, result["verdict"]) == (11, "worse")
    code, result = compared(capsys, "--run", RUN, "lr=0.05", "lr=5", "--name", "diverges")
    assert code in (11, 12), "it diverges to numbers, or to NaN"


@pytest.mark.nightly
def test_no_rank_survives_a_judge_that_is_killed(program):
    words = [sys.executable, "-m", "tunediff.compare", "--run", f"{RUN} --steps 1000000", "lr=0.05", "lr=0.06",
        "--objective", "loss", "--budget", "1000s", "--no-check", "--name", "killed"]  # fmt: skip
    judge = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})
    folder = program / "ray_results" / "killed" / "trials" / "t0000"

    def ranks():
        return [one for one in processes_of(folder) if "RANK" in one.environ()]

    wait_until(lambda: len(ranks()) == 2 or judge.poll() is not None)
    assert judge.poll() is None
    judge.kill()
    judge.wait()
    wait_until(lambda: not processes_of(folder))


# ----------------------------- the commands of `examples/records`, on the toys that print the lines of public speedruns
FOLDER = Path(__file__).parents[2] / "examples" / "records"
COMMANDS = re.findall(r"tunediff compare (.*?)\n```", (FOLDER / "README.md").read_text(), re.S)


@pytest.mark.parametrize("toy", ["nanogpt", "airbench"])
def test_a_record_is_judged_as_its_page_says(tmp_path, capsys, toy, at_tmp_path):
    shutil.copy(FOLDER / f"{toy}.py", tmp_path)
    line = next(line for line in COMMANDS if f"{toy}.py" in line and "--at" not in line)
    words = [re.sub("^python ", f"{sys.executable} ", word) for word in shlex.split(line.replace("\\\n", " "))]
    assert compare.main([*words, "--no-check", "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["clock"] == ("training" if toy == "nanogpt" else "process")
    b = result["candidates"][1]
    if toy == "nanogpt":
        assert b["effect"]["value"] == pytest.approx(1600 / 1750, rel=0.01)
        assert max(b["others"]["val_loss"]) < 3.28
    else:
        assert result["sides"]["results_per_process"] == [20, 20], "without the run that compiles"
        assert 0.945 < b["value"] < 0.955


def test_the_commands_of_the_toys_are_those_of_the_records():
    """But for the program, its parameters and its revisions."""
    records, toys = COMMANDS[::2], COMMANDS[1::2]
    for record, toy in zip(records, toys, strict=True):
        assert record.partition("--unseeded")[2] == toy.partition("--unseeded")[2]
