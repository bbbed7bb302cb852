"""What the process adds and predicts, and how images are drawn from it."""

import itertools
import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tunediff import config as cfg
from tunediff.config import baseline, override
from tunediff.evaluation.distance import NonFiniteError
from tunediff.evaluation.generation import ImageNoise, shares
from tunediff.workloads.diffusion import commands, knobs
from tunediff.workloads.diffusion.evaluator import generate, to_uint8
from tunediff.workloads.diffusion.knobs import Process
from tunediff.workloads.diffusion.process import Diffusion, Predict

Prediction = Literal["epsilon", "x0", "v"]
Skip = Literal["linear", "quadratic", "log_snr"]
PREDICTIONS: list[Prediction] = ["epsilon", "x0", "v"]
LINEAR, COSINE = Diffusion(knobs.Process()), Diffusion(knobs.Process(schedule="cosine"))
AT = [0, 1, 250, 500, 999]


def close(table: Tensor, expected: list[float], rtol: float = 1e-6) -> None:
    torch.testing.assert_close(table, torch.tensor(expected, dtype=table.dtype), rtol=rtol, atol=0)


def images(count: int = 4) -> Tensor:
    return torch.rand(count, 1, 4, 4) * 2 - 1


def no_noise(k: int) -> Tensor:
    raise AssertionError(f"step {k} asked for noise")


# --------------------------------------------------------------------------------------------------------- schedules
def test_linear_schedule() -> None:
    close(LINEAR.betas[AT], [1e-4, 1.199199e-4, 5.079980e-3, 1.005996e-2, 0.02])
    close(LINEAR.alphas_cumprod[AT], [0.9999, 0.99978009, 0.52142303, 0.07779666, 4.035830e-5], rtol=1e-7)


def test_cosine_schedule() -> None:
    close(COSINE.betas[AT], [4.128422e-5, 4.614175e-5, 1.327224e-3, 3.155691e-3, 0.999])
    close(COSINE.alphas_cumprod[AT], [0.99995872, 0.99991258, 0.84588799, 0.49228517, 2.428767e-9])
    assert (COSINE.betas >= 0.999).sum() == 1


def test_posterior() -> None:
    assert LINEAR.posterior_variance[0] == 0
    close(LINEAR.posterior_variance[AT[1:]], [5.453188e-5, 5.051720e-3, 1.005134e-2, 1.999998e-2])
    close(LINEAR.posterior_coef_x0[AT], [1, 0.5452915, 7.684422e-3, 3.058057e-3, 1.283515e-4])
    assert LINEAR.posterior_coef_xt[0] == 0
    close(LINEAR.posterior_coef_xt[AT[1:]], [0.4547085, 0.9919079, 0.9941044, 0.9899487])


def test_variances_of_an_ancestral_step() -> None:
    small = Diffusion(knobs.Process(variance="fixed_small")).log_variance
    close(small[[0, 1, 250]].exp(), [5.453188e-5, 5.453188e-5, 5.051720e-3])
    close(LINEAR.log_variance[[0, 1, 250]].exp(), [5.453188e-5, 1.199199e-4, 5.079980e-3])
    assert LINEAR.log_variance[0].item() == pytest.approx(-9.8167, abs=5e-5)


def test_the_linear_schedule_ends_alike_for_every_length() -> None:
    short = Diffusion(knobs.Process(steps=100))
    close(short.betas[[0, 99]], [1e-3, 0.2])
    assert short.alphas_cumprod[-1] < 1e-4
    shortest = Diffusion(knobs.Process(steps=2))  # 1000/T·0.02 = 10 is no variance
    assert shortest.betas.max() == 0.999
    assert bool((shortest.alphas_cumprod > 0).all())


def test_tables_are_computed_in_double_precision() -> None:
    product = 1.0
    for i in range(1000):
        product *= 1 - (1e-4 + (0.02 - 1e-4) * i / 999)
    assert LINEAR.alphas_cumprod.dtype == torch.float64
    assert LINEAR.alphas_cumprod[-1].item() == pytest.approx(product, rel=1e-12)
    assert LINEAR.snr_table[999].item() == pytest.approx(product / (1 - product), rel=1e-6)


# ----------------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_half_precision_outputs_are_computed_with_in_single(prediction: Prediction) -> None:
    diffusion = Diffusion(knobs.Process(prediction=prediction))
    output, x_t, t = torch.randn(1, 1, 4, 4).bfloat16(), torch.randn(1, 1, 4, 4), torch.tensor([7])
    for method in (diffusion.predict_x0, diffusion.predict_noise):
        found = method(output, x_t, t)
        assert found.dtype == torch.float32
        assert torch.equal(found, method(output.float(), x_t, t))


