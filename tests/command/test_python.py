"""Commands in calls from Python, and what they do without."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

import tunediff
from tests.command.test_comparison import NOISY, RUN
from tunediff import compare, search_space
from tunediff import config as cfg
from tunediff.api.search import SearchCall, search_file
from tunediff.config import ConfigError
from tunediff.experiment.model import Experiment


@pytest.fixture(autouse=True)
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(NOISY)
    return tmp_path


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


REFUSED = {
    "objective: 'loss' is not allowed": {"command": None},
    "compile: 'free'": {"compile": "free"},
    "unit: 'device'": {"unit": "device"},
    "objective: is missing": {"objective": None},
    "a: 'digits'": {"a": "digits"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_calls_are_refused_by_keyword(program, message):
    given = {"a": {"lr": 1.0}, "b": {"lr": 2.0}, "command": RUN, "objective": "loss"} | REFUSED[message]
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
