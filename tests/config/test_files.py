"""Configurations in files and as words on a command line."""

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tunediff import config as cfg
from tunediff.config import ConfigError

DIFFUSION = cfg.find("diffusion").schema
DEFAULT = DIFFUSION.default()


def test_import_is_light():
    code = "import sys, tunediff.config, tunediff.search_space, tunediff.core.trial_record, tunediff.core.clock; print([m for m in ('torch', 'ray', 'optuna') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_files_say_their_format_and_one_of_a_newer_format_is_refused(tmp_path):
    path, config = tmp_path / "c.yaml", cfg.baseline("digits")
    path.write_text(cfg.dump(config, ["a comment"]))
    assert "\ntunediff_format: 1\n" in path.read_text()
    path.write_text(path.read_text().replace("tunediff_format: 1\n", ""))
    assert cfg.load(path) == config, "the first files had no number"
    for value, reason in ((2, "; a newer version of tunediff has written it"), ("one", ""), (True, ""), (0, "")):
        path.write_text(f"tunediff_format: {value}\nworkload: digits\n")
        with pytest.raises(ConfigError) as error:
            cfg.load(path)
        assert str(error.value) == f"{path}: tunediff_format: {value!r} is not allowed; allowed: 1 to 1{reason}"


def test_numbers_with_an_exponent_are_numbers_and_such_strings_stay_strings(tmp_path):
    (tmp_path / "s.yaml").write_text("low: 1e-3\nhigh: 2.5E+4\nplain: 1e5\nhash: 12e45678\n")
    assert cfg.read_yaml(tmp_path / "s.yaml") == {"low": 1e-3, "high": 25_000.0, "plain": 1e5, "hash": "12e45678"}
    words = {"a": "1e-3", "b": "12e4", "c": ["3E+5"], "d": 0.5}
    (tmp_path / "w.yaml").write_text(cfg.to_yaml(words))
    assert cfg.read_yaml(tmp_path / "w.yaml") == words


def test_configurations_travel_to_other_processes():
    config = cfg.override(cfg.baseline("digits"), {"timesteps.name": "info_noise", "timesteps.bins": 7})
    again = pickle.loads(pickle.dumps(config))
    assert again == config == copy.deepcopy(config)
    assert type(again) is type(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loader: [1, 2", "is not valid YAML"),
        ("- a\n- b", "must hold `key: value` lines, found list"),
        ("loader.workers: 1\nloader.workers: 2", "'loader.workers' is given twice"),
        ("workload: diffusion\nloader.workers: 1\nloader: {workers: 2}", ": loader.workers: is given twice, 1 and 2"),
        ("workload: diffusion\nloader: {wrkers: 2}", "loader.wrkers: no such knob; did you mean loader.workers"),
        ("loader: {workers: 2}", "workload: is missing; allowed: diffusion"),
        ("workload: sudoku", "workload: unknown name 'sudoku'; allowed: diffusion"),
        ("data: !!python/object/apply:os.system [ls]", "is not valid YAML"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        cfg.load(path)
    assert str(path) in str(error.value)


def test_missing_file_and_binary_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        cfg.load(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        cfg.load(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; it needs `key: value` lines"),
        ("# nothing\n", "is empty"),
        ("a: 2026-13-45", "is not valid YAML: month must be in 1..12"),
        ("a: 1\0", "is not valid YAML: .*"),
    ],
)
def test_files_that_nobody_wrote_by_hand(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(tmp_path))}/c.yaml: {message}[^\n]*$"):
        cfg.read_yaml(tmp_path / "c.yaml")


def test_an_anchor_may_be_used_again(tmp_path):
    (tmp_path / "c.yaml").write_text("a: &many [1, 2]\nb: *many\nc: {d: &one 3, e: *one}\n")
    assert cfg.read_yaml(tmp_path / "c.yaml") == {"a": [1, 2], "b": [1, 2], "c": {"d": 3, "e": 3}}


def test_command_line_overrides():
    words = ["optimizer.lr=1e-3", "loader.batch_size=64", "model.multipliers=[1, 2]", "data.path=null"]
    assert cfg.parse_overrides(words, DIFFUSION) == {
        "optimizer.lr": 1e-3, "loader.batch_size": 64, "model.multipliers": [1, 2], "data.path": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="write knob=value"):
        cfg.parse_overrides(["loader.batch_size"], DIFFUSION)
    with pytest.raises(ConfigError, match="did you mean optimizer.lr"):
        cfg.parse_overrides(["lr=1"], DIFFUSION)


def test_relative_paths_become_absolute(tmp_path, at_tmp_path):
    (tmp_path / "c.yaml").write_text("workload: diffusion\ndata: {name: images, path: pictures}")
    assert cfg.load(tmp_path / "c.yaml").data.path == str(tmp_path / "pictures")


def test_the_workload_of_own_images_takes_its_path_from_the_command_line(tmp_path):
    assert cfg.named(Path("images"), [f"data.path={tmp_path}"]).data.path == str(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.path: None is not allowed"):
        cfg.named(Path("images"), [])


def test_a_workload_is_found_once_whoever_asks():
    found = cfg.find("diffusion", "one.yaml")
    assert found is cfg.find("diffusion", "other.yaml") is cfg.of(DEFAULT)
    assert (found.objective.name, found.objective.mode) == ("frechet", "min")
    with pytest.raises(
        ConfigError, match=r"^my.yaml: workload: unknown name 'digit'; allowed: diffusion, classification, a"
    ):
        cfg.find("digit", "my.yaml")
    assert cfg.baseline_names()[:4] == ["cifar10", "images", "digits", "cifar10_classifier"]


@pytest.mark.parametrize("value", ["nan", "inf", "1e400", "-inf"])
def test_what_is_no_finite_number_is_refused_with_what_is_allowed(value):
    """YAML 1.1 reads these words as text."""
    for knob, allowed in (("loader.batch_size", "a whole number"), ("optimizer.lr", "a number")):
        with pytest.raises(ConfigError, match=rf"^command line: {knob}: .* is not allowed; allowed: {allowed}"):
            cfg.with_words(DEFAULT, [f"{knob}={value}"])
        with pytest.raises(ConfigError, match=rf"^x.yaml: {knob}: '{value}' is not allowed; allowed: {allowed}"):
            cfg.override(DEFAULT, {knob: value}, "x.yaml")
