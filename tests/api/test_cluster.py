"""A search by a call from Python, and the same one by the command."""

import json
import subprocess
import sys

import pytest

import tunediff

pytestmark = pytest.mark.cluster

SCRIPT = """
import signal, types
from dataclasses import dataclass
from typing import Annotated
import ray, torch, tunediff

@dataclass(frozen=True)
class Knobs:
    width: Annotated[int, tunediff.Choice(4, 8, 16)] = 8
    lr: Annotated[float, tunediff.Range(1e-3, 1e-1, log=True)] = 0.01

def train(trial):
    net = trial.prepare(torch.nn.Linear(4, trial.knobs.width))
    optimizer = torch.optim.SGD(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(lambda: {"score": trial.knobs.width + trial.knobs.lr})
    for (x,) in trial.batches((torch.ones(64, 4),)):
        trial.step(net(x).square().mean(), optimizer)

workload = types.SimpleNamespace(Knobs=Knobs, OBJECTIVE=tunediff.Metric("score", "min"), train=train)
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
fixed = {"loader.batch_size": 8, "loader.workers": 0, "precision.amp": "none"}
search = tunediff.run_search(workload, fixed, name="called", trials=3, budget=1, confirm=0, seed=7, check=False)
assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
assert not ray.is_initialized()
"""
SAME = [
    "loader.batch_size=8",
    "loader.workers=0",
    "precision.amp=none",
    "--name",
    "typed",
    "--trials",
    "3",
    "--budget",
    "1s",
]


def run(folder, *words):
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def called(folder):
    (folder / "script.py").write_text(SCRIPT)
    assert run(folder, "script.py") == "", "a call prints nothing"
    return tunediff.open_search("called", folder / "ray_results")


def drawn(search):
    return [tuple(row) for row in search.trials()[["trial", "width", "lr"]].to_numpy().tolist()]


def test_a_call_leaves_the_process_as_it_was(tmp_path):
    search = called(tmp_path)
    assert search.json()["statuses"]["ok"] == 3
    assert drawn(search)[0] == ("t0000", 8, 0.01)
    assert len(set(drawn(search))) == 3


@pytest.mark.nightly
def test_a_call_and_the_command_find_the_same_on_the_same_seed(tmp_path):
    search = called(tmp_path)
    file = str(search.folder / "workload" / "notebook.py")
    command = ["-m", "tunediff.search", "--json", "--quiet", "--no-check"]
    typed = json.loads(run(tmp_path, *command, file, *SAME, "--confirm", "0", "--seed", "7"))
    keys = ("statuses", "best_trial", "best_configuration", "best_values", "baseline_values", "speedup_unknown")
    assert {key: search.json()[key] for key in keys} == {key: typed[key] for key in keys}
    assert drawn(search) == drawn(tunediff.open_search("typed", tmp_path / "ray_results"))
