"""One scale for all methods, and what is really minimised."""

import math
from typing import Any, get_args

import pytest
import torch

from tunediff.distributed import alone
from tunediff.workloads.diffusion import knobs, methods, timesteps
from tunediff.workloads.diffusion.objective import DiffusionLoss, build_weighting
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps import base
from tunediff.workloads.diffusion.timesteps.base import TimestepSampler

SAMPLERS = [kind() for kind in timesteps.KINDS]
WEIGHTINGS = [kind() for kind in get_args(get_args(methods.Weighting)[0])]


def build(sampler: Any, weights: Any, prediction: Any = "epsilon") -> tuple[DiffusionLoss, TimestepSampler]:
    diffusion = Diffusion(knobs.Process(prediction=prediction))
    drawn = timesteps.build(sampler, diffusion, 3, alone("cpu"))
    return DiffusionLoss(drawn, build_weighting(weights, diffusion), diffusion), drawn


@pytest.mark.parametrize("weights", WEIGHTINGS, ids=lambda member: member.name)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda member: member.name)
def test_an_error_counts_once_in_the_mean(sampler: Any, weights: Any) -> None:
    """Of each sampler with each weighting; they predict another thing in turn."""
    turn = SAMPLERS.index(sampler) + WEIGHTINGS.index(weights)
    objective, drawn = build(sampler, weights, ("epsilon", "x0", "v")[turn % 3])
    t, factor = drawn.sample(torch.zeros(20_000, 3, 8, 8), torch.Generator().manual_seed(0))
    factors = objective.factors(t, factor).double()
    assert factors.mean().item() == pytest.approx(1.0, abs=5 * factors.std().item() / len(t) ** 0.5 + 1e-6)
    effective = objective.effective_weight()
    assert effective.mean().item() == pytest.approx(1.0)
    assert effective.min() >= 0


def test_the_scale_follows_a_sampler_that_adapts() -> None:
    objective, sampler = build(methods.LossSecondMoment(history=1, importance_correction=0.0), methods.P2())
    t = torch.arange(1000)
    for _ in range(base.REFRESH_EVERY):
        sampler.update(t, 1 / (1.0 + t), torch.ones(1000))
    drawn, factor = sampler.sample(torch.zeros(50_000, 3, 8, 8), torch.Generator().manual_seed(0))
    assert objective.factors(drawn, factor).mean() < 0.7  # P2 suppresses what is now drawn most
    objective.refresh()
    assert objective.factors(drawn, factor).mean().item() == pytest.approx(1.0, abs=0.03)


def test_p_and_w_are_the_same_thing_in_the_effective_weight() -> None:
    """SpeeD's probabilities alone, and uniform draws; min-SNR in every unit."""
    speed = build(methods.Speed(), methods.Constant())[0].effective_weight()
    assert (speed[0] / speed[-1]).item() == pytest.approx(5.0)
    found = [build(methods.Uniform(), methods.MinSnr(), unit)[0].effective_weight() for unit in ("epsilon", "x0", "v")]
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_the_table_of_timesteps_has_the_natural_logarithm_of_the_signal_to_noise_ratio() -> None:
    table = build(methods.Uniform(), methods.Constant())[0].table()
    snr = Diffusion(knobs.Process()).snr_table.tolist()
    assert [math.exp(value) for value in table["log_snr"]] == pytest.approx(snr)
