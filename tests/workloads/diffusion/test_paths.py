"""What paths and predictions mean, against formulas of their sources, Gaussian data and diffusers' schedulers."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workloads.diffusion.test_process import no_noise
from tunediff import config as cfg
from tunediff.distributed import alone
from tunediff.workloads.diffusion import commands, knobs, methods, timesteps, unet
from tunediff.workloads.diffusion.objective import DiffusionLoss, build_weighting
from tunediff.workloads.diffusion.process import Diffusion, Predict, mix, solver_levels
from tunediff.workloads.diffusion.timesteps import wiener
from tunediff.workloads.diffusion.unet import UNet

PROCESSES = [
    knobs.Process(path=path, schedule=schedule, prediction=prediction, sigma_data=deviation)
    for path, schedule in (("vp", "linear"), ("vp", "cosine"), ("vp", "edm"), ("flow", "linear"))
    for prediction, deviation in (("epsilon", 1.0), ("x0", 1.0), ("v", 1.0), ("v", 0.5))
    if (path, deviation) != ("flow", 0.5)
]
FLOW, EDM = knobs.Process(path="flow", prediction="v"), knobs.Process("edm", prediction="v", sigma_data=0.5)
MEAN, DEVIATION = 0.2, 0.3
"""Of the Gaussian images."""
every_process = pytest.mark.parametrize(
    "process", PROCESSES, ids=lambda p: f"{p.path}-{p.schedule}-{p.prediction}-{p.sigma_data:g}"
)


def sigmas(diffusion: Diffusion) -> Tensor:
    return ((1 - diffusion.alphas_cumprod) / diffusion.alphas_cumprod).sqrt()


def sigma_at(process: knobs.Process, t: Tensor) -> Tensor:
    """σ of timesteps that may lie between those of the chain: evenly in s along a flow, else in ln σ; float64."""
    table = sigmas(Diffusion(process)).numpy()
    if process.path == "flow":
        noise = np.interp(t.numpy(), np.arange(len(table)), table / (1 + table))
        return torch.from_numpy(noise / (1 - noise))
    return torch.from_numpy(np.interp(t.numpy(), np.arange(len(table)), np.log(table))).exp()


def gaussian(process: knobs.Process) -> Predict:
    """The best network for images from N(m, s²), by the definitions of flow matching, EDM (table 1) and v."""

    def predict(x: Tensor, t: Tensor) -> Tensor:
        sigma = sigma_at(process, t)[:, None, None, None]
        if process.path == "flow":
            y = x.double() * (1 + sigma)
        else:
            y = x.double() * (sigma.square() + process.sigma_data**2).sqrt()
        x0 = (DEVIATION**2 * y + sigma.square() * MEAN) / (DEVIATION**2 + sigma.square())
        noise = (y - x0) / sigma
        if process.prediction != "v":
            return (noise if process.prediction == "epsilon" else x0).float()
        if process.path == "flow":
            return (noise - x0).float()
        edm = (x0 - process.sigma_data**2 / (sigma.square() + process.sigma_data**2) * y) / (
            sigma * process.sigma_data / (sigma.square() + process.sigma_data**2).sqrt()
        )
        return -edm.float()

    return predict


# -------------------------------------------------------------------------------------------------------- conversions
@every_process
def test_the_best_network_implies_image_and_noise_of_gaussian_data(process: knobs.Process) -> None:
    diffusion = Diffusion(process)
    sigma = sigmas(diffusion)
    t = ((sigma > 0.3) & (sigma < 3)).nonzero()[:, 0]  # beyond, float32 has no 1e-6 in x0 or ε
    x0, noise = torch.randn(2, len(t), 1, 2, 2).clamp(-2, 2)
    x0 = MEAN + DEVIATION * x0
    x = diffusion.add_noise(x0, noise, t)
    sigma = sigma[t][:, None, None, None]
    y = x0 + sigma * noise
    expected = (DEVIATION**2 * y + sigma.square() * MEAN) / (DEVIATION**2 + sigma.square())
    output = gaussian(process)(x, t)
    torch.testing.assert_close(diffusion.predict_x0(output, x, t).double(), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(
        diffusion.predict_noise(output, x, t).double(), (y - expected) / sigma, atol=2e-6, rtol=0
    )


@every_process
def test_an_error_of_the_prediction_is_that_of_the_noise_at_every_level(process: knobs.Process) -> None:
    """The best network's ε-error on N(m, s²) is s²/(s²+σ²); its error of x0 σ² times that, of whatever it predicts: by the
    target's definition."""
    diffusion = Diffusion(process)
    sigma, s = sigmas(diffusion), DEVIATION
    of_noise = s**2 / (s**2 + sigma.square())
    if process.prediction == "v" and process.path == "flow":
        of_target = of_noise * (1 + sigma).square()  # ε − x0, whose errors are opposite: −σ times as large
    elif process.prediction == "v":
        d = process.sigma_data
        of_target = of_noise * (d + sigma.square() / d).square() / (sigma.square() + d**2)
    else:
        of_target = of_noise * (sigma.square() if process.prediction == "x0" else 1)
    torch.testing.assert_close(diffusion.to_epsilon * of_target, of_noise, rtol=1e-9, atol=0)


