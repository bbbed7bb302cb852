"""The measurement of the step on a GPU, without one: its commands are taken, and its parts run with tiny sizes."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks.gpu_step.__main__ import PARTS, TUNED, Bench, words_of
from benchmarks.peers import __main__ as peers
from tunediff import search

PYTHON_PARTS = [name for name in PARTS if name not in ("tests", "search", "peers", "step-1024", "step-32", "step-512")]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path, time.monotonic() + 600, dry=True)


def test_peers_take_the_words_that_they_are_given(bench):
    given = peers.arguments(words_of(bench)["peers"][1:])
    assert (given.peers, given.batch) == (["diffusers"], 128)
    assert {*TUNED, "compile.capture"} <= {word.partition("=")[0] for word in given.words}


def test_search_takes_the_words_that_it_is_given(bench, capsys):
    assert search.main([*words_of(bench)["search"][1:], "--dry-run"]) == 0
    assert "trials: 3 × 10s" in capsys.readouterr().out


@pytest.mark.nightly
def test_tests_of_a_gpu_are_found(bench):
    done = subprocess.run([sys.executable, "-m", *words_of(bench)["tests"], "--co"], capture_output=True, text=True)
    assert (done.returncode, "capture" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    "name", [name if name == "ceilings" else pytest.param(name, marks=pytest.mark.nightly) for name in PYTHON_PARTS]
)
def test_part_runs_dry(bench, name):
    PARTS[name][0](bench)
    rows = [json.loads(line) for line in (bench.out / "rows.jsonl").read_text().splitlines()]
    assert not [row for row in rows if row["what"] == "FAILED"]
