from typing import Literal

import pytest
import torch

from tunediff import config
from tunediff.diffusion import weighting
from tunediff.diffusion.process import Diffusion

AT = [0, 1, 250, 300, 500, 999]


def min_snr(schedule: Literal["linear", "cosine"], prediction: Literal["epsilon", "x0", "v"]) -> weighting.Weighting:
    return weighting.build(config.MinSnr(), Diffusion(config.Process(schedule=schedule, prediction=prediction)))


def expect(table: torch.Tensor, values: list[float], atol: float) -> None:
    torch.testing.assert_close(table, torch.tensor(values, dtype=torch.float64), atol=atol, rtol=0)


def test_min_snr_of_the_noise() -> None:
    expect(min_snr("linear", "epsilon").table()[AT], [0.0005, 0.0011, 1, 1, 1, 1], atol=5e-7)
    expect(min_snr("cosine", "epsilon").table()[AT[:4]], [0.000206, 0.000437, 0.910948, 1], atol=5e-7)


def test_min_snr_of_v() -> None:
    expected = [0.0005, 0.0011, 0.521423, 0.394011, 0.077797, 4e-5]
    expect(min_snr("linear", "v").table()[AT], expected, atol=5e-7)


def test_min_snr_is_the_same_objective_in_every_unit() -> None:
    """MSE_x0 = MSE_ε/SNR and MSE_v = MSE_ε/ᾱ."""
    diffusion = Diffusion(config.Process())
    epsilon, x0 = min_snr("linear", "epsilon").table(), min_snr("linear", "x0").table()
    v = min_snr("linear", "v").table()
    torch.testing.assert_close(x0 / diffusion.snr_table, epsilon)
    torch.testing.assert_close(v / diffusion.alphas_cumprod, epsilon)
    assert x0.max() == 5


def test_gamma() -> None:
    table = weighting.build(config.MinSnr(gamma=2.0), Diffusion(config.Process(prediction="x0"))).table()
    assert table.max() == 2


@pytest.mark.parametrize("prediction", ["epsilon", "x0", "v"])
def test_constant(prediction: Literal["epsilon", "x0", "v"]) -> None:
    table = weighting.build(config.Constant(), Diffusion(config.Process(steps=30, prediction=prediction))).table()
    assert torch.equal(table, torch.ones(30, dtype=torch.float64))


def test_weights_are_looked_up() -> None:
    found = min_snr("linear", "v")
    weights = found.weights(torch.tensor([999, 250, 250]))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor([4.035830e-5, 0.521423, 0.521423]), atol=5e-7, rtol=0)


def test_every_member_of_the_configuration_has_a_class() -> None:
    names = {member().name for member in weighting.KINDS}
    assert names == set(config.knobs()["weighting.name"].choices or ())
