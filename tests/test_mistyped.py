"""What is typed wrong is answered at once: one line that names it and what is allowed, and exit code 2."""

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

from tests import searches
from tests.json_schemas import validate
from tunediff import cli, search, search_space, train
from tunediff.config import ConfigError, missing_equals_hint
from tunediff.core import text
from tunediff.workloads import drawing

FILE = {
    "workload": "digits", "budget": {"per_trial": "3s", "trials": 3},
    "search": {"optimizer.lr": {"low": 1e-4, "high": 1e-2}},
}  # fmt: skip
SEARCH_FILE = (
    "ok.yaml: is a search file, not a configuration; its best one is what python -m tunediff.export NAME writes"
)

TINY = ["model.channels=8", "model.multipliers=[1]", "model.attention=[]", "data.max_images=64", "evaluation.images=16",
        "evaluation.steps=2", "evaluation.points=1", "loader.workers=0"]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    searches.make(tmp_path / "taken", FILE)
    Path("taken", "sessions.jsonl").write_text(
        '{"event": "begin", "time": 0, "monotonic_s": 1}\n{"event": "end", "time": 9, "monotonic_s": 61}'
    )
    Path("ok.yaml").write_text(yaml.safe_dump(FILE))
    Path("config.yaml").write_text("workload: diffusion\nloader: {batch_size: 64}\n")
    Path("empty.yaml").write_text("")


MISTAKES = """
search optimizer.lr 3e-3 --dry-run                  | found optimizer.lr, 3e-3; did you mean optimizer.lr=3e-3?
search ok.yaml loader.batch_size 64 --dry-run       | did you mean loader.batch_size=64?
search ok.yaml loader.batch_size = 64               | did you mean loader.batch_size=64?
search ok.yaml loader.batch_size= 64                | did you mean loader.batch_size=64?
search ok.yaml =3                                   | command line: '=3' is not understood; write knob=value
search ok.yaml --loader.batch_size 64               | a knob is written loader.batch_size=64
search ok.yaml --trails 3                           | command line: unrecognized arguments: --trails 3
search ok.yaml --trials 1.5                         | command line: --trials: '1.5' is not allowed; allowed: a whole number
search ok.yaml --trials                             | command line: --trials: expected one argument
search ok.yaml --seed 4294967296                    | --seed: 4294967296 is not allowed; allowed: a whole number of at least 0 and below 2^32
search ok.yaml ok.yaml                              | one search file at most, found ok.yaml, ok.yaml
search empty.yaml                                   | empty.yaml: is empty; it needs `key: value` lines
search folder                                       | folder: is a folder, not a search file; to learn the images in it: python -m tunediff.search images data.path=folder
search taken                                        | taken: is a folder, not a search file; its search file is taken/search.yaml
search ok.yaml --name taken --storage .             | --name: 'taken' exists in {here}; choose another name, or --resume taken
search --resume taken --storage . --total 59s       | --total: '59s' is not allowed; allowed: at least 60s, which are spent
search config.yaml                                  | config.yaml: is a configuration, not a search file; a search file names it after base:
search digits_classifer                             | digits_classifer: no such search file; did you mean digits_classifier
search --resume /                                   | /: no such search in /; there are: none
train                                               | command line: the following arguments are required: --config
train --config digits lr 3e-3                       | 'lr' is not understood; write knob=value; did you mean lr=3e-3?
train --config ok.yaml                              | {search_file}
train --config digit                                | digit: no such file, and no baseline of that name; did you mean digits
train --config folder                               | folder: is a folder, not a file
train --config digits --budget 1s --out ok.yaml     | --out: ok.yaml cannot be written: File exists
profile --config ok.yaml                            | {search_file}
compare digits optimizer.lr=0.002 --no-check -- --comment=x | command line: --comment: no such knob
compare digits seed 99                              | digits seed 99: needs A and B, or A and knob=value for what B changes; did you mean seed=99?
compare digits cifar                                | cifar: no such file, and no baseline of that name; did you mean cifar10?
compare digits ok.yaml                              | {search_file}
compare digits seed=99 --compile yes                | command line: --compile: 'yes' is not allowed; allowed: 'charged', 'free'
evaluate /dev/zero                                  | /dev/zero: no model; allowed: .yaml, .safetensors, checkpoint.pt or a folder
sample folder                                       | folder: no model in this folder
sample                                              | command line: the following arguments are required: RUN
export folder                                       | folder: no such search in
report nope                                         | nope: no such search in
"""


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines(), ids=lambda row: row.partition("|")[0].strip())
def test_what_is_typed_wrong(row, capsys):
    line, _, answer = (part.strip() for part in row.partition(" | "))
    command, *words = line.split()
    module = importlib.import_module("tunediff.report.__main__" if command == "report" else f"tunediff.{command}")
    assert module.main(words) == 2
    out, said = capsys.readouterr()
    assert answer.format(search_file=SEARCH_FILE, here=Path.cwd()) in said
    assert (said[:7], said.count("\n"), out) == ("error: ", 1, "")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["digits", "cifar10"], ""),
        (["a.yaml", "b.yaml"], ""),
        (["mine.py", "lr", "0.1"], "lr=0.1"),
        (["optimizer.decay", "cosine"], "optimizer.decay=cosine"),
        (["model.multipliers", "[1,2]"], "model.multipliers=[1,2]"),
        (["x", "=", "3"], "x=3"),
        (["x", "=3"], "x=3"),
        (["x="], ""),
        (["loader.workers", "lr=3"], ""),
    ],
)
def test_a_knob_and_its_value_stand_together(words, answer):
    assert missing_equals_hint(words) == (f"; did you mean {answer}?" if answer else "")


