"""Search files of commands, and the values in what programs print."""

import json
import math
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
from tunediff.command.clock import LINE, PROCESS, TRAINING, CommandClock
from tunediff.command.metrics import MetricFile, MetricPattern, Reduction, declared, value_in
from tunediff.command.template import CommandTemplate
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


# ---------------------------------------------------------------------------------------- values in what programs print
PRINTED = [
    ("METRIC val_loss=0.25", 0.25),
    ("epoch 3: val_loss: 0.25, acc: 0.9", 0.25),
    ("val_loss=2.5e-1.", 0.25),
    ('{"step": 3, "val_loss": 0.25}', 0.25),
    ("{'val_loss': '0.25', 'epoch': '1.0'}", 0.25),
    ("│         val_loss          │    0.25000000953674316    │", 0.25000000953674316),
    ("Epoch 0: 100%|██| 3/3 [00:00<00:00, val_loss=0.250]", 0.25),
    ("val_loss: 25%", 25.0),
    ("val_loss=1_000", 1000.0),
    ("val_loss=-3", -3.0),
    ("val_loss: inf", math.inf),
    ("train_val_loss=1 val_loss_ema=2 my-val_loss: 3", None),
    ("val_loss\t0.25", 0.25),
    ("step 9: train_loss 0.3, val_loss 0.25, 20 ms", 0.25),
    ("val_loss 0.25", 0.25),
    ("val_loss 10 batches ago", None),
    ("val_loss: none", None),
    ("val_loss: 1,234.5 tokens", 1234.5),
    ("val_loss=12,345,678", 12345678.0),
    ("val_loss: 1'234.5", 1234.5),
    ("val_loss=0.25,acc=1", 0.25),
    ("METRIC val_loss=-1,234", -1234.0),
    ("val_loss went down", None),
]


@pytest.mark.parametrize(("line", "value"), PRINTED)
def test_finds_a_value_as_trainers_print_it(line, value):
    assert MetricPattern("val_loss", None, "x").find(line) == value


def test_nan_is_a_value_and_the_last_of_a_line_counts():
    assert math.isnan(MetricPattern("loss", None, "x").find("loss: nan"))
    assert MetricPattern("loss", None, "x").find("loss: 3 ... loss: 2") == 2.0


@pytest.mark.parametrize("printed", ["0,31", "1.234,5", "1,2345", "1 234.5", "12'34"])
@pytest.mark.parametrize("pattern", [None, r"loss: ([\d.]+)", r"loss: ([\d.,']+)"])
def test_a_number_that_can_be_read_in_two_ways_has_no_value(printed, pattern):
    reading = MetricPattern("loss", pattern, "x").read(f"loss: {printed}")
    assert math.isnan(reading.value)
    assert reading.unclear == printed


def test_a_pattern_that_goes_on_behind_its_group_reads_a_column():
    assert MetricPattern("loss", r"^\d+,([\d.]+),", "x").find("3,0.31,0.9") == 0.31


@pytest.mark.parametrize(("line", "unit"), [("1.2 GB", "GB"), ("95.2%", "%"), ("3 ms.", "ms"), ("3 samples", ""),
                                            ("3 h: 4", ""), ("3 it/s", "it/s")])  # fmt: skip
def test_the_unit_of_a_value_is_the_word_behind_it(line, unit):
    assert MetricPattern("x", None, "x").read(f"x: {line}").unit == unit


def test_a_pattern_has_one_group():
    assert MetricPattern("loss", r"Train Loss: ([0-9.]+)", "x").find("(step=5) Train Loss: 0.5, x") == 0.5
    assert MetricPattern("acc", None, "x").find("epoch 3 | loss 0.74 | acc 81.61%") == 81.61
    assert math.isnan(MetricPattern("loss", r"loss (\S+)", "x").find("loss unknown"))
    for pattern in ("loss", "(a)(b)", "("):
        with pytest.raises(ConfigError, match="--pattern"):
            MetricPattern("loss", pattern, "--pattern")


def test_reads_further_metrics_of_a_declared_line():
    assert declared("METRIC loss=1 tokens/s=2e3 name=x") == {"loss": 1.0, "tokens/s": 2000.0}
    assert declared("the METRIC loss=1") == {}


