"""A training of two processes that torchrun starts, as a command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command.test_comparison import compared
from tests.command.test_run import processes_of, wait_until

pytestmark = pytest.mark.nightly

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


@pytest.fixture(autouse=True)
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    return tmp_path


def test_equal_sides_of_two_processes_do_not_differ_and_a_harm_is_found(program, capsys):
    code, result = compared(capsys, "--run", RUN, "--run", f"{LAUNCH} --lr {{lr}} --seed 9{{seed}}", "lr=0.05",
        "--pairs", "6", "--name", "equal", "--seed", "100")  # fmt: skip
    assert (code, result["verdict"]) == (10, "no_difference")
    assert len({*result["candidates"][0]["values"], *result["candidates"][1]["values"]}) == 2 * result["rule"]["rounds"]
    code, result = compared(capsys, "--run", RUN, "lr=0.05", "lr=0.0005", "--name", "harm")
    assert (code, result["verdict"]) == (11, "worse")
    code, result = compared(capsys, "--run", RUN, "lr=0.05", "lr=5", "--name", "diverges")
    assert code in (11, 12), "it diverges to numbers, or to NaN"


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