# ---------------------------------------------------------------------------------------------------------- timesteps
def test_timesteps() -> None:
    assert LINEAR.timesteps(10, "quadratic") == [0, 10, 40, 89, 158, 247, 356, 484, 632, 800]
    assert LINEAR.timesteps(50, "linear") == list(range(0, 1000, 20))
    assert LINEAR.timesteps(1, "linear") == LINEAR.timesteps(1, "quadratic") == [999]
    assert LINEAR.timesteps(1000, "quadratic") == list(range(1000))


def test_timesteps_evenly_spaced_in_log_snr() -> None:
    for diffusion in (LINEAR, COSINE):
        at = diffusion.log_snr[diffusion.timesteps(10, "log_snr")]
        torch.testing.assert_close(-at.diff(), (at[0] - at[-1]).expand(9) / 9, atol=0.25, rtol=0)
        assert at[0] == diffusion.log_snr[0]
        assert at[-1] == diffusion.log_snr[-1]
    assert LINEAR.timesteps(1, "log_snr") == [999]


@pytest.mark.parametrize("skip", ["linear", "quadratic", "log_snr"])
@pytest.mark.parametrize("length", [2, 3, 7, 25, 100, 1000])
def test_timesteps_are_as_many_as_asked_for_and_distinct(skip: Skip, length: int) -> None:
    diffusion = Diffusion(knobs.Process(steps=length))
    for steps in range(2, length + 1, 1 + length // 100):
        chosen = diffusion.timesteps(steps, skip)
        assert len(chosen) == steps
        assert all(before < after for before, after in itertools.pairwise(chosen))
        assert chosen[0] == 0
        assert length / 2 - 1 <= chosen[-1] < length


# -------------------------------------------------------------------------------------------------------------- steps
def test_ancestral_step() -> None:
    x_t, noise = torch.full((1, 1, 1, 1), 0.5), torch.full((1, 1, 1, 1), 2.0)
    mean = 7.684422e-3 * 0.5 / math.sqrt(0.52142303) + 0.9919079 * 0.5
    large, small = knobs.Process(variance="fixed_large"), knobs.Process(variance="fixed_small")
    for process, beta in ((large, 5.079980e-3), (small, 5.051720e-3)):
        diffusion = Diffusion(process)
        step = diffusion.ancestral_step(torch.zeros(1, 1, 1, 1), x_t, 250, noise)
        assert step.item() == pytest.approx(mean + math.sqrt(beta) * 2, rel=1e-6)


def test_ancestral_step_clamps_the_image() -> None:
    x_t, zero = torch.full((1, 1, 1, 1), 3.0), torch.zeros(1, 1, 1, 1)
    assert LINEAR.ancestral_step(zero, x_t, 999, zero).item() == pytest.approx(1.283515e-4 + 0.9899487 * 3, rel=1e-6)
    assert LINEAR.ancestral_step(zero, x_t, 0, None).item() == 1


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_ddim_with_eta_1_and_no_skipping_is_the_ancestral_step(prediction: Prediction) -> None:
    diffusion = Diffusion(knobs.Process(prediction=prediction, variance="fixed_small"))
    output, x_t, noise = torch.randn(3, 2, 1, 4, 4).unbind()
    for t in (1, 2, 250, 999):
        ancestral = diffusion.ancestral_step(output, x_t, t, noise)
        torch.testing.assert_close(diffusion.ddim_step(output, x_t, t, t - 1, 1.0, noise), ancestral)


def test_ddim_sigma_is_proportional_to_eta_and_zero_at_the_end() -> None:
    full = LINEAR.ddim_sigma(500, 250, 1.0)
    a, b = 0.07779666, 0.52142303
    assert full == pytest.approx(math.sqrt((1 - b) / (1 - a) * (1 - a / b)), rel=1e-6)
    assert LINEAR.ddim_sigma(500, 250, 0.3) == pytest.approx(0.3 * full)
    assert LINEAR.ddim_sigma(0, -1, 1.0) == 0


# ----------------------------------------------------------------------------------------------------------- sampling
def gaussian(diffusion: Diffusion, mean: float, deviation: float) -> Predict:
    """The best network for data from N(m, s²): E[ε | x_t] = √(1−ᾱ)(x_t − √ᾱ·m)/(ᾱs² + 1 − ᾱ)."""

    def predict(x: Tensor, t: Tensor) -> Tensor:
        ab = diffusion.alphas_cumprod[t].float()[:, None, None, None]
        return (1 - ab).sqrt() * (x - ab.sqrt() * mean) / (ab * deviation**2 + 1 - ab)

    return predict


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("skip", ["linear", "quadratic", "log_snr"])
@pytest.mark.parametrize("steps", [1, 10, 300])
def test_a_perfect_network_returns_the_image(prediction: Prediction, skip: Skip, steps: int) -> None:
    diffusion = Diffusion(knobs.Process(prediction=prediction))
    x0 = images(2)
    asked: list[int] = []

    def predict(x: Tensor, t: Tensor) -> Tensor:
        assert t.shape == (2,)
        assert t.dtype == torch.int64
        asked.append(int(t[0]))
        ab = diffusion.alphas_cumprod[t].float()[:, None, None, None]
        return diffusion.target(x0, (x - ab.sqrt() * x0) / (1 - ab).sqrt(), t)

    how: dict[str, Any] = {"sampler": "dpmpp_2m"} if skip == "log_snr" else {"sampler": "ddim", "skip": skip}
    sampled = diffusion.sample(predict, torch.randn(2, 1, 4, 4), **how, steps=steps, step_noise=no_noise)
    torch.testing.assert_close(sampled, x0, atol=1e-4, rtol=0)
    assert asked == diffusion.timesteps(steps, skip)[::-1]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_dpmpp_2m_is_that_of_diffusers(
    schedule: Literal["linear", "cosine"], prediction: Prediction, steps: int
) -> None:
    """Theirs, of the scheduler that we export, at our timesteps; thresholding at 1 is our clamping. It keeps its tables in
    float32."""
    diffusers = pytest.importorskip("diffusers")
    changes = {"process.schedule": schedule, "process.prediction": prediction}
    config = cfg.override(cfg.baseline("digits"), changes)
    scheduler = diffusers.DPMSolverMultistepScheduler.from_config(
        commands.scheduler_options(config), thresholding=True, sample_max_value=1.0, algorithm_type="dpmsolver++",
        solver_order=2, solver_type="midpoint", lower_order_final=True,
    )  # fmt: skip
    diffusion = Diffusion(config.process)

    def predict(x: Tensor, t: Tensor) -> Tensor:  # anything that depends on x and t
        return torch.tanh(1.3 * x.roll(1, -1) + 0.001 * t[:, None, None, None])

    x = noise = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    scheduler.set_timesteps(timesteps=diffusion.timesteps(steps, "log_snr")[::-1])
    for t in scheduler.timesteps:
        x = scheduler.step(predict(x, t.expand(3)), t, x).prev_sample
    sampled = diffusion.sample(predict, noise, sampler="dpmpp_2m", steps=steps, step_noise=no_noise)
    torch.testing.assert_close(sampled, x, atol=3e-4, rtol=0)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
@pytest.mark.parametrize("variance", ["fixed_large", "fixed_small"])
def test_sampling_reproduces_a_gaussian(
    sampler: Literal["ddpm", "ddim"], variance: Literal["fixed_large", "fixed_small"]
) -> None:
    mean, deviation = 0.2, 0.25
    diffusion = Diffusion(knobs.Process(variance=variance))
    predict = gaussian(diffusion, mean, deviation)
    generator = torch.Generator().manual_seed(3)
    shape = (40, 1, 20, 20)
    called: list[int] = []

    def step_noise(k: int) -> Tensor:
        called.append(k)
        return torch.randn(shape, generator=generator)

    noise = torch.randn(shape, generator=generator)
    x = diffusion.sample(predict, noise, sampler=sampler, steps=500, eta=0.5, step_noise=step_noise)
    assert x.mean().item() == pytest.approx(mean, abs=0.01)
    assert x.std().item() == pytest.approx(deviation, rel=0.03)
    assert x.abs().max() <= 1
    assert called == list(range(999 if sampler == "ddpm" else 499))  # none for the last step


@pytest.mark.parametrize("path", ["vp", "flow"])
@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpmpp_2m", "euler", "heun"])
def test_sampling_never_waits_for_the_device(sampler: Any, path: Any) -> None:
    """Tensors on the meta device have no values: reading one would raise."""
    diffusion = Diffusion(knobs.Process(steps=20, prediction="v", path=path), device="meta")
    noise = torch.empty(2, 1, 4, 4, device="meta")
    x = diffusion.sample(
        lambda x, t: x, noise, sampler=sampler, steps=10, eta=1.0, step_noise=lambda k: torch.empty_like(noise)
    )
    assert x.shape == noise.shape


# ---------------------------------------------------------------------------------------------------- images are drawn
SHAPE = (1, 4, 4)


def network(x: Tensor, t: Tensor) -> Tensor:
    return x * 0.9


def drawn(
    diffusion: Any, n: int, batch: int, world: int = 1, predict: Any = network, precision: str = "fp32", **how: Any
) -> Tensor:
    """All ranks' images, put together."""
    evaluation = override(baseline("digits"), {"evaluation.batch_size": batch}).evaluation
    how |= {"precision": precision}
    whole = torch.full((n, *SHAPE), 77, dtype=torch.uint8)
    seen = torch.zeros(n, dtype=torch.int64)
    for rank in range(world):
        for start, part in generate(predict, diffusion, evaluation, SHAPE, n, "cpu", rank=rank, world=world, **how):
            whole[start : start + len(part)] = part
            seen[start : start + len(part)] += 1
    assert (seen == 1).all(), "every image exactly once"
    return whole


def test_noise_belongs_to_the_image() -> None:
    noise = ImageNoise(3, SHAPE, "cpu")
    whole = noise.initial(0, 300)
    assert whole.shape == (300, *SHAPE)
    for start, stop in [(0, 1), (63, 65), (64, 128), (100, 300), (299, 300)]:
        assert torch.equal(noise.initial(start, stop), whole[start:stop])
        assert torch.equal(noise.step(7, start, stop), noise.step(7, 0, 300)[start:stop])
    assert torch.equal(ImageNoise(3, SHAPE, "cpu").initial(0, 300), whole)


def test_noise_is_standard_normal_and_never_repeats() -> None:
    noise = ImageNoise(3, SHAPE, "cpu")
    draws = [
        noise.initial(0, 512),
        noise.step(0, 0, 512),
        noise.step(1, 0, 512),
        ImageNoise(4, SHAPE, "cpu").initial(0, 512),
    ]
    values = torch.stack([draw.flatten() for draw in draws])
    assert values.mean(1).abs().max() < 0.05
    assert (values.std(1) - 1).abs().max() < 0.05
    assert (torch.corrcoef(values) - torch.eye(4)).abs().max() < 0.05
    blocks = draws[0].view(8, -1)
    assert (torch.corrcoef(blocks) - torch.eye(8)).abs().max() < 0.15


def test_noise_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    ImageNoise(3, SHAPE, "cpu").initial(0, 100)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [7, 50, 1000])
def test_images_do_not_depend_on_batches_and_ranks(identity: Any, world: int, batch: int) -> None:
    whole = drawn(identity, 130, 130)
    assert torch.equal(drawn(identity, 130, batch, world), whole)
    assert whole.float().std() > 10


