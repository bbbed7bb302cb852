"""A search by a call from Python, with Ray."""

import subprocess
import sys

import pytest

import tunediff

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]  # `tests/tuning/test_search.py` resumes by a call from Python

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


def test_a_call_leaves_the_process_as_it_was(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    search = tunediff.open_search("called", tmp_path / "ray_results")
    assert search.json()["search"]["statuses"]["ok"] == 3
    drawn = [tuple(row) for row in search.trials()[["trial", "width", "lr"]].to_numpy().tolist()]
    assert drawn[0] == ("t0000", 8, 0.01)
    assert len(set(drawn)) == 3
