"""What the workload of tests does; tests replace `train` where they want another one."""

import torch
import torch.nn.functional as F
from torch import nn

INPUTS = torch.randn(44, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.square().sum(1, keepdim=True)
STEPS = 10
IMAGES = 8 * STEPS


def network(knobs):
    return nn.Sequential(
        nn.Linear(4, knobs.width), nn.BatchNorm1d(knobs.width) if knobs.norm else nn.Identity(), nn.SiLU(),
        nn.Dropout(knobs.dropout), nn.Linear(knobs.width, 1),
    )  # fmt: skip


class Average:
    """A sum of what it was given: something of one's own that a training keeps."""

    def __init__(self):
        self.total, self.seen = torch.zeros(()), []

    def add(self, loss):
        self.total = self.total + loss.detach()
        self.seen.append(loss.item())

    def state_dict(self):
        return {"total": self.total, "seen": self.seen}

    def load_state_dict(self, state):
        self.total, self.seen = state["total"].clone(), list(state["seen"])


def begin(trial, **more):
    """Net and optimizer, kept."""
    net = trial.prepare(network(trial.knobs))
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer, **more)
    return net, optimizer


def error(net):
    """Of the whole set, in evaluation mode."""
    net.eval()
    with torch.no_grad():
        found = F.mse_loss(net(INPUTS), TARGETS).item()
    net.train()
    return {"error": found}


def train(trial):
    average = Average()
    net, optimizer = begin(trial, average=average)
    trial.evaluate_with(lambda: error(net))
    for inputs, targets in trial.batches((INPUTS, TARGETS)):
        inputs = inputs + 0.1 * torch.randn((trial.shard.total, 4), generator=trial.rng)[trial.shard.mine]
        with trial.autocast():
            loss = F.mse_loss(net(inputs).float(), targets)
        average.add(loss)
        trial.step(loss, optimizer)


# ------------------------------------------------------------------------------------------- pieces for other trainings
def loss_of(net, batch):
    inputs, targets = batch
    return F.mse_loss(net(inputs), targets)


def plain(begun=lambda trial, net: None, each=lambda trial, net: None, done=lambda trial, net: None):
    """A `train` of steps: calls `begun` before the first batch, `each` before each step, `done` behind the loop."""

    def body(trial):
        net, optimizer = begin(trial)
        begun(trial, net)
        for batch in trial.batches((INPUTS, TARGETS)):
            each(trial, net)
            trial.step(loss_of(net, batch), optimizer)
        done(trial, net)

    return body
