"""One scale for all methods, and what is really minimised."""

import math
from typing import Any, Literal, get_args

import pytest
import torch

from tunediff.distributed import alone
from tunediff.workloads.diffusion import knobs, methods, timesteps
from tunediff.workloads.diffusion.objective import DiffusionLoss, StaticWeighting, build_weighting
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


# -------------------------------------------------------------------------------------------------------- weightings
Schedule = Literal["linear", "cosine"]
Prediction = Literal["epsilon", "x0", "v"]

STATIC: list[methods.Weighting] = [
    methods.MinSnr(),
    methods.P2(exponent=0.7),
    methods.Debiased(cap=3.0),
    methods.ChangeAware(),
]
AT = [0, 1, 250, 300, 500, 999]


def table(
    member: methods.Weighting, schedule: Schedule = "linear", prediction: Prediction = "epsilon", steps: int = 1000
) -> torch.Tensor:
    return build_weighting(member, Diffusion(knobs.Process(schedule, steps, prediction))).table()


def expect(table: torch.Tensor, values: list[float], atol: float, rtol: float = 0.0) -> None:
    torch.testing.assert_close(table, torch.tensor(values, dtype=torch.float64), atol=atol, rtol=rtol)


# ------------------------------------------------------------------------------- values computed by others' public code
def test_min_snr_of_the_noise() -> None:
    expect(table(methods.MinSnr())[AT], [0.0005, 0.0011, 1, 1, 1, 1], atol=5e-7)
    expect(table(methods.MinSnr(), "cosine")[AT[:4]], [0.000206, 0.000437, 0.910948, 1], atol=5e-7)


def test_min_snr_of_v() -> None:
    expected = [0.0005, 0.0011, 0.521423, 0.394011, 0.077797, 4e-5]
    expect(table(methods.MinSnr(), prediction="v")[AT], expected, atol=5e-7)


def test_p2() -> None:
    expect(table(methods.P2())[AT], [1e-4, 2.19908e-4, 0.478577, 0.605989, 0.922203, 0.99996], atol=5e-7)
    expect(table(methods.P2(), "cosine")[[250, 500]], [0.154112, 0.507715], atol=5e-7)


def test_debiased() -> None:
    expected = [0.0100005, 0.0148309, 0.958034, 1.240161, 3.442967, 157.407]
    expect(table(methods.Debiased(cap=1000.0))[AT], expected, atol=0, rtol=1e-5)
    expect(table(methods.Debiased(cap=1000.0), "cosine")[[500, 999]], [1.015551, 1000], atol=5e-7)


def test_change_aware() -> None:
    expected = [0.4088, 0.5962, 0.4580, 1, 1]
    expect(table(methods.ChangeAware())[[0, 250, 500, 700, 999]], expected, atol=5e-5)
    assert table(methods.ChangeAware())[699] < 0.5, "the jump is at τ·T"


# -------------------------------------------------------------------------------------------------- what the knobs mean
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("member", STATIC, ids=lambda m: m.name)
def test_the_same_objective_in_every_unit(member: methods.Weighting, schedule: Schedule) -> None:
    """MSE_x0 = MSE_ε/SNR and MSE_v = MSE_ε/ᾱ."""
    diffusion = Diffusion(knobs.Process(schedule=schedule))
    epsilon = table(member, schedule)
    torch.testing.assert_close(table(member, schedule, "x0") / diffusion.snr_table, epsilon)
    torch.testing.assert_close(table(member, schedule, "v") / diffusion.alphas_cumprod, epsilon)


@pytest.mark.parametrize("prediction", ["epsilon", "x0", "v"])
def test_constant_is_one_in_the_units_of_the_prediction(prediction: Prediction) -> None:
    assert torch.equal(table(methods.Constant(), prediction=prediction, steps=30), torch.ones(30, dtype=torch.float64))


def test_min_snr_gamma_caps_the_weight_of_x0() -> None:
    assert float(table(methods.MinSnr(gamma=2.0), prediction="x0").max()) == pytest.approx(2)


def test_p2_without_exponent_is_constant_and_the_offset_bounds_it() -> None:
    expect(table(methods.P2(exponent=0.0)), [1.0] * 1000, atol=0)
    assert float(table(methods.P2(offset=0.5), "cosine").max()) == pytest.approx(2)