@every_process
def test_target_and_input_give_back_image_and_noise(process: knobs.Process) -> None:
    diffusion = Diffusion(process)
    sigma = sigmas(diffusion)
    t = ((sigma > 0.03) & (sigma < 30)).nonzero()[::40, 0]
    x0, noise = torch.rand(len(t), 1, 2, 2) * 2 - 1, torch.randn(len(t), 1, 2, 2)
    x, target = diffusion.add_noise(x0, noise, t), diffusion.target(x0, noise, t)
    torch.testing.assert_close(diffusion.predict_x0(target, x, t), x0, atol=5e-5, rtol=0)
    torch.testing.assert_close(diffusion.predict_noise(target, x, t), noise, atol=5e-5, rtol=0)


def test_the_flow_is_a_straight_line_from_image_to_noise() -> None:
    flow, (x0, noise) = Diffusion(FLOW), torch.randn(2, 3, 1, 2, 2)
    t = torch.tensor([0, 499, 899])
    share = torch.tensor([0.001, 0.5, 0.9])[:, None, None, None]
    torch.testing.assert_close(flow.add_noise(x0, noise, t), (1 - share) * x0 + share * noise)
    torch.testing.assert_close(flow.target(x0, noise, t), noise - x0)
    torch.testing.assert_close(flow.add_noise(x0, noise, torch.tensor([999] * 3)), noise, atol=1e-3, rtol=0)


def test_edm_has_its_preconditioning() -> None:
    edm, (x0, noise), t = Diffusion(EDM), torch.randn(2, 3, 1, 2, 2), torch.tensor([400, 600, 800])
    sigma = sigmas(edm)[t][:, None, None, None].float()
    y, root = x0 + sigma * noise, (sigma.square() + 0.25).sqrt()
    torch.testing.assert_close(edm.add_noise(x0, noise, t), y / root)
    target = (x0 - 0.25 / root.square() * y) / (sigma * 0.5 / root)  # (x0 − c_skip·y)/c_out
    torch.testing.assert_close(edm.target(x0, noise, t), -target)
    one = Diffusion(dataclasses.replace(EDM, sigma_data=1.0))
    near = Diffusion(dataclasses.replace(EDM, sigma_data=1 + 1e-9))  # takes the general formula
    torch.testing.assert_close(near.target(x0, noise, t), one.target(x0, noise, t))


# -------------------------------------------------------------------------------------------------------------- levels
def test_the_levels_of_edm_are_even_in_the_logarithm_of_sigma() -> None:
    logs = sigmas(Diffusion(knobs.Process("edm", 101))).log()
    torch.testing.assert_close(logs.diff(), torch.full((100,), math.log(40_000) / 100, dtype=torch.float64))
    assert logs[0].exp().item() == pytest.approx(0.002)


def test_uniform_t_of_a_flow_is_uniform_s() -> None:
    """p(λ) = ⅛·sech²(λ/4), whose distribution function is the logistic function of λ/2."""
    log_snr = Diffusion(FLOW).snr_table.log()
    for level in (-6.0, -1.0, 0.0, 2.0, 7.0):
        share = (log_snr < level).double().mean().item()
        assert share == pytest.approx(1 / (1 + math.exp(-level / 2)), abs=2e-3)


@pytest.mark.parametrize("process", [FLOW, EDM, knobs.Process("cosine")], ids=lambda p: p.path + p.schedule)
@pytest.mark.parametrize(("mean", "std"), [(-1.2, 1.2), (-0.4, 1.0)])
def test_log_normal_draws_the_logarithm_of_sigma(process: knobs.Process, mean: float, std: float) -> None:
    diffusion = Diffusion(process)
    sampler = timesteps.build(methods.LogNormal(mean=mean, std=std), diffusion, 1, alone("cpu"))
    p, logs = sampler.probabilities(), sigmas(diffusion).log()
    for quantile in (-1.0, 0.0, 1.5):
        below = p[logs < mean + quantile * std].sum().item()
        assert below == pytest.approx(torch.special.ndtr(torch.tensor(quantile)).item(), abs=0.01)
    assert (methods.LogNormal().mean, methods.LogNormal().std) == (-1.2, 1.2)


