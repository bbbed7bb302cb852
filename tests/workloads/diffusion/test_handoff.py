"""Models to and from diffusers. What needs diffusers itself is skipped without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tunediff import config as cfg
from tunediff.workloads.diffusion import diffusers_export, unet
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.unet import UNet

DIGITS = cfg.baseline("digits")
SMALL = {"model.channels": 8, "model.norm_groups": 4, "process.steps": 50, "evaluation.steps": 5}
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"

# config.json and scheduler_config.json of google/ddpm-cifar10-32, which lie at the root of that repository.
GOOGLE_UNET: dict[str, Any] = {
    "_class_name": "UNet2DModel", "_diffusers_version": "0.0.4", "act_fn": "silu", "attention_head_dim": None,
    "block_out_channels": [128, 256, 256, 256], "center_input_sample": False,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"], "downsample_padding": 0,
    "flip_sin_to_cos": False, "freq_shift": 1, "in_channels": 3, "layers_per_block": 2, "mid_block_scale_factor": 1,
    "norm_eps": 1e-06, "norm_num_groups": 32, "out_channels": 3, "sample_size": 32, "time_embedding_type": "positional",
    "up_block_types": ["UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
}  # fmt: skip


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
    diffusers_export.write_pipeline(tmp_path / "pipeline", config, network(config).state_dict())
    return tmp_path / "pipeline"


# ------------------------------------------------------------------------------------------------------- with diffusers
def test_the_weights_of_the_ddpm_authors_layout_compute_the_same(tmp_path: Path) -> None:
    """Flat folder, pickled weights, the attention names of that time: 35,746,307 parameters."""
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.UNet2DModel.from_config(GOOGLE_UNET).eval()
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = {}
    for name, tensor in theirs.state_dict().items():
        for present, before in old.items():
            name = name.replace(present, before)
        state[name] = tensor
    torch.save(state, tmp_path / "diffusion_pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(GOOGLE_UNET))

    values, ours = diffusers_export.read_unet(tmp_path)
    config = cfg.override(cfg.baseline("cifar10"), values)
    assert cfg.differences(config, cfg.baseline("cifar10")) == {"model.dropout": 0.0}
    net = loaded(config, ours)
    assert sum(parameter.numel() for parameter in net.parameters()) == 35_746_307
    x, t = torch.randn(2, 3, 32, 32), torch.tensor([1, 999])
    with torch.no_grad():
        torch.testing.assert_close(net(x, t), theirs(x, t).sample, atol=1e-5, rtol=1e-5)


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
def test_a_pipeline_of_ours_is_the_same_network_there_and_back(tmp_path: Path, values: dict[str, Any]) -> None:
    diffusers = pytest.importorskip("diffusers")
    config = cfg.override(DIGITS, SMALL | values)
    ours = network(config)
    diffusers_export.write_pipeline(tmp_path / "p", config, ours.state_dict())
    theirs = diffusers.DDPMPipeline.from_pretrained(tmp_path / "p").unet
    x, t = inputs(config)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x, t).sample, ours(x, t), atol=1e-5, rtol=1e-5)

    diffusers.DDPMPipeline(theirs, diffusers.DDPMScheduler(50, 0.002, 0.4)).save_pretrained(tmp_path / "again")
    for folder in ("p", "again"):
        found, state = diffusers_export.read_unet(tmp_path / folder)
        assert {name: cfg.flat(config)[name] for name in found} == found
        assert all(torch.equal(state[name], tensor) for name, tensor in ours.state_dict().items())


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
    diffusers = pytest.importorskip("diffusers")
    config = cfg.override(DIGITS, SMALL | process)
    net = unet.network(config.knobs).eval().requires_grad_(False)
    for parameter in net.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    diffusers_export.write_pipeline(tmp_path / "p", config, net.state_dict())
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "p")
    assert type(pipe).__name__ == f"{kind}Pipeline"
    assert type(pipe).__name__ in diffusers_export.example(tmp_path / "p", config)
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


# ---------------------------------------------------------------------------------------------------- without diffusers
def test_a_pipeline_is_never_written_over_anything(pipeline: Path, tmp_path: Path) -> None:
    config = small()
    before = (pipeline / WEIGHTS).read_bytes()
    (tmp_path / "file").write_text("")
    for place in ("pipeline", "file"):
        refused(place, diffusers_export.write_pipeline, tmp_path / place, config, network(config).state_dict())
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
    refused(key, diffusers_export.write_pipeline, tmp_path / "p", config, network(config).state_dict())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "values",
    [
        {"class_embed_type": "timestep"}, {"attention_head_dim": 8}, {"up_block_types": ["UpBlock2D", "UpBlock2D"]},
        {"down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"]}, {"act_fn": "gelu"}, {"norm_eps": 1e-5},
        {"out_channels": 2}, {"block_out_channels": [8, 12]}, {"sample_size": [8, 16]}, {"time_embedding_dim": 5},
        {"attn_norm_num_groups": 2}, {"layers_per_block": 0}, {"new_option": 1}, {"freq_shift": None},
        {"_class_name": "UNet2DConditionModel"},
    ],
)  # fmt: skip
def test_networks_that_are_not_ours_are_refused(pipeline: Path, values: dict[str, Any]) -> None:
    """None: `config.json` is silent, and the default of diffusers counts."""
    path = pipeline / "unet" / "config.json"
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in content.items() if name != "freq_shift" or value}))
    refused("blocks" if "layers_per_block" in values else next(iter(values)), diffusers_export.read_unet, pipeline)


def test_weights_of_another_network_or_damaged_ones_are_refused(pipeline: Path) -> None:
    file, name = pipeline / WEIGHTS, "mid_block.attentions.0.to_k.weight"
    weights = load_file(file)
    less, more = {k: v for k, v in weights.items() if k != name}, {"class_embedding.weight": torch.zeros(1)}
    for tensors, key in (
        (less, name),
        (weights | {name: torch.zeros(16, 8)}, name),
        (weights | more, "class_embedding.weight"),
    ):
        save_file(tensors, file)
        refused(f"{file}: {key}", diffusers_export.read_unet, pipeline)
    file.write_bytes(file.read_bytes()[:1000])
    refused(str(file), diffusers_export.read_unet, pipeline)
    file.unlink()
    refused("safetensors", diffusers_export.read_unet, pipeline)


def test_no_code_runs_from_pickled_weights(pipeline: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (pipeline / WEIGHTS).unlink()
    torch.save({"conv_in.weight": Evil()}, pipeline / "unet" / "diffusion_pytorch_model.bin")
    with pytest.raises(cfg.ConfigError, match="holds no plain weights"):
        diffusers_export.read_unet(pipeline)
    assert not (tmp_path / "ran").exists()


def test_initial_weights_fit_or_the_first_misfit_is_named(pipeline: Path, tmp_path: Path) -> None:
    config = small()
    net, file, read = network(config), tmp_path / "ema.safetensors", diffusers_export.initial_weights
    save_file(net.state_dict(), file)
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in read(file, config).items())
    loaded(config, read(pipeline, config))
    for path in (file, pipeline):
        refused("time.linear1.weight", read, path, small(model__channels=16))
        refused("down.0.attention.norm.weight", read, path, small(model__attention=[8, 4]))
        refused("down.2.attention.norm", read, path, small(model__attention=[]))
    refused("model.norm_groups = 8", read, pipeline, small(model__norm_groups=8))
    for path in (tmp_path / "none.safetensors", tmp_path):
        refused(str(path), read, path, config)