def test_debiased_is_capped_where_the_noise_is_high() -> None:
    found = table(methods.Debiased(cap=3.0), "cosine")
    assert float(found.max()) == float(found[-1]) == 3
    assert float(found[500]) == pytest.approx(1.015551, abs=5e-7)


def test_change_aware_without_contrast_is_flat_below_tau() -> None:
    expect(table(methods.ChangeAware(contrast=0.5, tau=0.4), steps=10), [0.5] * 4 + [1.0] * 6, atol=1e-12)


@pytest.mark.parametrize("member", [*STATIC, methods.Uncertainty(channels=4)], ids=lambda m: m.name)
def test_the_shortest_chain_has_finite_weights(member: methods.Weighting) -> None:
    assert table(member, "cosine", steps=2).isfinite().all()


# -------------------------------------------------------------------------------------------------------------- learned
def learned(steps: int = 1000, bound: float = 10.0, channels: int = 128) -> StaticWeighting:
    member = methods.Uncertainty(channels=channels, bound=bound)
    return build_weighting(member, Diffusion(knobs.Process(steps=steps)))


def fit(found: StaticWeighting, mean_error: torch.Tensor, rounds: int = 400) -> None:
    """Train on errors that scatter around their mean like those of single images: exponentially distributed."""
    generator, steps = torch.Generator().manual_seed(0), len(mean_error)
    optimizer = torch.optim.Adam(found.parameters(), lr=0.05)
    for done in range(rounds):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - done / rounds)
        t = torch.randint(0, steps, (512,), generator=generator)
        errors = mean_error[t] * torch.empty(512).exponential_(generator=generator)
        optimizer.zero_grad()
        loss = found.learning_loss(t, errors)
        loss.backward()
        optimizer.step()


def test_uncertainty_begins_as_constant() -> None:
    found = learned()
    torch.testing.assert_close(found.weights(torch.arange(1000)), torch.ones(1000), rtol=0, atol=0)
    assert found.learned
    assert not StaticWeighting.learned


def test_uncertainty_learns_the_mean_error_of_each_timestep() -> None:
    found = learned()
    x = torch.linspace(0, 1, 1000)
    mean_error = (-1 - 3 * x + 0.5 * torch.sin(6 * x)).exp()  # as of a trained model: falls with t, over a factor of 30
    fit(found, mean_error)
    found_mean = 1 / found.table()
    off = (found_mean / mean_error.double()).log().abs()
    assert float(off.mean()) < 0.1
    assert float(off.max()) < 0.5


def test_uncertainty_stays_within_its_bound_and_comes_back() -> None:
    found = learned(bound=2.0)
    fit(found, torch.full((1000,), 1e-6), rounds=300)
    table = found.table().log()
    assert 1.9 < float(table.mean()) <= float(table.max()) <= 2
    fit(found, torch.ones(1000))
    assert float(found.table().log().abs().mean()) < 0.1


def test_the_gradient_of_its_loss_reaches_its_own_parameters_only() -> None:
    found = learned(steps=10)
    errors = torch.ones(10, requires_grad=True)
    loss = found.learning_loss(torch.arange(10), 2 * errors)
    loss.backward()
    assert errors.grad is None
    (parameter,) = found.parameters()
    assert float(parameter.grad.abs().sum()) > 0
    assert not found.weights(torch.arange(10)).requires_grad


def test_uncertainty_is_not_rounded_by_autocast() -> None:
    found = learned()
    with torch.no_grad():
        found.parameters()[0].normal_(generator=torch.Generator().manual_seed(1))
    exact = found.weights(torch.arange(1000))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(found.weights(torch.arange(1000)), exact, rtol=1e-6, atol=0)


def test_uncertainty_continues_from_its_state() -> None:
    found, other = learned(steps=50), learned(steps=50)
    fit(found, torch.full((50,), 0.1), rounds=20)
    state = found.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.table(), found.table())
    assert not torch.equal(other.table(), torch.ones(50, dtype=torch.float64))
    before = other.table()
    fit(found, torch.full((50,), 0.1), rounds=20)  # training on does not reach into what was saved
    assert torch.equal(other.table(), before)
    other.load_state_dict(state)
    assert torch.equal(other.table(), before)
