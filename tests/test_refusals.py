"""What commands refuse: exit code 2, one line that begins with place, key and value, and nothing left behind."""

import importlib
import json
import shlex
from pathlib import Path

import pytest
import yaml
from safetensors.torch import save_file

from tests import searches
from tests.helpers import tiny
from tests.json_schemas import validate
from tests.test_models import run_folder
from tests.users import plain
from tunediff import config as cfg
from tunediff import search, search_space
from tunediff.core import options, text

SEARCH = {
    "workload": "digits", "budget": {"per_trial": "3s", "trials": 3},
    "search": {"optimizer.lr": {"low": 1e-4, "high": 1e-2}},
}  # fmt: skip
COMMAND = {
    "tunediff_format": 1, "command": "python x.py --lr {lr}", "objective": "loss", "outcome": "final",
    "unseeded": True, "folder": ".", "parameters": {"lr": 0.1},
}  # fmt: skip
FILES = {
    "ok.yaml": yaml.safe_dump(SEARCH),
    "misspelt.yaml": yaml.safe_dump(SEARCH | {"serach": {}}),
    "config.yaml": "workload: diffusion\nloader: {batch_size: 64}\n",
    "wrong.yaml": "workload: diffusion\nbudget: {trials: 3}\n",
    "empty.yaml": "",
    "text": "no weights",
    "taken.json": "",
    "taken.png": "",
    "full/file": "",
    "command/tunediff_command.yaml": yaml.safe_dump(COMMAND),
    "command.yaml": "workload: command/tunediff_command.yaml\nlr: 0.1\n",
    "gpu.yaml": yaml.safe_dump(SEARCH | {"search": {"compile.mode": ["none", "reduce-overhead"]}}),
    "final.yaml": yaml.safe_dump(SEARCH | {"final": {"evaluation.precision": "tf32"}}),
    "mine.py": Path(plain.__file__).read_text(),
}

