"""Equal sides by whole comparisons: whatever is fixed once for a side would be found as a difference."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comparisons import PLAIN
from tunediff import compare
from tunediff import config as cfg
from tunediff.core import machine
from tunediff.inspector import check

NOISY = "import random, sys; print('loss:', 2 + random.Random(int(sys.argv[1])).gauss(0, 0.1))"
FALLS = """
import math, random, sys, time
draw = random.Random(int(sys.argv[1]))
print("TUNEDIFF start", flush=True)
for i in range(1, 400):
    time.sleep(0.004)
    print("loss:", 0.2 + math.exp(-i * math.exp(0.1 * draw.gauss(0, 1)) / 15), flush=True)
"""
DRAWN = "import numpy as np\nORDER = np.random.default_rng().permutation(64)\n"
COMMAND = ("--run", f"{sys.executable} train.py {{seed}}", "--objective", "loss")
KINDS = {
    "command": (NOISY, [*COMMAND, "--outcome", "final"]),
    "parallel": (NOISY, [*COMMAND, "--outcome", "final", "--parallel"]),
    "target": (FALLS, [*COMMAND, "--target", "loss<=0.4", "--budget", "20s"]),
    "workload": (PLAIN, ["train.py", "--budget", "0.3s"]),
    "drawn at its import": (DRAWN + PLAIN, ["train.py", "--budget", "0.3s"]),
}


@pytest.mark.nightly
@pytest.mark.training
@pytest.mark.parametrize("kind", KINDS)
def test_equal_sides_are_not_called_different(kind, monkeypatch, capsys, at_tmp_path):
    """At a level of 1 % one of five is found in 5 % of all tries, and two in a thousandth of them."""
    if kind == "parallel" and machine.cores() < 2:
        pytest.skip("two runs at a time need two cores")
    program, words = KINDS[kind]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").write_text(program)
    different = 0
    for number in range(5):
        options = ["--equal", "--no-check", "--quiet", "--json", "--level", "0.01", "--pairs", "6"]
        code = compare.main([*words, *options, "--seed", str(50_000 * (number + 1)), "--name", f"x{number}"])
        result = json.loads(capsys.readouterr().out)
        assert result["rule"]["equal_sides"], result["failure"]
        different += code != compare.NO_DIFFERENCE
    assert different <= 1


def test_a_file_that_asks_the_system_while_it_is_imported_is_named(tmp_path):
    """Its draw would be the same in all runs of a side; what a library draws is none of the file's."""
    drawn = {
        "numpy_draws": (DRAWN, "numpy_draws.py:2"),
        "python_draws": ("import random\nrandom.Random()\n", "python_draws.py:2"),
        "torch_draws": ("import torch\ntorch.seed()\n", "torch_draws.py:2"),
        "helper_draws": ("import helper\n", "helper.py:1"),
        "none_draws": ("import numpy as np\nnp.random.default_rng(3); np.random.rand()\n", ""),
    }
    (tmp_path / "helper.py").write_text("import os; os.urandom(4)\n")
    for name, (source, _) in drawn.items():
        (tmp_path / f"{name}.py").write_text(source + PLAIN)
    files = [str(tmp_path / f"{name}.py") for name in drawn]
    done = subprocess.run([sys.executable, "-c", ASKS, *files], capture_output=True, text=True, check=True)
    named = [line.partition(" ")[0] for line in done.stdout.splitlines()]
    assert named == [expected for _, expected in drawn.values()]


def test_what_two_imports_of_a_file_differ_in_is_named(tmp_path):
    """Whatever it comes from: the clock is asked without a generator."""
    file = tmp_path / "clocked.py"
    file.write_text(f"import time\n{DRAWN}SEED = time.time_ns()\nFIXED = np.arange(3)\n{PLAIN}")
    warnings = check.before_search(cfg.baseline(str(file)), lambda line: None, imports_twice=True)["warnings"]
    assert [line.partition(" ")[0] for line in warnings if "file is imported" in line] == ["ORDER", "SEED"]


ASKS = """
import sys
from tunediff.training.prepared import prepare
for file in sys.argv[1:]:
    print(prepare(file))
"""
