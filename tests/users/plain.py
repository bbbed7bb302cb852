"""A user's workload as short as it can be: numbers from numbers."""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import nn

import tunediff  # noqa: F401 – for edits of this file
from tunediff import Choice, Metric, Range, Trial

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


@dataclass(frozen=True)
class Knobs:
    """What can be set."""

    width: Annotated[int, Choice(4, 8, 16)] = 8
    """Of the hidden layer."""
    lr: Annotated[float, Range(1e-3, 1e-1, log=True)] = 1e-2
    dropout: float = 0.0


OBJECTIVE = Metric("accuracy", "max")
BASELINE = {"loader.batch_size": 16, "loader.workers": 0, "evaluation.points": 2}
PRESETS = {"large": {"width": 16}}


def train(trial: Trial) -> None:
    net = nn.Sequential(
        nn.Linear(4, trial.knobs.width), nn.Dropout(trial.knobs.dropout), nn.Linear(trial.knobs.width, 1)
    )
    net = trial.prepare(net)
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(lambda: judge(net))
    for x, y in trial.batches((X, Y)):
        with trial.autocast():
            loss = F.mse_loss(net(x), y)
        trial.step(loss, optimizer)


@torch.no_grad()
def judge(net):
    return {"accuracy": (net(X).sign() == Y.sign()).float().mean()}
