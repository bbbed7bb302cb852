"""Weights: their digest, and their average over training."""

import pytest
import torch
from torch import nn

from tunediff.training import knobs
from tunediff.training import optimizer as optimizers
from tunediff.training.ema import ExponentialAverage
from tunediff.training.weights import digest
from tunediff.workloads.classification.knobs import ClassifierSgd


def weights():
    return {
        "a": torch.arange(6000.0).view(10, 20, 5, 6),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.tensor(1),
    }


def test_digest_takes_empty_weights():
    assert digest({"a": torch.empty(0), "b": torch.empty(0, 5)}) != digest({"a": torch.empty(0)})


def test_digest_does_not_depend_on_how_weights_lie_in_memory():
    other = weights()
    other["a"] = other["a"].to(memory_format=torch.channels_last)
    other["b"] = torch.ones(8, dtype=torch.bfloat16)[1:4]
    assert digest(other) == digest(weights())


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_digest_notices_a_change_of_one_element(name):
    other = weights()
    other[name].view(-1)[-1] += 1
    assert digest(other) != digest(weights())


@pytest.mark.parametrize(
    "change",
    [lambda a: a.flip(0), lambda a: a.roll(1, 1), lambda a: a.view(20, 10, 5, 6), lambda a: a.double()],
    ids=["order of rows", "order of columns", "shape", "type"],
)
def test_digest_notices_what_is_moved_or_converted(change):
    assert digest(weights() | {"a": change(weights()["a"])}) != digest(weights())


def test_digest_notices_names_that_are_exchanged():
    one, other = {"a": torch.zeros(4), "b": torch.ones(4)}, {"b": torch.zeros(4), "a": torch.ones(4)}
    assert digest(one) != digest(other)


# ------------------------------------------- the schedules are torch's own, over fractions of a budget instead of steps
STEPS = 40


def torchs(schedule, **how):
    """What a scheduler of torch sets at steps 0 … STEPS."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    scheduler, rates = schedule(optimizer, **how), []
    for _ in range(STEPS + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(rates) <= STEPS:
            scheduler.step()
    return rates


def ours(**values):
    return [optimizers.learning_rate(ClassifierSgd(lr=0.1, **values), 128, step / STEPS) for step in range(STEPS + 1)]


def test_cosine_is_torchs():
    assert ours(warmup=0.0) == pytest.approx(torchs(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=STEPS))


def test_one_cycle_is_torchs():
    how = {
        "max_lr": 0.1,
        "total_steps": STEPS + 1,
        "pct_start": (0.3 * STEPS + 1) / (STEPS + 1),
        "cycle_momentum": False,
    }
    assert ours(decay="one_cycle", warmup=0.3) == pytest.approx(torchs(torch.optim.lr_scheduler.OneCycleLR, **how))


@pytest.mark.parametrize(
    ("decay", "start", "end"), [("constant", 0.0, 0.1), ("cosine", 0.0, 0.0), ("one_cycle", 0.004, 4e-7)]
)
def test_endpoints(decay, start, end):
    rates = ours(decay=decay, warmup=0.25)
    assert (rates[0], rates[STEPS // 4], rates[-1]) == pytest.approx((start, 0.1, end))


# --------------------------------------------------------------------------------------------------------- the average
def network(value: float) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(value)
    return net


def values(net: nn.Module) -> set[float]:
    return {value for parameter in net.parameters() for value in parameter.flatten().tolist()}


def test_decay_is_a_half_life_relative_to_progress() -> None:
    ema = ExponentialAverage(knobs.Ema(half_life=0.05, max_decay=0.9999), network(0.0))
    assert ema.decay(progress=0.5, delta=0.025) == pytest.approx(0.5)
    assert ema.decay(progress=0.5, delta=0.05) == pytest.approx(0.25)
    assert ema.decay(progress=1.0, delta=0.025) == pytest.approx(0.5**0.5)
    assert ema.decay(progress=1.0, delta=1e-9) == 0.9999
    assert ema.decay(progress=0.0, delta=0.0) == 0


def test_average() -> None:
    ema = ExponentialAverage(knobs.Ema(half_life=0.05), network(1.0))
    ema.update(network(9.0), progress=0.0, delta=0.0)
    assert values(ema.model) == {9.0}
    ema.update(network(1.0), progress=0.5, delta=0.025)
    assert values(ema.model) == {5.0}
    ema.update(network(1.0), progress=0.5, delta=0.05)
    assert values(ema.model) == {2.0}


def test_a_weight_has_lost_half_its_share_after_a_half_life_of_small_steps() -> None:
    ema = ExponentialAverage(knobs.Ema(half_life=0.1, max_decay=0.99999), network(1.0))
    for _ in range(1000):
        ema.update(network(0.0), progress=0.5, delta=0.1 * 0.5 / 1000)
    assert values(ema.model).pop() == pytest.approx(0.5, rel=1e-4)


def test_the_average_is_a_frozen_float32_network_of_its_own() -> None:
    source = network(1.0).bfloat16().train()
    ema = ExponentialAverage(knobs.Ema(), source)
    assert not ema.model.training
    assert source.training
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in ema.model.parameters())
    assert all(p.dtype == torch.bfloat16 and p.requires_grad for p in source.parameters())
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.fill_(3.0)
    assert values(ema.model) == {1.0}
    ema.update(source, progress=0.5, delta=0.025)
    assert values(ema.model) == {2.0}


def test_buffers_are_copied() -> None:
    source = network(1.0).train()
    ema = ExponentialAverage(knobs.Ema(), source)
    source(torch.randn(8, 2))
    ema.update(source, progress=0.5, delta=1e-6)
    for name, buffer in source.named_buffers():
        assert torch.equal(ema.model.get_buffer(name), buffer), name
    assert ema.model.get_buffer("1.num_batches_tracked") == 1


def test_state() -> None:
    ema, other = ExponentialAverage(knobs.Ema(), network(1.0)), ExponentialAverage(knobs.Ema(), network(7.0))
    other.load_state_dict(ema.state_dict())
    assert values(other.model) == {1.0}
    other.update(network(5.0), progress=0.5, delta=0.025)  # loading must not have cut its list of parameters off
    assert values(other.model) == {3.0}
    with pytest.raises(RuntimeError):
        other.load_state_dict(nn.Linear(1, 1).state_dict())
