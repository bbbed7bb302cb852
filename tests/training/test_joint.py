"""Clipping, AdamW and averaged weights in one function learn what the three learn one after the other."""

import functools

import pytest
import torch
from torch import nn

from tests.helpers import assert_equal, tiny, train, weights
from tunediff.training import compilation
from tunediff.training import optimizer as adam
from tunediff.training.joint import Joint
from tunediff.training.observer import Observer


def as_it_is(function, **how):
    assert how == {"dynamic": False}
    return function


def through(backend):
    return functools.partial(torch.compile, backend=backend)


def parts():
    """Weights of the network in both memory orders, and a weight beside it."""
    torch.manual_seed(0)
    image = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    return [nn.Parameter(one) for one in (image, torch.randn(5), torch.randn(2, 3))]


@pytest.mark.parametrize(
    "compiler",
    [as_it_is, through("aot_eager"), pytest.param(torch.compile, marks=pytest.mark.slow)],
    ids=["as it is", "traced", "compiled"],
)
def test_what_three_do_one_after_the_other(compiler):
    *apart, beside = parts()
    plain = torch.optim.AdamW(
        [{"params": apart}, {"params": [beside], "weight_decay": 0.0}], 1.0, (0.9, 0.95), weight_decay=0.1
    )
    *together, with_it = parts()
    groups = [{"params": together}, {"params": [with_it], "weight_decay": 0.0}]
    joint = Joint(groups, 1.0, 0.95, 0.1, clip_norm=1.0, compiler=compiler)
    averages = [[one.detach().clone() for one in some] for some in (apart, together)]
    for step in range(6):
        torch.manual_seed(step)
        size = 0.1 if step % 2 else 10.0  # below and above the norm that is clipped to
        for one, other in zip([*apart, beside], [*together, with_it], strict=True):
            one.grad = size * torch.randn(one.shape)
            other.grad = one.grad.clone()
        for group in [*plain.param_groups, *joint.param_groups]:
            group["lr"] = 0.01 * (step + 1)
        nn.utils.clip_grad_norm_(apart, 1.0)
        plain.step()
        torch._foreach_lerp_(averages[0], [one.detach() for one in apart], 1 / (step + 1))
        joint.waits = True
        assert not joint.finish(averages[1], 0.5), "nothing is due"
        joint.step()
        joint.zero_grad()
        assert with_it.grad is not None, "it waits for its step"
        assert joint.finish(averages[1], 1 / (step + 1))
        assert with_it.grad is None
    assert together[0].is_contiguous(memory_format=torch.channels_last)
    for one, other in zip([*apart, beside, *averages[0]], [*together, with_it, *averages[1]], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_without_an_average_it_does_not_wait():
    weights_ = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    plain = torch.optim.AdamW(weights_[:1], 0.1, (0.9, 0.99), weight_decay=0.0)
    joint = Joint([{"params": weights_[1:]}], 0.1, 0.99, 0.0, clip_norm=100.0, compiler=as_it_is)
    for optimizer, weight in zip((plain, joint), weights_, strict=True):
        weight.grad = torch.tensor([1.0, -2.0, 3.0])
        optimizer.step()
    torch.testing.assert_close(*weights_)
    assert weights_[1].grad is None


def test_it_is_compiled_once_and_its_graphs_are_not_the_networks():
    before, made = compilation.graphs(), compilation._all_graphs()
    weight = nn.Parameter(torch.ones(3))
    joint = Joint([{"params": [weight]}], 1e-3, 0.99, 0.0, 1.0, compiler=through("eager"))
    for step in range(12):
        joint.param_groups[0]["lr"], weight.grad = 1e-3 / (step + 1), torch.ones(3) * step
        joint.step()
        joint.finish([torch.zeros(3)], 1 / (step + 1))
    assert (compilation.graphs() - before, compilation._all_graphs() - made) == (0, 1)


@pytest.mark.parametrize("weighting", ["constant", "uncertainty"])
def test_a_training_learns_the_same_and_goes_on(monkeypatch, tmp_path, weighting):
    knobs = {"weighting__name": weighting, "optimizer__weight_decay": 0.1, "optimizer__clip_norm": 0.05}
    plain = train(tiny(**knobs))

    def build(section, batch_size, parameters, undecayed):
        groups = [{"params": list(parameters)}, *([{"params": undecayed, "weight_decay": 0.0}] if undecayed else [])]
        return Joint(groups, section.lr, section.beta2, section.weight_decay, section.clip_norm, as_it_is)

    monkeypatch.setattr(adam, "build", build)
    together = train(tiny(**knobs), folder=tmp_path / "whole")
    assert_equal(weights(together), weights(plain), rtol=1e-4, atol=1e-6)

    class Stops(Observer):
        def asks_to_stop(self):
            self.steps = getattr(self, "steps", 0) + 1
            return self.steps == 7

    assert not train(tiny(**knobs), folder=tmp_path / "stopped", observer=Stops()).finished
    assert_equal(weights(train(tiny(**knobs), folder=tmp_path / "stopped")), weights(together))


def test_on_a_cpu_it_is_fused():
    section = tiny(optimizer__implementation="compiled").knobs.optimizer
    made = adam.build(section, 128, [nn.Parameter(torch.zeros(2))], [])
    assert isinstance(made, torch.optim.AdamW)
    assert made.defaults["fused"]
