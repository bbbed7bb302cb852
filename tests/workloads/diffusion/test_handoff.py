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


def edit(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | values))


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
    "process",
    [
        {},
        {"process.prediction": "v", "process.variance": "fixed_small"},
        {"process.schedule": "cosine"},
        {"process.schedule": "cosine", "process.prediction": "x0", "process.steps": 20},
    ],
)
def test_a_pipeline_of_ours_samples_the_same_images(tmp_path: Path, process: dict[str, Any]) -> None:
    diffusers = pytest.importorskip("diffusers")
    config = small(**{name.replace(".", "__"): value for name, value in process.items()})
    net = network(config)
    diffusers_export.write_pipeline(tmp_path / "p", config, net.state_dict())
    pipe = diffusers.DDPMPipeline.from_pretrained(tmp_path / "p")
    pipe.set_progress_bar_config(disable=True)
    steps, shape = config.process.steps, (2, 1, 8, 8)
    theirs = pipe(2, torch.Generator().manual_seed(5), num_inference_steps=steps, output_type="np").images

    generator = torch.Generator().manual_seed(5)  # the pipeline draws x_T, then the noise of each step
    x0 = Diffusion(config.process).sample(
        net,
        torch.randn(shape, generator=generator),
        sampler="ddpm",
        steps=steps,
        step_noise=lambda k: torch.randn(shape, generator=generator),
    )
    ours = (x0 / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    assert ours.std() > 0.1
    # Their tables are cumulative products in float32, ours in float64.
    torch.testing.assert_close(torch.from_numpy(theirs), ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("process", "kind"),
    [
        ({"process.path": "flow", "process.prediction": "v"}, "DDPMPipeline"),
        ({"process.schedule": "edm", "process.prediction": "v", "process.sigma_data": 0.5}, "ConsistencyModelPipeline"),
    ],
)
def test_a_pipeline_of_a_flow_or_edm_samples_the_same_images(
    tmp_path: Path, process: dict[str, Any], kind: str
) -> None:
    diffusers = pytest.importorskip("diffusers")
    config = small(**{name.replace(".", "__"): value for name, value in process.items()}, process__steps=1000)
    net = unet.network(config.knobs).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    net.requires_grad_(False)
    diffusers_export.write_pipeline(tmp_path / "p", config, net.state_dict())
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "p")
    assert type(pipe).__name__ == kind
    assert kind in diffusers_export.example(tmp_path / "p", config)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(5)
    theirs = pipe(batch_size=2, generator=generator, num_inference_steps=12, output_type="np").images

    def no_noise(k: int) -> torch.Tensor:
        raise AssertionError(f"step {k} asked for noise")

    noise = torch.randn((2, 1, 8, 8), generator=torch.Generator().manual_seed(5))
    x0 = Diffusion(config.process).sample(net, noise, sampler="euler", steps=12, step_noise=no_noise)
    ours = (x0 / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    assert ours.std() > 0.1
    torch.testing.assert_close(torch.from_numpy(theirs), ours, atol=5e-4, rtol=0)  # an eighth of a grey level


# ---------------------------------------------------------------------------------------------------- without diffusers
def test_a_pipeline_is_never_written_over_anything(pipeline: Path, tmp_path: Path) -> None:
    config = small()
    before = (pipeline / WEIGHTS).read_bytes()
    with pytest.raises(cfg.ConfigError, match="pipeline: is not empty; allowed: a new or an empty folder"):
        diffusers_export.write_pipeline(pipeline, config, network(config).state_dict())
    assert (pipeline / WEIGHTS).read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(cfg.ConfigError, match="file: is not empty"):
        diffusers_export.write_pipeline(tmp_path / "file", config, network(config).state_dict())
    (tmp_path / "empty").mkdir()
    diffusers_export.write_pipeline(tmp_path / "empty", config, network(config).state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "pipeline"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model.multipliers": [2, 4]}, r"model.multipliers: \[2, 4\] cannot be handed to diffusers: UNet2DModel"),
        ({"process.steps": 20}, "process.steps: 20 cannot be handed to diffusers: DDPMScheduler does not limit"),
        (
            {"process.path": "flow"},
            "process.prediction: 'epsilon' cannot be handed to diffusers: FlowMatchEulerDiscreteScheduler.* takes v",
        ),
        (
            {"process.schedule": "edm", "process.prediction": "x0"},
            "process.prediction: 'x0' cannot be handed to diffusers: EDMEulerScheduler.* takes v",
        ),
        (
            {"process.prediction": "v", "process.sigma_data": 0.5},
            "process.sigma_data: 0.5 cannot be handed to diffusers: DDPMScheduler has 1; EDMEulerScheduler has it",
        ),
    ],
)
def test_what_diffusers_does_not_have_is_not_written(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    config = cfg.override(DIGITS, SMALL | values)
    with pytest.raises(cfg.ConfigError, match=message):
        diffusers_export.write_pipeline(tmp_path / "p", config, network(config).state_dict())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"class_embed_type": "timestep"}, "class_embed_type: 'timestep' is not allowed; allowed: None"),
        ({"attention_head_dim": 8}, "attention_head_dim: 8 is not allowed"),
        ({"down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"]}, "down_block_types: .*CrossAttn.* is not"),
        ({"up_block_types": ["UpBlock2D", "UpBlock2D"]}, "up_block_types: .* is not allowed"),
        ({"act_fn": "gelu"}, "act_fn: 'gelu' is not allowed; allowed: 'silu'"),
        ({"norm_eps": 1e-5}, "norm_eps: 1e-05 is not"),
        ({"out_channels": 2}, "out_channels: 2 is not allowed; allowed: 1"),
        ({"block_out_channels": [8, 12]}, r"block_out_channels: \[8, 12\] is not allowed"),
        ({"sample_size": [8, 16]}, r"sample_size: \[8, 16\] is not allowed"),
        ({"time_embedding_dim": 5}, "time_embedding_dim is not allowed"),
        ({"attn_norm_num_groups": 2}, "attn_norm_num_groups is not allowed"),
        ({"layers_per_block": 0}, "model.blocks: 0 is not allowed"),
        ({"new_option": 1}, "new_option: 1 is not allowed"),
        ({"_class_name": "UNet2DConditionModel"}, "_class_name: 'UNet2DConditionModel' is not allowed; allowed: UNet2D"),
    ],
)  # fmt: skip
def test_networks_that_are_not_ours_are_refused(pipeline: Path, values: dict[str, Any], message: str) -> None:
    edit(pipeline / "unet" / "config.json", **values)
    with pytest.raises(cfg.ConfigError, match=f"unet/config.json: {message}"):
        diffusers_export.read_unet(pipeline)


