"""Comparisons of commands, from the command line to the verdict."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

import tunediff
from tests.command.test_run import processes_of, wait_until
from tunediff import compare, search_space
from tunediff import config as cfg
from tunediff.analysis.comparison import Comparison
from tunediff.api.search import SearchCall, search_file
from tunediff.api.sides import values_of
from tunediff.command import trial
from tunediff.config import ConfigError
from tunediff.core import machine, trial_record
from tunediff.experiment.model import Experiment
from tunediff.report import sentences

NOISY = """
import argparse, random
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--seed", type=int)
options = parser.parse_args()
random.seed(options.seed)
value = options.lr * (1 + 0.1 * random.random())
print({"loss": f"{value:.4f}"})
"""
RUN = f"{sys.executable} train.py --lr {{lr}} --seed {{seed}}"


@pytest.fixture
def program(tmp_path, at_tmp_path):
    """A folder with a training that takes no time, and is the working folder."""
    Path("train.py").write_text(NOISY)
    return tmp_path


def compared(capsys, *words):
    """Return (exit code, JSON) of a comparison by the final values."""
    code = compare.main([*words, "--objective", "loss", "--outcome", "final", "--json", "--no-check"])
    return code, json.loads(capsys.readouterr().out)


def test_a_harm_is_found_and_equal_commands_are_not_better(program, capsys):
    code, result = compared(capsys, "--run", RUN, "lr=1", "lr=100", "--name", "harm")
    assert (code, result["verdict"], result["rule"]["rounds"]) == (11, "worse", 3)
    assert result["candidates"][1]["effect"]["value"] == pytest.approx(100, rel=0.1)
    code, result = compared(capsys, "--run", RUN, "--run", f"{RUN} ", "lr=1.0", "--pairs", "4", "--name", "equal")
    assert (code, result["verdict"]) == (10, "no_difference")
    assert result["candidates"][0]["values"] == result["candidates"][1]["values"]
    assert len({*result["candidates"][0]["values"]}) > 1, "each pair has a seed of its own"


def test_a_budget_that_ends_before_the_first_value_is_refused(program, capsys):
    words = ["--run", RUN, "lr=1", "lr=100", "--objective", "loss", "--budget", "0.5s"]
    Path("train.py").write_text(f"import time\ntime.sleep(1)\n{NOISY}")
    assert compare.main(words) == 2
    says = r"A: command: budget: 0.5 s is not allowed: the first value comes after [\d.]+ s; allowed: more, or --outcome final"
    assert re.search(says, capsys.readouterr().err)


def test_a_mistyped_objective_is_told_which_values_are_printed(program, capsys):
    assert compare.main(["--run", RUN, "lr=1", "lr=2", "--objective", "los", "--budget", "10s"]) == 2
    assert "no value of los in what it printed; it prints values of loss; allowed: " in capsys.readouterr().err


TIMED = """
import argparse, random
parser = argparse.ArgumentParser()
parser.add_argument("--speed", type=float)
parser.add_argument("--worse", type=float, default=0)
parser.add_argument("--seed", type=int)
options = parser.parse_args()
random.seed(f"{options.seed} {options.speed}")
print(f"train_time:{1000 / options.speed * (1 + 0.02 * random.random()):.0f}ms")
print("loss:", 3.276 + 0.002 * random.random() + options.worse)
"""
BY_TIME = ("--better", "time", "--outcome", "final", "--time", r"train_time:(\d+)ms", "--objective", "loss", "--no-check",
           "--json", "--quiet")  # fmt: skip


@pytest.mark.parametrize(
    ("worse", "rule", "verdict", "code"),
    [
        ("0", ("--target", "loss<=3.28"), "better", 0),
        ("0.01", ("--target", "loss<=3.28"), "quality_not_shown", 10),
        ("0", ("--margin", "0.01"), "better", 0),
    ],
)
def test_fewer_seconds_count_only_for_values_that_are_good_enough(program, capsys, worse, rule, verdict, code):
    Path("train.py").write_text(TIMED)
    run = f"{sys.executable} train.py --speed {{speed}} --worse {{worse}} --seed {{seed}}"
    words = ["--run", run, "speed=1", "worse=0", "speed=2", f"worse={worse}", *rule, *BY_TIME, "--pairs", "6"]
    assert compare.main(words) == code
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == verdict
    assert (result["candidates"][1]["effect"]["value"], [gate["shown"] for gate in result["sides"]["gates"]]) == (
        pytest.approx(0.5, rel=0.02),
        [verdict == "better"],
    )
    assert result["candidates"][0]["others"]["loss"][0] == pytest.approx(3.277, abs=0.001)
    assert (result["target"] is None) == (rule[0] != "--target") == (result["sides"]["target_p"] is None)


FALLING = """
import argparse, random
parser = argparse.ArgumentParser()
parser.add_argument("--speed", type=float)
parser.add_argument("--seed", type=int)
options = parser.parse_args()
random.seed(f"{options.seed} {options.speed}")
for epoch in range(1, 21):
    print(f"train_time:{epoch / options.speed * (1 + 0.02 * random.random()):.3f}s")
    print(f"loss: {2 / epoch + (epoch == 1) * 0.1 * random.random():.3f}")
