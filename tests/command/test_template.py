"""A command line with the parameters of a run."""

import subprocess

import pytest

from tunediff.command.template import CommandTemplate
from tunediff.config import ConfigError


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
