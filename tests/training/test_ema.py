import pytest
import torch
from torch import nn

from tunediff.training import knobs
from tunediff.training.ema import ExponentialAverage


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