@every_process
def test_wiener_and_weightings_mean_the_same_noise_levels_and_objective(process: knobs.Process) -> None:
    diffusion = Diffusion(process)
    sampler = timesteps.build(methods.Wiener(), diffusion, 1, alone("cpu"))
    x0 = 0.5 * torch.randn(wiener.LEARNED_FROM, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    sampler.sample(x0, torch.Generator().manual_seed(0))
    p, log_snr = sampler.probabilities(), diffusion.snr_table.log()
    # White images of variance s² are half decided at SNR = 1/s².
    assert (p * log_snr).sum().item() == pytest.approx(-math.log(0.25), abs=0.03)
    objective = DiffusionLoss(sampler, build_weighting(methods.P2(), diffusion), diffusion)
    expected = p / (1 + diffusion.snr_table)
    torch.testing.assert_close(objective.effective_weight(), expected / expected.mean())


def test_the_network_is_told_what_schedulers_of_diffusers_tell() -> None:
    x, digits = torch.randn(2, 1, 8, 8), cfg.baseline("digits")
    changes = ({"process.path": "flow", "process.prediction": "v"}, 1.0), ({"process.schedule": "edm"}, None)
    for values, told in changes:
        net = unet.network(cfg.override(digits, values).knobs).eval()
        plain = unet.network(digits.knobs).eval()
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        plain.load_state_dict(net.state_dict())
        t = torch.tensor([0, 999])
        expected = t + told if told else torch.tensor([0.002, 80.0]).log() / 4
        with torch.no_grad():
            torch.testing.assert_close(net(x, t), plain(x, expected))


# ------------------------------------------------------------------------------------------------------------- solvers
@pytest.mark.parametrize(
    "process",
    [
        pytest.param(one, marks=[] if one.prediction == "v" and one.schedule != "cosine" else pytest.mark.nightly)
        for one in PROCESSES
    ],
    ids=lambda p: f"{p.path}-{p.schedule}-{p.prediction}-{p.sigma_data:g}",
)
@pytest.mark.parametrize("sampler", ["euler", "heun"])
def test_solvers_follow_the_ode_of_gaussian_data(process: knobs.Process, sampler: Any) -> None:
    """y − m shrinks as √(s²+σ²). Euler's error falls with the step, Heun's with its square."""
    if (process.path, process.prediction, sampler) == ("flow", "epsilon", "euler"):
        return  # refused
    process = dataclasses.replace(process, steps=10_000)
    diffusion, errors = Diffusion(process), []
    noise = torch.linspace(-2, 2, 16).view(1, 1, 4, 4)
    for steps in (40, 80):
        start = solver_levels(process, diffusion.alphas_cumprod, steps, sampler)[0][1]
        y = math.hypot(1, start) * noise
        exact = MEAN + (y - MEAN) * DEVIATION / math.hypot(DEVIATION, start)
        x = diffusion.sample(gaussian(process), noise, sampler=sampler, steps=steps, step_noise=no_noise)
        errors.append((x - exact).abs().max().item())
    assert errors[1] < (0.06 if sampler == "euler" else 0.016)
    assert errors[0] / errors[1] > (1.7 if sampler == "euler" else 3.3)


def test_heun_asks_twice_per_step_but_for_the_last() -> None:
    asked: list[float] = []

    def predict(x: Tensor, t: Tensor) -> Tensor:
        asked.append(float(t[0]))
        return torch.zeros_like(x)

    Diffusion(EDM).sample(predict, torch.randn(1, 1, 2, 2), sampler="heun", steps=5, step_noise=no_noise)
    evaluation = knobs.DiffusionEvaluation(sampler="heun", steps=5)
    assert len(asked) == evaluation.passes(1000) == 9
    assert evaluation.sampling_steps(1000) == 5
    assert asked[1::2] == asked[2::2]  # the end of a step is the beginning of the next


def anything(x: Tensor, t: Tensor) -> Tensor:
    """A network that depends on x and t."""
    return torch.tanh(1.3 * x.roll(1, -1) + 0.001 * t[:, None, None, None])


def theirs(scheduler: Any, noise: Tensor, tell: Any = lambda t: t) -> Tensor:
    """The images of a scheduler of diffusers that has its timesteps; `tell`: our t for theirs."""
    x = noise * scheduler.init_noise_sigma if hasattr(scheduler, "init_noise_sigma") else noise
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        x = scheduler.step(anything(scaled, tell(t).expand(len(x))), t, x, return_dict=False)[0]
    return x


@pytest.mark.parametrize("steps", [1, 2, 18])
@pytest.mark.parametrize("process", [FLOW, EDM, dataclasses.replace(EDM, sigma_data=1.0)])
def test_euler_is_that_of_the_exported_schedulers(process: knobs.Process, steps: int) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = commands.scheduler_options(cfg.override(cfg.baseline("digits"), {
        f"process.{field.name}": getattr(process, field.name) for field in dataclasses.fields(process)
    }))  # fmt: skip
    one = getattr(diffusers, str(scheduler["_class_name"])).from_config(scheduler)
    one.set_timesteps(steps)
    a, b = process.told_time()
    noise = torch.randn(3, 1, 4, 4)
    expected = theirs(one, noise, lambda t: (t - b) / a)
    found = Diffusion(process).sample(anything, noise, sampler="euler", steps=steps, step_noise=no_noise)
    # A flow begins at s = 1e-4 here, at 0 there.
    torch.testing.assert_close(found, expected, atol=5e-4 if process.path == "flow" else 5e-5, rtol=0)


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_euler_of_a_chain_is_that_of_diffusers(schedule: Any, prediction: Any) -> None:
    diffusers = pytest.importorskip("diffusers")
    process = knobs.Process(schedule, prediction=prediction)
    diffusion, noise = Diffusion(process), torch.randn(3, 1, 4, 4)
    kind = {"epsilon": "epsilon", "v": "v_prediction"}[prediction]
    one = diffusers.EulerDiscreteScheduler(
        trained_betas=diffusion.betas.numpy(), prediction_type=kind, timestep_spacing="trailing"
    )
    grid = [sigma for _, sigma in solver_levels(process, diffusion.alphas_cumprod, 12, "euler")]
    one.set_timesteps(sigmas=[*grid, 0.0])
    found = diffusion.sample(anything, noise, sampler="euler", steps=12, step_noise=no_noise)
    torch.testing.assert_close(found, theirs(one, noise), atol=2e-3, rtol=1e-3)  # their tables are float32


def test_heun_is_that_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    process = knobs.Process("edm", prediction="v")
    diffusion, noise = Diffusion(process), torch.randn(3, 1, 4, 4)
    one = diffusers.HeunDiscreteScheduler(
        trained_betas=diffusion.betas.numpy(), prediction_type="v_prediction", use_karras_sigmas=True
    )
    one.set_timesteps(12)
    found = diffusion.sample(anything, noise, sampler="heun", steps=12, step_noise=no_noise)
    torch.testing.assert_close(found, theirs(one, noise), atol=5e-3, rtol=1e-3)  # their tables are float32


@pytest.mark.parametrize("process", [FLOW, EDM])
@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpmpp_2m", "euler", "heun"])
def test_every_sampler_gives_back_the_image_of_a_perfect_network(process: knobs.Process, sampler: Any) -> None:
    diffusion, x0 = Diffusion(dataclasses.replace(process, steps=50)), torch.rand(2, 1, 4, 4) * 2 - 1

    def predict(x: Tensor, t: Tensor) -> Tensor:
        sigma = sigma_at(diffusion.process, t)[:, None, None, None].float()
        at = mix(diffusion.process, (1 + sigma.square()).rsqrt(), sigma * (1 + sigma.square()).rsqrt())
        return at.v_noise * (x / at.image - x0) / sigma - at.v_image * x0

    drawn = diffusion.sample(predict, torch.randn(2, 1, 4, 4), sampler=sampler, steps=10, step_noise=lambda k: 0 * x0)
    torch.testing.assert_close(drawn, x0, atol=1e-3, rtol=0)


# ------------------------------------------------------------------------------ models to diffusers; skipped without it
diffusers = pytest.importorskip("diffusers")
DIGITS = cfg.baseline("digits")
SMALL = {"model.channels": 8, "model.norm_groups": 4, "process.steps": 50, "evaluation.steps": 5}
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


def small(**values: Any) -> Any:
    return cfg.override(DIGITS, SMALL | {name.replace("__", "."): value for name, value in values.items()})


def refused(key: str, call: Any, *given: Any) -> None:
    """`call` refuses what it is given; `key` names what is at fault."""
    with pytest.raises(cfg.ConfigError, match=key):
        call(*given)


def network(config: Any) -> UNet:
    """A network without zeros, so that every part of it matters."""
    net = UNet(config.model, config.data.channels, config.data.image_size).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return net.requires_grad_(False)


def inputs(config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    size = config.data.image_size
    return torch.randn(3, config.data.channels, size, size), torch.tensor([0, 7, config.process.steps - 1])


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    config = small()
    commands.write_pipeline(tmp_path / "pipeline", config, network(config).state_dict)
    return tmp_path / "pipeline"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model.attention": [8, 4], "model.blocks": 2},
        {"model.attention": []},
        {"model.multipliers": [1, 3, 2], "model.attention": [2], "data.channels": 3, "data.name": "cifar10"},
        {"model.multipliers": [1], "model.attention": [5], "data.image_size": 5, "model.channels": 9, "model.norm_groups": 3},
    ],
)  # fmt: skip
def test_a_pipeline_of_ours_is_the_same_network_there(tmp_path: Path, values: dict[str, Any]) -> None:
    config = cfg.override(DIGITS, SMALL | values)
    ours = network(config)
    commands.write_pipeline(tmp_path / "p", config, ours.state_dict)
    theirs = diffusers.DDPMPipeline.from_pretrained(tmp_path / "p").unet
    x, t = inputs(config)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x, t).sample, ours(x, t), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("process", "kind", "sampler", "steps", "atol"),
    [
        ({}, "DDPM", "ddpm", 50, 1e-4),
        ({"process.prediction": "v", "process.variance": "fixed_small"}, "DDPM", "ddpm", 50, 1e-4),
        ({"process.schedule": "cosine"}, "DDPM", "ddpm", 50, 1e-4),
        ({"process.schedule": "cosine", "process.prediction": "x0", "process.steps": 20}, "DDPM", "ddpm", 20, 1e-4),
        ({"process.path": "flow", "process.prediction": "v", "process.steps": 1000}, "DDPM", "euler", 12, 5e-4),
        (
            {"process.schedule": "edm", "process.prediction": "v", "process.sigma_data": 0.5, "process.steps": 1000},
            "ConsistencyModel", "euler", 12, 5e-4,
        ),
    ],
)  # fmt: skip
def test_a_pipeline_of_ours_samples_the_same_images(
    tmp_path: Path, process: dict[str, Any], kind: str, sampler: Any, steps: int, atol: float
) -> None:
    """Their tables are cumulative products in float32, ours in float64; `atol` is at most an eighth of a grey level."""
    config = cfg.override(DIGITS, SMALL | process)
    net = unet.network(config.knobs).eval().requires_grad_(False)
    for parameter in net.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    called = commands.write_pipeline(tmp_path / "p", config, net.state_dict)
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "p")
    assert type(pipe).__name__ == f"{kind}Pipeline"
    assert type(pipe).__name__ in called
    pipe.set_progress_bar_config(disable=True)
    how = {"generator": torch.Generator().manual_seed(5), "num_inference_steps": steps, "output_type": "np"}
    theirs = pipe(batch_size=2, **how).images

    generator = torch.Generator().manual_seed(5)  # the pipeline draws x_T, then the noise of each step if there is any
    noise = torch.randn((2, 1, 8, 8), generator=generator)
    of_step = (lambda k: torch.randn(noise.shape, generator=generator)) if sampler == "ddpm" else pytest.fail
    x0 = Diffusion(config.process).sample(net, noise, sampler=sampler, steps=steps, step_noise=of_step)
    ours = (x0 / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    assert ours.std() > 0.1
    torch.testing.assert_close(torch.from_numpy(theirs), ours, atol=atol, rtol=0)


def test_a_pipeline_is_never_written_over_anything(pipeline: Path, tmp_path: Path) -> None:
    config = small()
    before = (pipeline / WEIGHTS).read_bytes()
    (tmp_path / "file").write_text("")
    for place in ("pipeline", "file"):
        refused(place, commands.write_pipeline, tmp_path / place, config, network(config).state_dict)
    assert (pipeline / WEIGHTS).read_bytes() == before


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"model.multipliers": [2, 4]}, r"model.multipliers: \[2, 4\]"), ({"process.steps": 20}, "process.steps: 20"),
        ({"process.path": "flow"}, "process.prediction: 'epsilon'"),
        ({"process.schedule": "edm", "process.prediction": "x0"}, "process.prediction: 'x0'"),
        ({"process.prediction": "v", "process.sigma_data": 0.5}, "process.sigma_data: 0.5"),
    ],
)  # fmt: skip
def test_what_diffusers_does_not_have_is_not_written(tmp_path: Path, values: dict[str, Any], key: str) -> None:
    config = cfg.override(DIGITS, SMALL | values)
    refused(key, commands.write_pipeline, tmp_path / "p", config, network(config).state_dict)
    assert not list(tmp_path.iterdir())
