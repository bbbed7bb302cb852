"""Loops by epochs over a loader of one's own, and loops that make their steps by themselves."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from tests.helpers import CPU, Told, assert_equal, ranks, toy, train, weights
from tests.toy.train import INPUTS, TARGETS, error, network
from tunediff import epochs
from tunediff.config import ConfigError
from tunediff.distributed import World
from tunediff.integrations import require
from tunediff.integrations.loaders import BudgetScheduler, UserLoader, divided

DATA = TensorDataset(INPUTS, TARGETS)
STEPS = 14


def body(found, own_loader=lambda: DataLoader(DATA, 8, shuffle=True)):
    """As scripts have it: everything is made, then prepared at once; the loop makes its own steps."""

    def run(trial):
        net = network(trial.knobs)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        net = trial.prepare(net, optimizer=optimizer, scheduler=scheduler)
        trial.evaluate_with(lambda: error(net))
        for epoch, loader in epochs(trial, own_loader()):
            for inputs, targets in loader:
                loss = F.mse_loss(net(inputs), targets)
                found.append((epoch, loss.item(), optimizer.param_groups[0]["lr"], trial.warming_up))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                trial.record_step(loss, optimizer)
            scheduler.step()

    return run


def trained(found, steps=STEPS, run=None, **how):
    return train(toy(), samples=8 * steps, body=run or body(found), evaluates=True, **how)


def test_epoch_schedulers_step_once_an_epoch():
    found, told = [], Told()
    outcome = trained(found, observer=told)
    assert [epoch for epoch, *_, warming in found if not warming] == [0] * 6 + [1] * 6 + [2] * 2
    assert [rate for _, _, rate, warming in found if not warming] == [0.01] * 6 + [0.005] * 6 + [0.0025] * 2
    assert outcome.steps == STEPS
    assert told.values[-1]["loss"] == pytest.approx(found[-1][1]), "as it was recorded"
    assert told.values[-1]["learning_rate"] == 0.0025


def test_losses_are_those_of_the_loop_alone():
    found, alone = [], []
    trained(found)
    torch.manual_seed(toy().seed)
    net = network(toy().knobs)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    loader = DataLoader(DATA, 8, shuffle=True)
    for epoch in range(3):
        for inputs, targets in loader:
            loss = F.mse_loss(net(inputs), targets)
            alone.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01 * 0.5 ** (epoch + 1)
    assert [loss for _, loss, _, warming in found if not warming] == alone[:STEPS]


@pytest.mark.parametrize("trained", [2, 5])
def test_resume_with_persistent_loader_processes_keeps_the_order(trained):
    """They draw a seed when they start, and not in later passes."""

    def order(feed, count):
        return [feed.move(feed.fetch())[0].tolist() for _ in range(count)]

    def feed(position=None):
        loader = DataLoader(TensorDataset(torch.arange(12)), 3, shuffle=True, num_workers=1, persistent_workers=True)
        trial = mock.Mock(world=CPU, to_device=lambda batch, **_: batch)
        return UserLoader(trial, loader).feed([position] if position else [])[0]

    whole = feed()
    order(whole, trained)
    position, drawn = whole.position, torch.get_rng_state()
    expected = order(whole, 5)
    torch.set_rng_state(drawn)
    assert order(feed(position), 5) == expected


def prepared(trial):
    net = network(trial.knobs)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    net = trial.prepare(net, optimizer=optimizer)
    trial.evaluate_with(lambda: error(net))
    return net, optimizer


def test_a_pass_that_is_left_early_has_ended():
    found = []

    def run(trial):
        net, optimizer = prepared(trial)
        for epoch, loader in epochs(trial, DataLoader(DATA, 8, shuffle=True)):
            for inputs, targets in loader:
                if not trial.warming_up:
                    found.append((epoch, inputs))
                optimizer.zero_grad()
                (loss := F.mse_loss(net(inputs), targets)).backward()
                optimizer.step()
                trial.record_step(loss, optimizer)
                if trial.step_count % 3 == 0:
                    break

    trained([], run=run, steps=7)
    assert [epoch for epoch, _ in found] == [0, 0, 0, 1, 1, 1, 2]
    assert not torch.equal(found[0][1], found[3][1])


@pytest.mark.parametrize(
    ("knobs", "options"),
    [
        ({}, {"num_workers": 0}),
        (
            {"loader__workers": 1, "loader__prefetch_factor": 3, "loader__persistent_workers": False},
            {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": False},
        ),
    ],
)
def test_loader_options_are_the_knobs(knobs, options):
    made = []

    def run(trial):
        made.append(trial.loader_options)
        body([], lambda: DataLoader(DATA, shuffle=True, **trial.loader_options))(trial)

    train(toy(**knobs), samples=16, body=run)
    assert made == [{"batch_size": 8, "pin_memory": False} | options]


def of_a_rank(world):
    found = []
    outcome = train(toy(parallel__workers=2, width=4, norm=False), samples=8 * 4, body=body(found), world=world)
    return weights(outcome), [loss for _, loss, *_ in found]


def test_ranks_divide_a_plain_loader(tmp_path):
    first, second = ranks(of_a_rank, tmp_path)
    assert_equal(first[0], second[0])
    assert first[1] != second[1]


def test_a_sampler_of_ones_own_is_left_alone():
    own = DataLoader(DATA, 8, sampler=RandomSampler(DATA, num_samples=8))
    two = mock.Mock(replicas=World(0, 2, torch.device("cpu")))
    assert divided(own, two) is own
    assert len(divided(DataLoader(DATA, 8), two)) == 3
    batches = DataLoader(DATA, batch_sampler=[[0], [1]])
    assert divided(batches, two) is batches


def test_prepare_exports_and_keeps_an_average():
    def run(trial):
        net = network(trial.knobs)
        average = torch.optim.swa_utils.AveragedModel(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        net = trial.prepare(net, optimizer=optimizer, export=average)

        @trial.evaluate_with
        def judge():
            return error(average)

        assert trial.engine.result is average
        assert trial.engine.state.names == ["net", "optimizer", "export"]
        assert callable(judge)
        for _, loader in epochs(trial, DataLoader(DATA, 8)):
            for inputs, targets in loader:
                (loss := F.mse_loss(net(inputs), targets)).backward()
                optimizer.step()
                trial.record_step(loss, optimizer)
                average.update_parameters(net)

    trained([], run=run, steps=3)


# ---------------------------------------------------------------------------------------------- what the adapters share
def test_a_missing_package_names_the_extra():
    with pytest.raises(ConfigError, match=r"no_such_package is not installed; pip install '.*\[lightning\]'"):
        require("lightning", "torch", "no_such_package")


@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.LinearLR, torch.optim.lr_scheduler.OneCycleLR])
def test_the_budget_stands_for_the_length_of_a_schedule(kind):
    class Trial:
        progress = 0.0

    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
        options = (
            {"total_steps": 101, "max_lr": 1.0} if kind is torch.optim.lr_scheduler.OneCycleLR else {"total_iters": 100}
        )
        scheduler = kind(optimizer, **options)
        optimizer.step()  # or torch warns that it comes later
        return optimizer, scheduler

    optimizer, scheduler = made()
    stretched = BudgetScheduler(scheduler, 100, Trial)
    reference, alone = made()
    for thirds in range(1, 4):
        Trial.progress = thirds * 0.29
        stretched.step()
        stretched.follow()
        while alone.last_epoch < 29 * thirds:
            alone.step()
        assert stretched.last_epoch == 29 * thirds
        assert optimizer.param_groups[0]["lr"] == pytest.approx(reference.param_groups[0]["lr"])
