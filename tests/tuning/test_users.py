"""A whole search of a user's own workload, and what becomes of its faults."""

import os
import re
import signal

import pytest

from tests.tuning.conftest import block

pytestmark = pytest.mark.cluster

FAULTY = '''
"""Learns numbers, and goes wrong in the way it is told to."""

import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from helper import Net
from tunediff import Metric


@dataclass(frozen=True)
class Knobs:
    fault: Literal["none", "nan", "oom", "hang", "raise"] = "none"
    unused: float = 0.5


OBJECTIVE = Metric("accuracy", "max")
BASELINE = {"loader.batch_size": 16, "loader.workers": 0, "evaluation.points": 2}
UNIT = "pairs"
X = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def train(trial):
    net = trial.prepare(Net())
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    trial.keep(net=net, optimizer=optimizer)

    @torch.no_grad()
    def judge():
        if trial.knobs.fault == "hang":
            time.sleep(10_000)
        return {"accuracy": (net(X).sign() == Y.sign()).float().mean()}

    trial.evaluate_with(judge)
    steps = 0
    for x, y in trial.batches((X, Y)):
        loss = F.mse_loss(net(x), y)
        if trial.knobs.fault == "nan":
            loss = loss * float("nan")
        if trial.knobs.fault == "oom":
            torch.empty(2**50)
        steps += 1
        if trial.knobs.fault == "raise" and steps == 100:
            raise ValueError("the hundredth step")
        trial.step(loss, optimizer)
'''
HELPER = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))
"""


@pytest.mark.nightly
def test_a_users_workload_and_its_faults(search, tmp_path):
    """Checked, copied, trained by two ranks too; each fault a status with the user's own line; a killed worker resumes;
    what is edited or deleted meanwhile does not matter."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "helper.py").write_text(HELPER)
    kinds = ["none", "nan", "oom", "raise", "hang"]
    one = search(
        "own",
        budget={"per_trial": "3s", "deadline": "50s"},
        trials=[{}, *({"fault": kind} for kind in kinds[1:]), {"parallel.workers": 2}, {"loader.batch_size": 32}],
    )
    one.file.write_text(one.file.read_text().replace("workload: digits", "workload: faulty.py").partition("fixed:")[0]
                        + "budget:" + one.file.read_text().partition("budget:")[2])  # fmt: skip
    one.start(str(one.file), "--name", "own")
    one.wait_for(lambda: one.trial("t0000") is not None)
    (tmp_path / "faulty.py").unlink()
    (tmp_path / "helper.py").write_text("raise ImportError")
    one.wait_for(lambda: (found := one.trial("t0006")) is not None and len(found.points) == 1)
    os.kill(one.events("t0006", "worker")[-1]["pid"], signal.SIGKILL)
    assert one.process.wait() == 0, one.log

    trials = [one.trial(f"t{number:04d}") for number in range(7)]
    assert [trial.status for trial in trials] == ["ok", "nan", "oom", "error", "timeout", "ok", "ok"], one.log
    assert re.fullmatch(
        r"ValueError: the hundredth step \(faulty.py, line \d+: raise ValueError\(.*\)\)", trials[3].reason
    )
    told = (one.folder / "trials/t0003/traceback-rank0.txt").read_text()
    assert "workload/faulty.py" in told
    assert "tunediff/training" not in told
    assert "not done after 50 s" in trials[4].reason
    assert trials[5].points[-1].device_s == pytest.approx(2 * trials[5].points[-1].train_s)
    assert trials[6].attempts == 2
    assert [point.index for point in trials[6].points] == [1, 2]
    assert "never reads" in trials[0].not_effective["unused"]
    assert "WARNING: faulty.py: the check never saw train(trial) read unused: " in one.log
    assert "checking faulty.py: 2 steps and 2 evaluations on 2 ranks" in one.log
    assert re.search(r"t0000 ok +[\d.]+ s  accuracy [\d.]+ .*pairs/s", one.log)  # 1 where all are right
    assert "images" not in one.log
    assert block(one.log)["best"]
