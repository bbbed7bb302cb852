"""A loop with an Accelerator under the clock of a trial learns what it learns alone."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import Told, adapted_toy, assert_equal, ranks, train, weights
from tests.toy.train import INPUTS, TARGETS, network
from tunediff.config.code import WorkloadError
from tunediff.integrations.loaders import UserLoader

accelerate = pytest.importorskip("accelerate")

from tunediff.integrations.accelerate import TrialAccelerator  # noqa: E402

STEPS = 15


def learn(accelerator, model, passes, judged=lambda model: None):
    """The user's loop: `passes(loader)` gives its epochs. Returns losses and rates by batch."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, STEPS)
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), 4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    judged(model)
    found, updates = [], 0
    for _, batches in passes(loader):
        model.train()
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                found.append((loss.item(), optimizer.param_groups[0]["lr"]))
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients
            if updates == STEPS and not isinstance(batches, UserLoader):
                return found
    return found


def trained(found, steps=STEPS, given=None, **how):
    def body(trial):
        accelerator = TrialAccelerator(trial, schedule_steps=STEPS)
        judge = lambda model: trial.evaluate_with(lambda: {"error": F.mse_loss(model(INPUTS), TARGETS)})  # noqa: E731
        found.append(learn(accelerator, network(trial.knobs), accelerator.epochs, judge))
        accelerator.end_training()

    return train(given or adapted_toy(), samples=8 * steps, body=body, evaluates=True, **how)


def test_losses_and_rates_are_those_of_the_accelerator_alone():
    found = []
    outcome = trained(found)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    accelerator, model = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True), network(adapted_toy().knobs)
    expected = learn(accelerator, model, lambda loader: ((epoch, loader) for epoch in range(99)))
    assert found[0][2:] == expected, "the first two are of the warm-up, which is undone"
    assert_equal(weights(outcome), model.state_dict())
    assert [point.steps for point in outcome.points] == [5, 10, 15]


def test_resume_is_exact_within_an_epoch(tmp_path):
    whole = weights(trained([]))
    trained([], folder=tmp_path, observer=Told(stop=lambda told: told.steps >= 8))
    assert_equal(weights(trained([], folder=tmp_path)), whole)


def test_chained_schedulers_are_refused():
    def body(trial):
        optimizer = torch.optim.SGD(network(trial.knobs).parameters(), 0.01)
        parts = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        TrialAccelerator(trial, schedule_steps=STEPS).prepare(torch.optim.lr_scheduler.ChainedScheduler(parts))

    with pytest.raises(WorkloadError, match="ChainedScheduler is not allowed .* allowed: SequentialLR"):
        train(adapted_toy(), body=body)


def of_a_rank(world):
    found = []
    outcome = trained(found, world=world, given=adapted_toy(**{"parallel.workers": 2, "loader.accumulation": 1}))
    return weights(outcome), found


@pytest.mark.nightly
def test_two_ranks_learn_one_model_from_parts_of_the_data(tmp_path):
    first, second = ranks(of_a_rank, tmp_path)
    assert_equal(first[0], second[0])
    assert first[1] != second[1]


def test_a_plateau_steps_with_what_the_loop_finds():
    found = []

    def body(trial):
        accelerator = TrialAccelerator(trial, schedule_steps=STEPS)
        model = network(trial.knobs)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        model, optimizer, plateau = accelerator.prepare(model, optimizer, plateau)
        trial.evaluate_with(lambda: {"error": 1.0})
        for _, batches in accelerator.epochs(accelerator.prepare(DataLoader(TensorDataset(INPUTS, TARGETS), 4))):
            for inputs, targets in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(F.mse_loss(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
            plateau.step(1.0)
            found.append(optimizer.param_groups[0]["lr"])

    train(adapted_toy(), samples=8 * STEPS, body=body, evaluates=True)
    assert found[-1] < found[0]
