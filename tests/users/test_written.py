"""What a user's file writes goes into the folder of the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import CPU, Told, check_here, train
from tunediff import config as cfg
from tunediff.core.clock import Budget
from tunediff.inspector.check import WARNED
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import run

PLAIN = (Path(__file__).parent / "plain.py").read_text()
AFTER = "        trial.step(loss, optimizer)\n"


@pytest.fixture
def baseline(at_tmp_path):
    """The baseline of a file whose training ends with these lines; it runs where the file lies."""

    def write(*last):
        Path("mine.py").write_text(PLAIN.replace(AFTER, AFTER + "".join(f"    {line}\n" for line in last)))
        return cfg.baseline("mine.py")

    return write


def test_each_run_has_a_folder_for_what_it_writes(baseline, tmp_path):
    config = baseline("(trial.folder / 'notes').write_text(str(trial.step_count))", "print(trial.folder)")
    for name, samples in {"a": 16, "b": 32}.items():
        run(Engine(config, Budget(samples=samples), CPU, Observer(), folder=tmp_path / name))
    notes = {path.read_text() for path in tmp_path.rglob("notes")}
    assert notes == {"1", "2"}


def test_the_folder_of_a_run_that_keeps_nothing_goes_with_it(baseline, capsys):
    run(Engine(baseline("print(trial.folder)"), Budget(samples=16), CPU, Observer()))
    folder = Path(capsys.readouterr().out.strip())
    assert folder.is_absolute()
    assert not folder.exists()


# ---------- what public scripts do that a workload need not: it works under a trial, or is told with the right sentence
PREPARED = "    net = trial.prepare(net)\n"


def checked(folder, text):
    (folder / "mine.py").write_text(text)
    return check_here(cfg.baseline(str(folder / "mine.py")))


AGENT = """
class Agent(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def get_value(self, x):
        return self.net(x)


"""


def test_a_model_that_is_used_through_a_method_is_told_what_to_call(tmp_path):
    script = PLAIN.replace("def train(", f"{AGENT.strip()}\n\n\ndef train(").replace(
        PREPARED, "    net = trial.prepare(Agent(net))\n"
    )
    script = script.replace("net(x)", "net.get_value(x)").replace("net(X)", "net.get_value(X)")
    script = script.replace("return self.net.get_value(x)", "return self.net(x)")
    assert checked(tmp_path, script)["warnings"] == [WARNED["methods"]]


def test_arithmetic_is_counted_by_torch_for_the_mfu(tmp_path):
    """Two layers, 4 × 8 and 8 × 1: forward, gradients of both weights, and of the second layer's inputs."""
    text = PLAIN.replace("trial.prepare(net)", 'trial.prepare(net, flops_per_sample="count")')
    (tmp_path / "mine.py").write_text(text)
    told = Told()
    train(cfg.baseline(str(tmp_path / "mine.py")), samples=64, evaluates=True, observer=told)
    assert told.points[-1].flops_per_sample == 2 * (2 * 4 * 8 + 2 * 8) + 2 * 8
    assert told.points[-1].peak_share > 0


BLOCKED = """
import importlib.machinery, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("sklearn", "torch_fidelity", "torchvision.models")):
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise ImportError(f"{spec.name} is not to be imported")

sys.meta_path.insert(0, Blocked())
for name in ("ray_backend.tuner", "ray_backend.slot", "tuning.worker", "report.page", "report.text", "report.files"):
    importlib.import_module(f"tunediff.{name}")
from tunediff import search, train
for command, words in (
    (search, ["mine.py", "--check"]), (train, ["--config", "mine.py", "--samples", "64", "--storage", "."]),
):
    assert command.main(words) == 0
"""


@pytest.mark.nightly
def test_a_training_of_ones_own_needs_no_library_of_ours_for_images(tmp_path):
    """What reads digits, judges images and has networks for them may be missing."""
    (tmp_path / "mine.py").write_text(PLAIN)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", BLOCKED]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
