"""AdamW, its schedule, and how its step runs."""

import math

import pytest
import torch
from torch import nn

from tests.helpers import assert_equal, tiny, train, weights
from tunediff.training import optimizer as adam
from tunediff.training.knobs import Optimizer


def learning_rate(progress, batch_size=128, **knobs):
    return adam.learning_rate(Optimizer(lr=1e-3, **knobs), batch_size, progress)


def test_learning_rate_follows_the_budget():
    assert learning_rate(0.0, warmup=0.2) == 0.0
    assert learning_rate(0.1, warmup=0.2) == pytest.approx(5e-4)
    assert learning_rate(0.2, warmup=0.2) == learning_rate(1.0, warmup=0.2) == pytest.approx(1e-3)
    assert learning_rate(0.6, warmup=0.2, decay="cosine") == pytest.approx(5e-4)
    assert learning_rate(1.0, warmup=0.2, decay="cosine") == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(0.25, warmup=0.0, decay="linear") == pytest.approx(7.5e-4)
    assert learning_rate(1.0, warmup=1.0) == pytest.approx(1e-3)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 2.0), ("sqrt", math.sqrt(2))])
def test_learning_rate_scales_with_the_batch(scaling, factor):
    assert learning_rate(0.5, 256, lr_scaling=scaling, warmup=0.0) == pytest.approx(1e-3 * factor)
    config = tiny(loader__batch_size=512, optimizer__lr_scaling=scaling, optimizer__lr=1e-3)
    rate = adam.learning_rate(config.knobs.optimizer, config.loader.batch_size, 0.9)
    assert rate == pytest.approx(1e-3 * factor**2)


def test_every_group_gets_the_rate_of_the_moment():
    decayed, undecayed = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    section = Optimizer(lr=1e-3, warmup=0.2, weight_decay=0.1, beta2=0.9)
    optimizer = adam.build(section, 128, [decayed], [undecayed])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.9)] * 2
    adam.set_learning_rate(optimizer, section, 128, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-4, 5e-4])
    assert len(adam.build(section, 128, [decayed], []).param_groups) == 1


@pytest.mark.parametrize(
    ("implementation", "foreach", "fused"),
    [("foreach", True, False), ("fused", False, True), ("for_loop", False, False)],
)
def test_implementation(implementation, foreach, fused):
    section = tiny(optimizer__implementation=implementation).knobs.optimizer
    optimizer = adam.build(section, 128, [nn.Parameter(torch.zeros(2))], [])
    assert (optimizer.defaults["foreach"], optimizer.defaults["fused"]) == (foreach, fused)


def test_implementations_agree():
    found = [weights(train(tiny(optimizer__implementation=kind))) for kind in ("foreach", "fused", "for_loop")]
    assert_equal(found[0], found[1], rtol=1e-3, atol=1e-5)
    assert_equal(found[0], found[2], rtol=1e-3, atol=1e-5)