def test_sections_may_be_nested():
    """As in a configuration: under `search:` and `grid:`, and where they always might, under `fixed:` and `baseline:`."""
    flat = {"loader.batch_size": [64, 128], "optimizer.lr": {"low": 1e-4, "high": 1e-2}}
    nested = {"loader": {"batch_size": [64, 128]}, "optimizer": {"lr": {"low": 1e-4, "high": 1e-2}}}
    assert (
        search_space.parse({**FILE, "search": nested}, "x").dimensions
        == search_space.parse({**FILE, "search": flat}, "x").dimensions
    )
    grid = {"search": None, "grid": {"timesteps": {"name": ["uniform", "info_noise"]}}}
    content = {key: value for key, value in {**FILE, **grid}.items() if value is not None}
    assert [dimension.name for dimension in search_space.parse(content, "x").dimensions] == ["timesteps.name"]
    fixed = search_space.parse(
        {**FILE, "fixed": {"loader": {"batch_size": 64}}, "baseline": {"optimizer": {"lr": 2e-3}}}, "x"
    )
    assert (fixed.baseline.loader.batch_size, fixed.baseline.optimizer.lr) == (64, 2e-3)


@pytest.mark.parametrize(
    ("searched", "answer"),
    [
        ({"evaluation": {"images": [64, 128]}}, "search: evaluation.images: cannot be searched: it must be the same in every trial, as part of the evaluation protocol; put it under fixed:"),
        ({"loader": {"batch_size": 64}}, "search: loader.batch_size: 64 is not a space; allowed: a list of choices"),
        ({"loader": [64, 128]}, "search: loader: is a section, not a knob; its knobs: loader.batch_size, loader.accumulation"),
        ({"loader": {"batchsize": [64, 128]}}, "search: loader.batchsize: no such knob; did you mean loader.batch_size"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched(searched, answer):
    with pytest.raises(ConfigError) as error:
        search_space.parse({**FILE, "search": searched}, "x")
    assert str(error.value).startswith(f"x: {answer}")


def test_a_dry_run_is_json(capsys):
    assert search.main(["ok.yaml", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    validate(told, "search-dry-run-output")


def test_a_search_is_not_made_shorter_than_it_is(capsys):
    folder = searches.night(Path("ray_results/night"))
    kept = (folder / "search.yaml").read_bytes()
    assert search.main(["--resume", "night", "--trials", "2"]) == 2
    assert capsys.readouterr().err == "error: --trials: 2 is not allowed; allowed: at least 3, which are done\n"
    assert search.main(["--resume", "night", "--trials", "5", "--dry-run"]) == 0
    assert "trials: 5 ×" in capsys.readouterr().out
    assert (folder / "search.yaml").read_bytes() == kept, "a dry run leaves everything as it is"


def test_a_name_may_be_a_path_as_a_shell_completes_it(capsys):
    folder = searches.night(Path("ray_results/night"))
    for name in ("night", "night/", "ray_results/night", str(folder.absolute())):
        assert search_space.folder_of(name, Path("ray_results")) == folder.absolute()
    assert search.main(["--resume", "ray_results/night/", "--dry-run"]) == 0


COMMANDS = ["search", "compare", "train", "evaluate", "sample", "profile", "export", "report.__main__"]


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_called_the_same_in_every_command(command, capsys, monkeypatch):
    """All find and leave folders in --storage, tell JSON and write where they are told, under one name each."""
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        importlib.import_module(f"tunediff.{command}").main(["--help"])
    found = re.findall(r"^  (-\S.*?)  +(\S.*)$", capsys.readouterr().out, re.M)
    options = {re.search(r"--[a-z-]+", names)[0]: (names, text) for names, text in found}
    assert options["--json"] == ("--json", "print the result as JSON, nothing else on stdout")
    assert options["--storage"][0] == "--storage STORAGE"
    assert options["--storage"][1].startswith("folder of ")
    both = command == "train"  # `--name` there is a folder in the storage, as a search's is
    assert (("--out" in options) != ("--name" in options)) or both, "what is searched is found again by its name"
    assert options.get("--quiet", ("-q, --quiet", "print the result only")) == ("-q, --quiet", "print the result only")
    assert not [names for names, _ in options.values() if names.startswith("-") and names[1] not in "-hq"]


@pytest.mark.training
def test_a_result_is_json_wherever_it_is_asked_for(capsys):
    searches.night(Path("kept/night"))
    told = {}
    for command, words in (
        ("report.__main__", ["night"]),
        ("export", ["night"]),
        ("train", ["--config", "digits", *TINY, "--samples", "128"]),
        ("sample", ["train-digits", "--images", "2", "--sampler", "ddim", "--steps", "2"]),
        ("evaluate", ["train-digits", *"--images 8 --sampler ddim --steps 2 --metrics fd".split()]),
    ):
        assert importlib.import_module(f"tunediff.{command}").main([*words, "--storage", "kept", "--json"]) == 0
        told[command] = json.loads(capsys.readouterr().out)
        validate(told[command], f"{command.partition('.')[0]}-output")
    assert told["report.__main__"]["report"] == str(Path("kept/night/report.html").absolute())
    assert told["export"]["configuration"] == str(Path("kept/night/best.yaml").absolute())
    assert told["train"]["steps"] == 1
    assert told["sample"]["images"] == 2
    assert told["sample"]["sampler"]["name"] == "ddim"
    assert (told["evaluate"]["schema"], Path(told["evaluate"]["json"]).is_file()) == (cli.SCHEMA, True)
    assert Path(told["sample"]["path"]).is_absolute()
    assert Path(told["evaluate"]["json"]).is_absolute()
    assert told["train"]["metric"].startswith("FD")
    assert isinstance(told["train"]["value"], float)


def test_train_tells_progress_as_json_lines_on_stderr(capsys):
    words = ["--config", "digits", *TINY, "--samples", "128", "--storage", "kept"]
    assert train.main([*words, "--json", "--progress", "jsonl"]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["steps"] == 1
    events = [json.loads(line) for line in error.splitlines() if line.startswith("{")]
    (point,) = [event for event in events if event["event"] == "point"]  # where it is slow, others tell how far it is
    assert (point["index"], isinstance(point["value"], float)) == (1, True)


def test_one_of_a_thing_is_not_called_many():
    assert [text.pluralize(count, "seed") for count in (0, 1, 2, 1000)] == [
        "0 seeds",
        "1 seed",
        "2 seeds",
        "1,000 seeds",
    ]
    assert drawing.format_sampler({"name": "ddpm", "steps": 1}) == "ddpm, 1 step"