"""


def test_seconds_until_a_target_are_compared_after_a_check_that_needs_only_a_value(program, capsys):
    Path("train.py").write_text(FALLING)
    words = ["--run", f"{sys.executable} train.py --speed {{speed}} --seed {{seed}}", "speed=1", "speed=2",
             "--objective", "loss", "--time", r"train_time:([\d.]+)s", "--quiet", "--json"]  # fmt: skip
    assert compare.main([*words, "--target", "loss<=0.24"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["metric"], result["candidates"][1]["effect"]["value"]) == (
        "seconds until loss<=0.24",
        pytest.approx(0.5, rel=0.05),
    )
    assert result["candidates"][0]["values"][0] == pytest.approx(2 / 0.24, rel=0.05)
    assert result["sides"]["gates"] == [], "each run ended where it met the target"
    assert result["sides"]["without_effect"] == [], "they ended at the same value, in other seconds"
    assert compare.main([*words, "--target", "loss<=0.05"]) == 10
    missed = json.loads(capsys.readouterr().out)
    assert ([one["missed"] for one in missed["candidates"]], missed["state"]) == ([3, 3], "hopeless")
    assert "6 of 6 runs missed the target; ranked by sign test" in missed["summary"][0]
    assert {run.status for run in trial_record.read_trials(Path(missed["files"]["results"]))} == {"missed"}


@pytest.fixture
def repository(program):
    """A git repository around the training; call it with the words of a git command."""

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    git("init", "-q")
    Path(".gitignore").write_text("data\nray_results\n")
    git("add", "-A")
    git("commit", "-qm", "first")
    return git


def test_two_revisions_run_in_worktrees_with_what_git_ignores(repository, capsys):
    Path("data").write_text("1.0")
    times = "options.lr * (1 + __import__('os').path.exists('of_b.txt')) *"
    Path("train.py").write_text(NOISY.replace("options.lr *", f"float(open('data').read()) * 20 * {times}"))
    repository("commit", "-qam", "slow")
    Path("train.py").write_text(NOISY.replace("options.lr *", times))
    Path("of_b.txt").touch()  # a change may be a new file, which the older revision does not have
    code, result = compared(capsys, "--run", RUN, "--at", "HEAD", "--at", ".", "lr=1", "--name", "at")
    assert (code, result["verdict"], result["candidates"][0]["name"]) == (0, "better", "HEAD")
    assert result["candidates"][1]["effect"]["value"] == pytest.approx(0.1, rel=0.1)
    listed = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 1


def test_the_check_tries_each_revision_where_it_will_run(repository, capsys):
    Path("train.py").write_text("raise SystemExit('an old fault')")
    repository("commit", "-qam", "broken")
    Path("train.py").write_text(NOISY)
    words = ["--run", RUN, "--at", "HEAD", "--at", ".", "lr=1", "--objective", "loss", "--outcome", "final"]
    assert compare.main(words) == 2
    assert "A: command: with lr=1: exit code 1: an old fault" in capsys.readouterr().err
    assert compare.main([*words[:5], "no-such", *words[6:], "--no-check"]) == 2
    assert "no-such" in capsys.readouterr().err
    assert not list(Path().glob("ray_results/*"))
    listed = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 1


def test_a_run_sees_the_gpus_that_were_asked_for(program):
    (program / "bin").mkdir()
    smi = program / "bin" / "nvidia-smi"
    smi.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: X (UUID: GPU-$i)"; done\n')
    smi.chmod(0o755)
    Path("train.py").write_text(
        f"import os\n{NOISY}\n"
        "print('sees', os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'], os.environ['MASTER_PORT'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {
        "PATH": f"{smi.parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "1,3,0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    words = ["--run", f"{RUN} --gpus {{gpus}}", "lr=1", "lr=100", "--objective", "loss", "--outcome", "final", "--pairs", "3",
             "--no-check", "--quiet"]  # fmt: skip
    Path("train.py").write_text(
        Path("train.py").read_text().replace("options =", "parser.add_argument('--gpus')\noptions =")
        + "print('of', options.gpus)\n"
    )
    command = [sys.executable, "-m", "tunediff.compare", *words]
    assert subprocess.run([*command, "--name", "two", "--gpus", "2"], env=environment).returncode == 11
    assert subprocess.run([*command, "--name", "all"], env=environment).returncode == 11
    for name, sees, of in (("two", "1,3", "2"), ("all", "1,3,0", "3")):
        lines = [log.read_text().splitlines() for log in Path("ray_results", name).glob("trials/*/output.log")]
        found = [next(line.split() for line in log if line.startswith("sees")) for log in lines]
        assert {(line[1], line[2]) for line in found} == {(sees, str(machine.cores()))}
        assert all(int(line[3]) > 1023 for line in found)
        assert all(f"of {of}" in log for log in lines)


def test_a_comparison_that_was_killed_goes_on_where_it_was(program, capsys):
    Path("train.py").write_text(NOISY + "\nimport time\nwhile options.seed == 501: time.sleep(0.1)\n")
    words = [sys.executable, "-m", "tunediff.compare", "--run", RUN, "lr=1", "lr=100", "--name", "killed",
             "--objective", "loss", "--outcome", "final", "--no-check", "--seed", "500"]  # fmt: skip
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    )
    folder = program / "ray_results" / "killed"
    waiting = folder / "trials" / "t0003"  # the second pair begins with B
    wait_until(lambda: (waiting / "output.log").is_file() or process.poll() is not None)
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(waiting))
    before = [run.value("loss") for run in Comparison.read(folder).rounds[0]]
    Path("train.py").write_text(NOISY)
    assert compare.main(["--resume", "killed"]) == 2
    assert "killed: train.py changed since its first run" in capsys.readouterr().err
    assert compare.main(["--resume", "killed", "--force"]) == 11
    now = Comparison.read(folder)
    assert [run.value("loss") for run in now.rounds[0]] == before
    assert [run.attempts for run in now.rounds[0]] == [1, 1]
    assert now.rounds[1][1].attempts == 2
    assert "interrupted" in sentences.of_trial(now.rounds[1][1])
    assert sentences.of_trial(now.rounds[1][0]) == ""
    assert "worse" in capsys.readouterr().out


def test_the_check_refuses_a_seed_without_effect(program, capsys):
    words = ["--objective", "loss", "--outcome", "final"]
    Path("train.py").write_text(NOISY.replace("random.seed(options.seed)", "random.seed(0)"))
    assert compare.main(["--run", RUN, "lr=1", "lr=2", *words]) == 2
    assert "seed" in capsys.readouterr().err
    assert not list(program.glob("ray_results/*"))
    Path("train.py").write_text("print('loss: 9')\n" + NOISY)  # a first value before any training
    assert compare.main(["--run", RUN, "lr=1", "lr=100", *words, "--pairs", "3"]) == 11


def test_files_that_a_pair_writes_beside_its_folders_are_named_and_refused_at_the_same_time(program, capsys):
    Path("train.py").write_text(NOISY + "\nopen('left.txt', 'w').close()")
    words = ["--run", RUN, "lr=1", "lr=100", "--objective", "loss", "--outcome", "final", "--no-check", "--pairs", "3"]
    assert compare.main(words) == 11
    assert "WARNING: written outside {folder}: left.txt" in capsys.readouterr().out
    assert compare.main([*words, "--parallel"]) == 2
    assert "--parallel: written outside {folder}: left.txt" in capsys.readouterr().err


def test_values_of_a_parameter_have_one_type():
    assert values_of(["lr=1", "lr=3e-4"], "x") == [{"lr": "1"}, {"lr": "3e-4"}], "as it was typed"
    assert values_of(["n=1", "n=auto"], "x") == [{"n": "1"}, {"n": "auto"}]
    assert values_of(["n=1", "n=2"], "x") == [{"n": 1}, {"n": 2}]
    assert values_of(["n=007", "n=1_0"], "x") == [{"n": "007"}, {"n": "1_0"}]
    assert values_of(["a=true", "b=on", "a=false"], "x") == [{"a": True, "b": "on"}, {"a": False}]
    with pytest.raises(ConfigError, match="name=value"):
        values_of(["=3"], "x")


UNITS = "UNIT = 'GB' if '100' in __import__('sys').argv else 'MB'\n" + NOISY.replace(
    'print({"loss": f"{value:.4f}"})', "print(f'loss: {value} {UNIT}')"
)
FAILED = {
    "another unit than A's": (UNITS, "error", "its values are in GB, those of t0000 in MB"),
    "two units": (UNITS + "\nif options.lr > 1: print('loss: 3%')", "error", "its unit changes from GB to %"),
    "two metrics under one name": (
        NOISY + "\nif options.lr > 1: print('train loss: 9.0 test loss: 0.1')\n",
        "error", "is printed as loss and as test loss",
    ),
    "divergence": (NOISY + "\nif options.lr > 1: print('loss: nan')\n", "nan", "loss is nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_a_side_without_values_has_failed(program, capsys, name):
    text, status, reason = FAILED[name]
    Path("train.py").write_text(text)
    code, result = compared(capsys, "--run", RUN, "lr=1", "lr=100", "--name", "x")
    assert (code, result["verdict"], result["failure"]["status"]) == (12, "failed", status)
    assert reason in result["failure"]["reason"]


def test_what_a_run_leaves_is_what_it_names(program, capsys):
    Path("train.py").write_text(NOISY + "\nprint('CHECKPOINT step1.pt'); print('ARTIFACT adapter')\n")
    compared(capsys, "--run", RUN, "lr=1", "lr=100", "--name", "left", "--pairs", "3")
    folder = program / "ray_results" / "left" / "trials" / "t0000"
    assert trial.artifacts(folder) == [folder / "adapter"]
    assert trial_record.read_trial(folder).clock["kind"] == "process"


BLOCKS = """
import random, sys
random.seed(sys.argv[1] + sys.argv[2])
print("accuracy: 0.1")  # of a run that warms up
for run in range(5):
    print(f"accuracy: {0.9 + 0.05 * (sys.argv[1] == 'b') + 0.01 * random.random():.4f}")