@pytest.mark.parametrize(
    ("reduce", "values"), [("last", [3, 1, 2]), ("mean:2", [3, 2, 1.5]), ("min", [3, 1, 1]), ("max", [3, 3, 3])]
)
def test_reduces_the_values_so_far(reduce, values):
    reduction = Reduction(reduce, "x")
    assert [reduction.add(value) for value in (3.0, 1.0, 2.0)] == values
    with pytest.raises(ConfigError, match="reduce"):
        Reduction(f"{reduce}:", "reduce")


def test_a_diverged_run_has_no_best_value():
    reduction = Reduction("min", "x")
    assert [reduction.add(1.0), math.isnan(reduction.add(math.nan)), math.isnan(reduction.add(0.5))] == [
        1.0,
        True,
        True,
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json"])
def test_reads_each_record_of_a_file_once(tmp_path, suffix):
    file = MetricFile(tmp_path / f"results.{suffix}")
    assert list(file.rows()) == []
    texts = {
        "jsonl": ['{"eval": {"loss": 3}}\n{"eval"', ': {"loss": 2}}\n'],
        "csv": ["step,eval.loss\n1,3\n2,", "2\n"],
        "json": [json.dumps({"eval": {"loss": 3}}), json.dumps({"eval": {"loss": 2}, "step": 2})],
    }[suffix]
    found, content = [], ""
    for text in texts:
        content = text if suffix == "json" else content + text
        file.path.write_text(content)
        found += [value_in(row, "eval.loss") for row in file.rows()]
        found += [value_in(row, "eval.loss") for row in file.rows()]
    assert found == [3.0, 2.0]


def test_what_a_file_held_before_the_program_began_is_no_news(tmp_path):
    for suffix, old, new in (("json", '{"loss": 9}', '{"loss": 9} '), ("jsonl", '{"loss": 9}\n' * 2, '{"loss": 9}\n')):
        path = tmp_path / f"results.{suffix}"
        path.write_text(old)
        file = MetricFile(path)
        assert list(file.rows()) == []
        path.write_text(new)  # the program begins it anew
        assert [row["loss"] for row in file.rows()] == [9]
        assert list(file.rows()) == []
    file = MetricFile(path)
    path.write_text(new + '{"loss": 8}\n')  # or appends to it
    assert [row["loss"] for row in file.rows()] == [8]


# ------------------------------------------------------------------------------------- which seconds of a program count
def test_without_a_line_the_clock_is_that_of_the_process():
    clock = CommandClock(100.0)
    clock.read("importing torch", 105.0)
    assert (clock.elapsed_s(110.0), clock.kind, clock.start_up_s(110.0)) == (10.0, PROCESS, None)
    assert clock.reached(10.0, 110.0)
    assert not clock.reached(10.0, 109.9)
    assert clock.remaining_s(10.0, 108.0) == pytest.approx(2.0)


@pytest.mark.parametrize("line", ["TUNEDIFF start", "step 0: compiled"])
def test_the_clock_begins_at_a_line_once(line):
    clock = CommandClock(100.0, start_line=re.compile("^step 0"))
    clock.read(line, 130.0)
    clock.read(line, 140.0)
    assert (clock.elapsed_s(141.0), clock.kind, clock.start_up_s(141.0)) == (11.0, LINE, 30.0)


def test_the_clock_stands_still_between_pause_and_go():
    clock = CommandClock(0.0)
    for line, now in (
        ("TUNEDIFF pause", 3.0),
        ("TUNEDIFF start", 5.0),
        ("TUNEDIFF pause", 7.0),
        ("TUNEDIFF pause", 8.0),
    ):
        clock.read(line, now)
    assert clock.elapsed_s(50.0) == 2.0
    clock.read("TUNEDIFF go", 60.0)
    assert (clock.elapsed_s(61.0), clock.kind) == (3.0, TRAINING)


def test_the_programs_own_seconds_count():
    clock = CommandClock(0.0, seconds_line=re.compile(r"train_time:(\d+)ms"))
    clock.read("step 1 train_time:4000ms", 5.0)
    assert (clock.elapsed_s(9.0), clock.kind) == (4.0, TRAINING)
    assert not clock.reached(4.1, 8.0)
    assert clock.reached(4.0, 8.0)
    assert clock.reached(4.1, 8.2), "a program that prints no seconds any more ends by the judge's"


def resumed(**settings):
    """Return the clock of a process that was started at 100 s and goes on from second 3."""
    return CommandClock(100.0, resumed_s=3.0, **settings)


def test_a_resumed_clock_goes_on_from_its_checkpoint():
    assert resumed().elapsed_s(101.0) == 4.0
    clock = resumed(waits=True)
    assert clock.elapsed_s(130.0) == 3.0, "its start-up does not count again"
    clock.read("TUNEDIFF start", 130.0)
    assert (clock.elapsed_s(131.0), clock.start_up_s(131.0)) == (4.0, 30.0)
    assert not clock.reached(4.5, 131.0)


@pytest.mark.parametrize(("printed", "seconds"), [("1.0", 4.0), ("3.5", 3.5)])
def test_own_seconds_go_on_whether_the_program_has_saved_its_counter_or_not(printed, seconds):
    clock = resumed(seconds_line=re.compile(r"train_time:([\d.]+)s"))
    assert clock.elapsed_s(105.0) == 3.0
    clock.read(f"train_time:{printed}s", 105.0)
    assert clock.elapsed_s(105.0) == seconds
    clock.read("train_time:5.0s", 109.0)
    assert clock.elapsed_s(109.0) == seconds + 5.0 - float(printed)


# -------------------------------------------------------------------------- a command line with the parameters of a run
def rendered(command, values=(), **places):
    return CommandTemplate.of(command, "--run").render(dict(values), places)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python train.py --lr {lr} --seed {seed}", ["python", "train.py", "--lr", "0.001", "--seed", "3"]),
        ("a --out={folder}/x 'two words' {lr}", ["a", "--out=/f/x", "two words", "0.001"]),
        ("a {overrides}", ["a", "lr=0.001", "batch_size=64", "use_ema=true"]),
        ("a --lr {lr} {flags}", ["a", "--lr", "0.001", "--batch-size", "64", "--use-ema", "true"]),
        ("""a '{"json": 1}' {{lr}} {unknown}""", ["a", '{"json": 1}', "{lr}", "{unknown}"]),
        (["a", "b c", "{lr}"], ["a", "b c", "0.001"]),
    ],
)
def test_values_stand_where_the_command_names_them(command, words):
    values = {"lr": 0.001, "batch_size": 64, "use_ema": True}
    assert rendered(command, values, seed=3, folder="/f") == words