def test_all_batches_have_one_size(identity: Any) -> None:
    sizes = []

    def predict(x: Tensor, t: Tensor) -> Tensor:
        sizes.append((len(x), len(t)))
        return x

    drawn(identity, 130, 50, predict=predict)
    assert sizes == [(44, 44)] * 3


def test_the_evaluation_settings_reach_the_sampler() -> None:
    seen = {}

    class Recorder:
        def sample(self, predict: Any, noise: Tensor, *, step_noise: Any, **how: Any) -> Tensor:
            seen.update(how)
            return noise

    drawn(Recorder(), 8, 8)
    assert seen == {"sampler": "ddim", "steps": 20, "skip": "linear", "eta": 0.0, "progress": None}


def test_every_step_of_every_batch_is_told() -> None:
    diffusion, told = Diffusion(Process(steps=20)), list[tuple[int, int, int]]()
    drawn(diffusion, 21, 8, progress=lambda k, steps, x: told.append((k, steps, len(x))))
    assert told == [(k, 20, 7) for k in range(20)] * 3


@pytest.mark.parametrize(("n", "world", "batch"), [(1, 1, 8), (21, 1, 8), (21, 2, 8), (17, 3, 2), (5, 8, 100)])
def test_shares_are_those_of_the_busiest_rank(identity: Any, n: int, world: int, batch: int) -> None:
    evaluation = override(baseline("digits"), {"evaluation.batch_size": batch}).evaluation
    turns, size = shares(n, world, batch)
    starts = [start for start, _ in generate(network, identity, evaluation, SHAPE, n, "cpu", world=world)]
    assert starts == [turn * world * size for turn in range(turns)]
    assert size <= batch


def test_the_precision_covers_the_network_only() -> None:
    class Sampler:
        def sample(self, predict: Any, noise: Tensor, **_: Any) -> Tensor:
            assert not torch.is_autocast_enabled("cpu")
            output: Tensor = predict(noise, torch.zeros(len(noise)))
            assert output.dtype == torch.float32
            return output

    def predict(x: Tensor, t: Tensor) -> Tensor:
        product = x.flatten(1) @ torch.eye(16)
        assert product.dtype == torch.bfloat16
        return product.view(x.shape)

    drawn(Sampler(), 8, 8, predict=predict, precision="bf16")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_images_are_refused(identity: Any, bad: float) -> None:
    with pytest.raises(NonFiniteError, match="non-finite values in generated images 0…7"):
        drawn(identity, 8, 8, predict=lambda x, t: x * bad)


def test_to_uint8() -> None:
    values = torch.tensor([-3.0, -1.0, -0.999, 0.0, 0.5, 1.0, 2.0])
    assert to_uint8(values).tolist() == [0, 0, 0, 128, 191, 255, 255]
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(every.float() / 127.5 - 1), every)
