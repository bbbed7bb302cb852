"""Models to diffusers; skipped without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tunediff import config as cfg
from tunediff.workloads.diffusion import commands, unet
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.unet import UNet

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


def loaded(config: Any, state: dict[str, torch.Tensor]) -> UNet:
    net = UNet(config.model, config.data.channels, config.data.image_size).eval().requires_grad_(False)
    net.load_state_dict(state)
    return net


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
