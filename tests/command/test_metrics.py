"""Values in what programs print."""

import json
import math
import re
import subprocess

import pytest

from tunediff.command.clock import LINE, PROCESS, TRAINING, CommandClock
from tunediff.command.metrics import MetricFile, MetricPattern, Reduction, declared, value_in
from tunediff.command.template import CommandTemplate
from tunediff.config import ConfigError

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