def test_defaults_of_diffusers_count_where_config_json_is_silent(pipeline: Path) -> None:
    content = json.loads((pipeline / "unet" / "config.json").read_text())
    del content["freq_shift"]
    (pipeline / "unet" / "config.json").write_text(json.dumps(content))
    with pytest.raises(cfg.ConfigError, match=r"freq_shift: 0 \(diffusers' default\) is not allowed; allowed: 1"):
        diffusers_export.read_unet(pipeline)


def test_weights_of_another_network_or_damaged_ones_are_refused(pipeline: Path) -> None:
    file = pipeline / WEIGHTS
    weights = load_file(file)

    def refused_with(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, file)
        with pytest.raises(cfg.ConfigError, match=f"{file}: {message}"):
            diffusers_export.read_unet(pipeline)

    name = "mid_block.attentions.0.to_k.weight"
    refused_with({k: v for k, v in weights.items() if k != name}, f"{name} is missing")
    refused_with(weights | {name: torch.zeros(16, 8)}, f"{name} has shape 16×8; by config.json it should be 16×16")
    refused_with(weights | {"class_embedding.weight": torch.zeros(1)}, "class_embedding.weight has no place")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(cfg.ConfigError, match=f"{file}: is damaged or holds no plain weights"):
        diffusers_export.read_unet(pipeline)
    file.unlink()
    with pytest.raises(
        cfg.ConfigError, match=r"no weights; looked for diffusion_pytorch_model.safetensors and .*\.bin"
    ):
        diffusers_export.read_unet(pipeline)


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
    net = network(config)
    file = tmp_path / "ema.safetensors"
    save_file(net.state_dict(), file)
    assert all(
        torch.equal(tensor, net.state_dict()[n]) for n, tensor in diffusers_export.initial_weights(file, config).items()
    )
    loaded(config, diffusers_export.initial_weights(pipeline, config))
    for path in (file, pipeline):
        with pytest.raises(cfg.ConfigError, match=r"time.linear1.weight has shape 32×8; the model .* has 64×16"):
            diffusers_export.initial_weights(path, small(model__channels=16))
        with pytest.raises(cfg.ConfigError, match=r"down.0.attention.norm.weight is missing"):
            diffusers_export.initial_weights(path, small(model__attention=[8, 4]))
        with pytest.raises(cfg.ConfigError, match=r"down.2.attention.norm.\w+ has no place in the model"):
            diffusers_export.initial_weights(path, small(model__attention=[]))
    with pytest.raises(cfg.ConfigError, match="norm_num_groups is 4, but model.norm_groups = 8"):
        diffusers_export.initial_weights(pipeline, small(model__norm_groups=8))
    with pytest.raises(cfg.ConfigError, match="none.safetensors: cannot be read"):
        diffusers_export.initial_weights(tmp_path / "none.safetensors", config)
    with pytest.raises(cfg.ConfigError, match="no U-Net; looked for unet/config.json and config.json"):
        diffusers_export.initial_weights(tmp_path, config)