REFUSED = """
search optimizer.lr 3e-3                              | command line: one search file at most, found optimizer.lr, 3e-3
search ok.yaml =3                                     | command line: '=3'
search ok.yaml loader.wrkers=2                        | command line: loader.wrkers:
search ok.yaml optimizer.lr=fast                      | command line: optimizer.lr: 'fast'
search ok.yaml seed=1 seed=2                          | command line: seed: is given twice: seed=1, seed=2
search ok.yaml ema.half_life=7                        | command line: ema.half_life: 7
search ok.yaml parallel.workers=64                    | ok.yaml: parallel.workers: 64
search ok.yaml data.name=images data.path=nowhere     | data.path: '{here}/nowhere'
search ok.yaml --loader.batch_size 64                 | command line: unrecognized arguments: --loader.batch_size 64
search ok.yaml --trails 3                             | command line: unrecognized arguments: --trails 3; all options:
search misspelt.yaml                                  | misspelt.yaml: serach: no such key; did you mean search
search ok.yaml --trials 1.5                           | --trials: '1.5'
search ok.yaml --trials 0                             | --trials: '0'
search ok.yaml --trials 10000000                      | command line: 10,000,000 trials
search ok.yaml --budget 1000000000h                   | command line:
search ok.yaml --budget 20                            | --budget: '20'
search ok.yaml --seed -1                              | --seed: '-1'
search ok.yaml --seed 4294967296                      | --seed: '4294967296'
search ok.yaml --confirm 21                           | --confirm: '21'
search ok.yaml --track nobody                         | --track: 'nobody'
search ok.yaml --name ../x                            | --name: '../x'
search ok.yaml --name taken --storage .               | --name: 'taken'
search ok.yaml --storage text --name x                | --storage: {here}/text/x
search ok.yaml --address head                         | --address: 'head' is not allowed; allowed: auto or HOST:PORT
search ok.yaml --warm-start gone                      | --warm-start: 'gone'
search ok.yaml --check                                | --check: 'ok.yaml'
search mine.py --check --no-check                     | command line: --no-check
search empty.yaml                                     | empty.yaml:
search config.yaml                                    | config.yaml:
search nowhere.yaml                                   | nowhere.yaml:
search digits_classifer                               | digits_classifer: no such search file; did you mean digits_classifier
search ok.yaml --address ray://head:10001              | --address: 'ray://head:10001' is not allowed; allowed: auto or HOST:PORT
search ok.yaml --address 127.0.0.1:1                  | --address: no cluster answers at 127.0.0.1:1: [Errno 111] Connection refused
search ok.yaml --address 127.0.0.1:99999              | --address: no cluster answers at 127.0.0.1:99999:
search ok.yaml --parallel --confirm 0                 | --parallel: True is not allowed; allowed: with confirm:
search ok.yaml --parallel --address localhost:1       | --address
search gpu.yaml                                       | gpu.yaml: compile.mode: 'reduce-overhead'
search ok.yaml evaluation.precision=tf32              | ok.yaml: evaluation.precision: 'tf32'
search final.yaml                                     | final.yaml: evaluation.precision: 'tf32'
search ok.yaml --storage sftp://user:secret@host/p    | --storage: sftp://…@host/p: a password is not allowed
search --resume gone                                  | gone:
search --resume gone --seed 3                         | --resume:
search --resume taken --storage . --total 59s         | --total: '59s'
search --resume night --trials 2                      | --trials: 2
search --resume night --confirm 21                    | --confirm: '21'
train                                                 | command line: the following arguments are required: --config
train --config gone.yaml                              | gone.yaml:
train --config digit                                  | digit: no such file, and no baseline of that name; did you mean digits
train --config ok.yaml                                | ok.yaml:
train --config wrong.yaml                             | wrong.yaml: budget
train --config digits lr 3e-3                         | command line: 'lr'
train --config digits optimizer.decay=cosine          | optimizer.decay: 'cosine'
train --config digits --budget 5s --every 1s          | --every:
train --config digits --every 5                       | --every: '5'
train --config digits --samples 0                     | --samples: '0'
train --config digits --unit device                   | --unit: 'device'
train --config digits --budget 5s --initial none      | --initial: 'none'
train --config digits --budget 1s --out text          | --out: text
train --config digits --budget 1s --name a --out b    | --name:
train --config digits --budget 1s --name ../a         | --name: '../a'
train --config digits --budget 1s --name night        | --out: 'ray_results/night'
train --config command.yaml --budget 1s               | command.yaml: is a configuration of a command, which runs alone: python x.py --lr 0.1
profile --config nowhere.yaml                         | nowhere.yaml:
profile --config digits --steps 2                     | --steps: '2'
profile --config command.yaml                         | command.yaml: is a configuration of a command
profile --config digits optimizer.lr=1 --steps 3 loader.batch_size=x | command line: loader.batch_size: 'x'
profile --config digits --out full                    | --out: full
profile --config digits --out text/in                 | --out: text/in
compare                                               | command line: nothing:
compare digits                                        | command line: digits:
compare digits cifar10 digits                         | command line: digits cifar10 digits:
compare digits seed 99                                | command line: digits seed 99: needs A and B, or A and knob=value for what B changes
compare optimizer.lr=0.1 digits                       | command line: optimizer.lr=0.1:
compare nowhere.yaml digits                           | nowhere.yaml:
compare digits digtis                                 | digtis: no such file, and no baseline of that name; did you mean digits
compare digits ok.yaml                                | ok.yaml:
compare digits digits                                 | digits: A and B are identical
compare digits loader.batch_size=128                  | digits loader.batch_size=128: A and B are identical
compare digits seed=11                                | seed: 11
compare digits digits_classifier                      | digits_classifier:
compare digits evaluation.images=64                   | evaluation.images: 64
compare digits data.max_images=200                    | data.max_images: 200
compare digits parallel.workers=64                    | command line: parallel.workers: 64
compare digits compile.mode=reduce-overhead           | command line: compile.mode: 'reduce-overhead'
compare digits seed=99 --pairs 2                      | --pairs: 2
compare digits seed=99 --pairs 1001                   | --pairs: 1001
compare digits seed=99 --better time                  | --better: 'time' is not allowed; allowed: a --target or a --margin
compare digits seed=99 --target frechet<=3            | --target: 'frechet<=3' is not allowed; allowed: none without --better time
compare digits seed=99 --better time --target loss<=3 | --target: 'loss<=3' is not allowed; allowed: one of frechet
compare digits seed=99 --better time --target frechet>=3 | --target: 'frechet>=3' is not allowed; allowed: frechet<=…: its mode is min
compare digits seed=99 --budget ''                    | --budget: ''
compare digits seed=99 --budget 100h                  | --budget: '360000s'
compare digits seed=99 --budget 100h --force --within 2 | --within: '2.0'
compare digits seed=99 --within small             | --within: 'small'
compare digits seed=99 --within inf%              | --within: 'inf%'
compare digits_classifier seed=99 --within 2%     | --within: '2%'
compare digits seed=99 --compile yes                  | --compile: 'yes'
compare digits seed=99 --name .x                      | --name: '.x'
compare digits seed=99 --comment text/x               | --comment: text/x
compare digits cifar10 --equal | command line: digits cifar10 digits cifar10: needs A and B
compare --run 'python x.py {lr} {seed}' --objective loss lr=1 lr=2 --equal | command line: 1 × --run, 0 × --at, 2 × groups
compare --run 'python x.py {lr} {seed}' --objective loss lr=1 lr=2 --confirm  | --confirm: True is not allowed; allowed: with --ledger
compare --run 'python x.py {lr} {seed}' --objective loss lr=1 lr=2 --judge none.py  | --judge: 'none.py' is not allowed; allowed: a Python file
compare --run 'python x.py {lr} {seed}' --objective loss lr=1 lr=2 --out full | --out: 'full' is not allowed; allowed: a new folder
compare --run 'python x.py {lr} {seed}' --objective loss lr=1 | command line: 1 × --run, 0 × --at, 1 × groups of name=value: is not allowed; allowed: A and B differ in one thing
compare --run 'python x.py {lr} {seed}' --objective loss --run 'b {lr} {seed}' lr=1 lr=2 | command line: 2 × --run, 0 × --at, 2 × groups
compare --run 'python x.py {lr} {seed}' --objective loss lr=1 lr=1 | command line: lr=1: A and B are identical
compare --run 'python x.py {lr}' lr=1 lr=2 --objective loss | command line: the command never gets a seed
compare --run 'python x.py {lr} {seed}' --objective loss lr=1 wd=1 lr=2 | command line: wd: the command does not name it
compare --run 'python x.py {lr} {wd} {seed}' lr=1 lr=2 wd=1 --objective loss | command line: wd=1: stands behind the second lr=
compare --run 'python x.py {lr} {seed}' --objective loss lr lr=2 | command line: lr is not understood; allowed: name=value
compare --run 'python x.py {lr} {seed}' --objective loss lr=1 lr=2 --pairs 2 | --pairs: 2 is not allowed
compare --run 'python x.py {lr} {seed}' --objective loss lr=1 lr=2 --pattern loss | command line: pattern: 'loss' has 0 groups
compare --run 'python x.py {lr} {seed}' --objective loss lr=1 lr=2 --target loss | command line: target: 'loss' is not allowed
compare --run 'python x.py {lr} {seed}' --objective loss lr=1 lr=2 --reduce median | command line: reduce: 'median' is not allowed
compare --run 'python x.py {lr} {seed}' lr=1 lr=2 --objective val_acc | --mode: is missing: more of val_acc is better
compare --run 'python x.py {lr} {seed}' lr=1 lr=2 --objective time | command line: objective: 'time' is not allowed
compare --run 'python x.py {lr} {seed}' lr=1 lr=2 --objective tokens_per_s | --mode: is missing: more of tokens_per_s is better
compare --run 'python x.py {lr} {seed}' lr=1 lr=2 --objective P@1 | --mode: is missing: more of P@1 is better
compare --run 'python x.py {lr} {seed} {overrides}' lr=1 parallel=1 lr=2 --objective loss | {here}/.tunediff-command-plan-A/tunediff_command.yaml: parameters: parallel: is not allowed as a name
compare --run 'python x.py {lr} {seed} {budget_s}' lr=1 lr=2 --objective loss --outcome final | --run: {{budget_s}}: needs a budget
verify full | full: has no proof.json
compare --resume gone                                 | gone:
compare --resume gone --pairs 20                      | --resume:
compare --resume gone digits --dry-run                | --resume:
evaluate                                              | command line: the following arguments are required: RUN
evaluate smal                                         | smal:
evaluate /dev/zero                                    | /dev/zero:
evaluate small --steps 5                              | --steps:
evaluate small --skip linear                          | --skip:
evaluate small --sampler ddim --skip cubic            | command line: evaluation.skip: 'cubic'
evaluate small --sampler ddim --steps 51              | command line: evaluation.steps: 51
evaluate small --images 7                             | command line: evaluation.images: 7
evaluate small --split validation                     | --split: 'validation'
evaluate small --split test                           | data.split: 'test'
evaluate small --metrics fid                          | --metrics: 'fid'
evaluate small --extractor vgg16                      | command line: evaluation.extractor: 'vgg16'
evaluate small --extractor inception                  | command line: evaluation.extractor: 'inception'
evaluate small --weights-path x.pth                   | --weights-path:
evaluate small --data-path nowhere                    | --data-path:
evaluate small --out images.zip                       | --out: 'images.zip'
evaluate small --out taken.json                       | --out: taken.json
evaluate small --out taken.json/x                     | --out: taken.json/x
evaluate classifier.yaml --images 10000               | --images: 10000
evaluate classifier.yaml --extractor random           | --extractor: 'random'
sample                                                | command line: the following arguments are required: RUN
sample gone                                           | gone:
sample small --images 0                               | --images: '0'
sample small --steps 5                                | --steps:
sample small --sampler dpm                            | --sampler: 'dpm'
sample small --batch-size 0                           | --batch-size: '0'
sample small --seed -1                                | --seed: '-1'
sample small --out x.jpg                              | --out: 'x.jpg'
sample small --out taken.png                          | --out: taken.png
sample small --out text/x.png                         | --out: text/x.png
sample classifier.yaml                                | classifier: 'classification' is not allowed; allowed: for sample one of a workload with a function sample_images
export                                                | command line: the following arguments are required: name
export gone                                           | gone:
export night --trial t0009                            | --trial: 't0009'
export night --out x.txt                              | --out: 'x.txt'
export small --diffusers --out text/in                | --out: text/in
report nope                                           | nope:
knobs nothing                                         | PREFIX: 'nothing'
knobs --workload mnist                                | --workload: workload: unknown name 'mnist'
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files, a finished search `night`, one without trials, `taken`, and a trained model, `small`."""
    folder = tmp_path_factory.mktemp("refusals")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    searches.night(folder / "ray_results/night")
    run_folder(folder / "ray_results/small", tiny())
    (folder / "classifier.yaml").write_text(cfg.dump(cfg.baseline("digits_classifier")))
    save_file({}, folder / "classifier.safetensors")
    searches.make(folder / "taken", SEARCH)
    (folder / "taken/sessions.jsonl").write_text(
        '{"event": "begin", "time": 0, "monotonic_s": 1}\n{"event": "end", "time": 9, "monotonic_s": 61}'
    )
    return folder


