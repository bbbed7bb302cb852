"""The time of the backward pass and of the optimizer in loops that call them by themselves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import toy, train
from tests.toy.train import INPUTS, TARGETS, error, network
from tunediff.training.own_step import OwnStep
from tunediff.training.phases import Phases


@pytest.fixture
def phases(passing):
    """The phases of a step whose forward pass is on, in a loop that makes its own steps."""
    phases = Phases(torch.device("cpu"))
    own_step = OwnStep(torch.Tensor.detach, phases)
    own_step.watch(losses=True)
    phases.switch("forward")
    yield phases
    own_step.close()


class Calls(torch.optim.SGD):
    """Calls what its step is given, with all that it takes."""

    def step(self, call, *arguments):
        return call(*arguments)


class Returns(torch.optim.SGD):
    """Returns what its step is given."""

    def step(self, argument):
        return argument


def optimizer(kind=Calls):
    return kind([nn.Parameter(torch.zeros(1))], 0.1)


def loss_of(passing, seconds):
    """A loss whose backward pass takes these seconds."""
    loss = torch.zeros(1, requires_grad=True) * 1.0
    loss.register_hook(lambda _: passing(seconds))
    return loss


def ended(phases):
    phases.switch(None)
    return {name: seconds for name, seconds in phases.read().items() if seconds}


def test_optimizer_calls_its_argument_as_it_likes(phases, passing):
    assert optimizer().step(lambda scale: 2 * scale, 3.0) == 6.0

    def closure(backward=True):
        passing(1)
        return backward

    assert optimizer().step(closure, False) is False
    assert ended(phases) == {"forward": 1.0}


def test_optimizer_gets_a_model_itself(phases):
    model = nn.Linear(2, 2)
    assert optimizer().step(lambda given: given, model) is model
    assert optimizer(Returns).step(model) is model


def test_backward_and_update_in_a_named_phase_are_parts_of_it(passing):
    def run(trial):
        net = network(trial.knobs)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        net = trial.prepare(net, optimizer=optimizer)
        trial.evaluate_with(lambda: error(net))
        for inputs, targets in trial.steps(DataLoader(TensorDataset(INPUTS, TARGETS), 8)):
            loss = F.mse_loss(net(inputs), targets)
            loss.register_hook(lambda _: passing(4))
            with trial.phase("discriminator"):
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()

    for point in train(toy(), samples=32, body=run, evaluates=True).points:
        parts = {name: point[f"step_{name}_s"] for name in ("discriminator", "backward", "optimizer")}
        assert parts == {"discriminator": 4.0, "backward": 0.0, "optimizer": 0.0}


def test_no_phase_changes_while_a_cuda_graph_is_captured(monkeypatch, phases, passing):
    """An event of a phase that is recorded into a graph cannot be read."""
    phases.of_device = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    loss_of(passing, 4).backward()
    optimizer().step(passing, 8)
    assert ended(phases) == {"forward": 12.0}


def test_optimizer_that_catches_an_inner_ones_error_ends_its_phase(phases, passing):
    def fails(message):
        raise RuntimeError(message)

    def steps(seconds):
        passing(seconds)
        with pytest.raises(RuntimeError, match="inner"):
            optimizer().step(fails, "of the inner optimizer")

    optimizer().step(steps, 8)
    passing(1)
    assert ended(phases) == {"optimizer": 8.0, "forward": 1.0}