"""


def test_a_process_of_several_runs_is_one_value(program, capsys):
    Path("train.py").write_text(BLOCKS)
    words = ["--run", f"{sys.executable} train.py {{side}} {{seed}}", "side=a", "side=b", "--objective", "accuracy",
             "--mode", "max", "--reduce", "each:1", "--json", "--quiet"]  # fmt: skip
    assert compare.main([*words, "--outcome", "final"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["sides"]["results_per_process"] == [5, 5]
    assert result["candidates"][0]["value"] == pytest.approx(0.905, abs=0.004)
    assert compare.main([*words, "--budget", "5s"]) == 2
    assert "reduce: 'each:1' is not allowed" in capsys.readouterr().err


COLUMNS = """
import random, sys
random.seed(sys.argv[1] + sys.argv[2])
with open(sys.argv[3] + "/log.csv", "w") as file:
    file.write("step,train_time_ms,loss\\n")
    for step in range(1, 9):
        file.write(f"{step},{1000 * step / float(sys.argv[1]) * (1 + 0.01 * random.random())},{1 / step}\\n")
"""


def test_seconds_are_a_column_of_the_file_of_metrics(program, capsys):
    Path("train.py").write_text(COLUMNS)
    words = ["--run", f"{sys.executable} train.py {{speed}} {{seed}} {{folder}}", "speed=1", "speed=2", "--objective",
             "loss", "--metrics", "{folder}/log.csv", "--target", "loss<=0.2", "--json", "--quiet", "--no-check"]  # fmt: skip
    assert compare.main([*words, "--time", "train_time_ms"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["clock"], result["candidates"][1]["effect"]["value"]) == ("training", pytest.approx(0.5, rel=0.02))
    assert compare.main([*words, "--time", "seconds"]) == 12
    reason = json.loads(capsys.readouterr().out)["failure"]["reason"]
    assert "'seconds' is no number; allowed: a column of the file with its seconds: step, train_time_ms, loss" in reason


def test_compiled_code_is_shared_after_a_run_that_does_not_count(program, capsys):
    said = "import os, sys\nprint('CACHE', os.environ['TRITON_CACHE_DIR'])\n" + NOISY
    Path("train.py").write_text(said)
    words = ["--run", RUN, "lr=1", "lr=2", "--pairs", "3", "--name", "x"]
    assert compared(capsys, *words, "--compile", "shared")[0] == 11
    folder = Path("ray_results/x")
    logs = [*folder.glob("warm-up/*/output.log"), *folder.glob("trials/*/output.log")]
    assert len(logs) == 8
    assert len({re.search("CACHE (.*)", log.read_text())[1] for log in logs}) == 1
    for other in ("free", "charged"):
        assert compare.main([*words, "--compile", other, "--objective", "loss"]) == 2


# -------------------------------------------------------------- commands in calls from Python, and what they do without
def test_a_comparison_from_python_has_the_result_of_the_command(program):
    call = {"command": RUN, "objective": "loss", "outcome": "final", "check": False, "progress": False}
    found = tunediff.run_comparison({"lr": 1.0}, {"lr": 2.0}, name="values", pairs=3, **call)
    assert (found.verdict.verdict, found.verdict.clock, found.verdict.candidates[1].configuration) == (
        "worse",
        "process",
        {"lr": 2.0},
    )
    assert 0 < found.verdict.start_up_share <= 1
    assert len(found.pairs()) == 3
    assert not [name for name in found.pairs() if "setup" in name], "nothing measures it"
    assert found.resume(progress=False).json() == found.json()
    words = (RUN, [*RUN.split()[:-1], "9{seed}"])
    two = tunediff.run_comparison({"lr": 1.0}, name="commands", pairs=3, seed=500, **call | {"command": words})
    assert two.verdict.verdict == "no_difference"


BAD_CALLS = {
    "objective: 'loss' is not allowed": {"command": None},
    "compile: 'free'": {"compile": "free"},
    "unit: 'device'": {"unit": "device"},
    "objective: is missing": {"objective": None},
    "a: 'digits'": {"a": "digits"},
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_calls_are_refused_by_keyword(program, message):
    given = {"a": {"lr": 1.0}, "b": {"lr": 2.0}, "command": RUN, "objective": "loss"} | BAD_CALLS[message]
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        tunediff.run_comparison(given.pop("a"), given.pop("b"), **given)
    assert not list(program.glob("ray_results/*/experiment.yaml"))


def test_the_keywords_of_a_search_are_keys_of_its_file(program):
    call = SearchCall(command=f"{RUN} {{flags}}", objective="loss", reduce="mean:3", outcome="final", budget="10s",
        trials=4, baseline={"lr": 1, "model": {"width": 64}}, search={"lr": {"low": 0.1, "high": 10.0, "log": True}},
        storage=program)  # fmt: skip
    path = search_file(call)
    space = search_space.parse(search_space.read(path), str(path), program)
    assert [dimension.name for dimension in space.dimensions] == ["lr"]
    assert (space.budget.per_trial_s, space.budget.trials) == (10.0, 4)
    definition = space.workload.definition
    assert (definition.reduce, definition.outcome, definition.grace) == ("mean:3", "final", 10.0)
    assert cfg.flat(space.baseline)["model.width"] == 64


BLOCKED = ("ray", "pandas", "matplotlib", "torchvision", "torch", "optuna", "sklearn")


def test_a_comparison_needs_neither_ray_nor_torch_nor_what_draws(program):
    code = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name.partition('.')[0] in {BLOCKED!r}: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "from tunediff import compare; sys.exit(compare.main(sys.argv[1:]))"
    )
    words = ["--run", RUN, "lr=1", "lr=100", "--objective", "loss", "--outcome", "final", "--name", "bare", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 11, done.stderr
    assert json.loads(done.stdout)["verdict"] == "worse"
    assert "no report: " in done.stderr
    assert compare.main(["--resume", "bare"]) == 11
    assert (program / "ray_results" / "bare" / "report.html").is_file()


def test_parameters_that_are_given_once_are_those_of_both_sides(program, capsys):
    words = ["--run", f"{RUN} --wd {{wd}}", "wd=0.1", "lr=1", "lr=2", "--objective", "loss", "--dry-run", "--json"]
    assert compare.main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["a"], plan["b"], plan["changed"]) == ("lr=1", "lr=2", {"lr": 2})
    assert not list(program.glob("ray_results/*"))


def test_the_command_that_goes_on_is_written_with_every_run(program):
    words = ["--run", RUN, "--run", f"{RUN} ", "lr=1", "--objective", "loss", "--outcome", "final", "--name", "noted"]
    compare.main([*words, "--no-check", "--pairs", "3"])
    session = json.loads((program / "ray_results" / "noted" / "sessions.jsonl").read_text().splitlines()[1])
    assert f"--run '{RUN}'" in session["command"]
    content = yaml.safe_load((program / "ray_results" / "noted" / "experiment.yaml").read_text())
    assert (content.pop("tunediff_format"), content["test"]["pairs"]) == (1, 3)
    jsonschema.validate(content, Experiment.model_json_schema(mode="serialization"))