def content_of(folder):
    """Every file with its size, but for what Python itself writes."""
    return {path: path.stat().st_size for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize("row", REFUSED.strip().splitlines(), ids=lambda row: row.partition("|")[0].strip())
def test_a_command_refuses(folder, monkeypatch, capsys, imports_as_before, this_machine, row):
    line, start = (part.strip() for part in row.split(" | "))
    command, *words = shlex.split(line)
    monkeypatch.chdir(folder)
    this_machine(2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = content_of(folder)
    module = importlib.import_module("tunediff.report.__main__" if command == "report" else f"tunediff.{command}")
    assert module.main(words) == 2
    out, error = capsys.readouterr()
    assert error.splitlines()[-1].startswith(f"error: {start.format(here=folder)}"), error
    assert out == ""
    assert content_of(folder) == before


@pytest.mark.parametrize(("file", "end"), [("experiment.yaml", ", or --resume .*"), ("other", "")])
def test_only_what_can_be_resumed_is_suggested(tmp_path, file, end):
    (tmp_path / file).touch()
    with pytest.raises(cfg.ConfigError, match=f"choose another name{end}$"):
        options.check_new(tmp_path, "experiment.yaml")


# --------- what is typed: words that stand together, names of options and of folders, and JSON wherever it is asked for

TINY = ["model.channels=8", "model.multipliers=[1]", "model.attention=[]", "data.max_images=64", "evaluation.images=16",
        "evaluation.steps=2", "evaluation.points=1", "evaluation.extractor=random", "loader.workers=0"]  # fmt: skip


def test_a_name_may_be_a_path_as_a_shell_completes_it(capsys, at_tmp_path):
    folder = searches.night(Path("ray_results/night"))
    for name in ("night", "night/", "ray_results/night", str(folder.absolute())):
        assert search_space.folder_of(name, Path("ray_results")) == folder.absolute()
    kept = (folder / "experiment.yaml").read_bytes()
    assert search.main(["--resume", "ray_results/night/", "--trials", "5", "--dry-run"]) == 0
    assert "trials: 5 ×" in capsys.readouterr().out
    assert (folder / "experiment.yaml").read_bytes() == kept, "a dry run leaves everything as it is"


@pytest.mark.training
def test_a_result_is_json_wherever_it_is_asked_for(capsys, at_tmp_path):
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
    assert (told["evaluate"]["schema"], Path(told["evaluate"]["json"]).is_file()) == (text.SCHEMA, True)
    assert Path(told["sample"]["path"]).is_absolute()
    assert Path(told["evaluate"]["json"]).is_absolute()
    assert told["train"]["metric"].startswith("FD")
    assert isinstance(told["train"]["value"], float)