def test_a_value_stays_one_word_and_reaches_no_shell():
    assert rendered("echo {text}", {"text": "a; rm -rf $HOME 'b'"}) == ["echo", "a; rm -rf $HOME 'b'"]
    shell = CommandTemplate.of("echo {text} | cat", "--run", shell=True).render({"text": "a; b"}, {})
    assert shell == ["/bin/sh", "-c", "echo 'a; b' | cat"]


@pytest.mark.parametrize("quoted", ["{x}", "'{x}'", '"{x}"', "'a'{x}\\'", '"it\'s {x}"'])
@pytest.mark.parametrize("value", ["two words", "$(echo no) `echo no` $HOME", 'it\'s \\ "q"'])
def test_a_shell_gets_a_value_as_it_is_inside_of_quotes_too(quoted, value):
    words = CommandTemplate.of(f"printf '[%s]' {quoted}", "--run", shell=True).render({"x": value}, {})
    expected = quoted.replace("'a'", "a").replace("\\'", "@").strip("'\"").replace("{x}", value).replace("@", "'")
    assert subprocess.run(words, capture_output=True, text=True).stdout == f"[{expected}]"


@pytest.mark.parametrize(
    ("command", "parameters", "key"),
    [
        ("python a.py {seed}", ["lr"], "lr"),  # the command never gets it
        ("python a.py {lr}", ["lr"], "seed"),
        ("python a.py {lr} {seed}", [], "{lr}"),
        ("python a.py {seed}", ["seed"], "seed"),
        ("python 'a.py", [], "python"),
        ("", [], "''"),
        ("python --x={overrides}", [], "--x={overrides}"),
    ],
)
def test_refuses_what_would_not_reach_the_command(command, parameters, key):
    with pytest.raises(ConfigError, match="^--run: ") as refusal:
        CommandTemplate.of(command, "--run").check(parameters, "--run")
    assert key in str(refusal.value)


def test_a_command_without_a_seed_runs_where_that_is_meant():
    CommandTemplate.of("python a.py {lr}", "--run").check(["lr"], "--run", unseeded=True)
    with pytest.raises(ConfigError, match="gets a seed, with --unseeded"):
        CommandTemplate.of("python a.py {lr} {seed}", "--run").check(["lr"], "--run", unseeded=True)
