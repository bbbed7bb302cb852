"""Models to and from diffusers: `DDPMPipeline` folders, written and read without diffusers being installed.

Our U-Net is diffusers' `UNet2DModel` as the DDPM authors' own weights use it (google/ddpm-cifar10-32), name by name;
`_UNET` lists the options it stands for. What the other side cannot represent is refused, never approximated. Torch is
imported only where weights are touched, so that a folder can be judged in milliseconds.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import config as cfg
from tunediff.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.workloads.diffusion.knobs import Knobs, Model
    from tunediff.workloads.diffusion.unet import UNet

WEIGHTS = "diffusion_pytorch_model.safetensors"
_WEIGHTS_BIN = "diffusion_pytorch_model.bin"

# The one value of each option that our U-Net computes, and diffusers' default where a config.json leaves it out.
_UNET: dict[str, tuple[Any, Any]] = {
    "center_input_sample": (False, False),
    "time_embedding_type": ("positional", "positional"),
    "freq_shift": (1, 0),
    "flip_sin_to_cos": (False, True),
    "mid_block_type": ("UNetMidBlock2D", "UNetMidBlock2D"),
    "mid_block_scale_factor": (1, 1),
    "downsample_padding": (0, 1),
    "downsample_type": ("conv", "conv"),
    "upsample_type": ("conv", "conv"),
    "act_fn": ("silu", "silu"),
    "norm_eps": (1e-6, 1e-5),
    "resnet_time_scale_shift": ("default", "default"),
    "add_attention": (True, True),
    "class_embed_type": (None, None),
    "num_class_embeds": (None, None),
}
# Options that carry a number of the model, with diffusers' defaults.
_SIZES: dict[str, Any] = {
    "sample_size": None,
    "in_channels": 3,
    "out_channels": 3,
    "time_embedding_dim": None,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [224, 448, 672, 896],
    "layers_per_block": 2,
    "dropout": 0.0,
    "attention_head_dim": 8,
    "norm_num_groups": 32,
    "attn_norm_num_groups": None,
    "num_train_timesteps": None,  # of learned time embeddings only
}
_SCHEDULER: dict[str, tuple[Any, Any]] = {
    "clip_sample": (True, True),
    "clip_sample_range": (1.0, 1.0),
    "thresholding": (False, False),
    "rescale_betas_zero_snr": (False, False),
    "trained_betas": (None, None),
}
_PREDICTIONS = {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}


# -------------------------------------------------------------------------------------------------------------- writing
def check(folder: Path, config: Any) -> None:
    """Refuse what `write_pipeline` could not write: a folder that holds something, a model diffusers does not have.

    Raises `ConfigError`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is not empty; allowed: a new or an empty folder")
    multipliers, process = config.model.multipliers, config.process
    if multipliers[0] != 1:
        raise ConfigError(
            f"model.multipliers: {list(multipliers)} cannot be handed to diffusers: UNet2DModel gives its first "
            "convolution as many channels as its first resolution, so the first multiplier must be 1"
        )
    if process.schedule == "linear" and 0.02 * 1000 / process.steps > 0.999:
        raise ConfigError(
            f"process.steps: {process.steps} cannot be handed to diffusers: DDPMScheduler does not limit β to 0.999, "
            "which schedule = linear reaches in so few steps"
        )


def pipeline_files(config: Any, weights: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The files of a `DDPMPipeline` folder by their path in it. `weights` is the state of our `UNet`.

    The pipeline samples as we do with `sampler = ddpm`, called with `num_inference_steps` = `process.steps`.
    """
    from safetensors.torch import save

    model, data, process = config.model, config.data, config.process
    attended = [data.image_size >> level in model.attention for level in range(len(model.multipliers))]
    unet = {name: ours for name, (ours, _) in _UNET.items()} | {
        "_class_name": "UNet2DModel",
        "sample_size": data.image_size,
        "in_channels": data.channels,
        "out_channels": data.channels,
        "block_out_channels": [model.channels * multiplier for multiplier in model.multipliers],
        "down_block_types": ["AttnDownBlock2D" if attends else "DownBlock2D" for attends in attended],
        "up_block_types": ["AttnUpBlock2D" if attends else "UpBlock2D" for attends in reversed(attended)],
        "layers_per_block": model.blocks,
        "dropout": model.dropout,
        "attention_head_dim": None,  # one head over all channels
        "norm_num_groups": model.norm_groups,
    }
    scheduler = {name: ours for name, (ours, _) in _SCHEDULER.items()} | {
        "_class_name": "DDPMScheduler",
        "num_train_timesteps": process.steps,
        "beta_start": 1e-4 * 1000 / process.steps,
        "beta_end": 0.02 * 1000 / process.steps,
        "beta_schedule": "linear" if process.schedule == "linear" else "squaredcos_cap_v2",
        "prediction_type": _PREDICTIONS[process.prediction],
        "variance_type": process.variance,
    }
    index = {
        "_class_name": "DDPMPipeline",
        "scheduler": ["diffusers", "DDPMScheduler"],
        "unet": ["diffusers", "UNet2DModel"],
    }
    tensors = {}
    for name, tensor in weights.items():
        names = _their_names(config.model, name)
        for theirs, part in zip(names, tensor.detach().cpu().chunk(len(names)), strict=True):
            tensors[theirs] = part.contiguous()
    return {
        "model_index.json": _json(index),
        "unet/config.json": _json(unet),
        f"unet/{WEIGHTS}": save(tensors, metadata={"format": "pt"}),
        "scheduler/scheduler_config.json": _json(scheduler),
    }


def write_pipeline(folder: Path, config: Any, weights: Mapping[str, Tensor]) -> None:
    """Write a `DDPMPipeline` folder for `DDPMPipeline.from_pretrained`, whole or not at all.

    Raises `ConfigError` for what `check` refuses, `OSError` if the disk does.
    """
    check(folder, config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, content in pipeline_files(config, weights).items():
            (beside / name).parent.mkdir(exist_ok=True)
            (beside / name).write_bytes(content)
        beside.chmod(0o755)  # mkdtemp gives 0700
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


# -------------------------------------------------------------------------------------------------------------- reading
def is_pipeline(folder: Path) -> bool:
    """Whether the folder looks like a pipeline or a model of diffusers."""
    return any((folder / name).is_file() for name in ("model_index.json", "unet/config.json", "config.json"))


def read_config(folder: Path) -> dict[str, Any]:
    """What a pipeline says about data, model and process, by dotted knob name.

    Raises `ConfigError` naming the file, the option and the value for whatever our U-Net or our process does not do.
    """
    unet = _unet_folder(folder)
    values = _unet_values(unet / "config.json")
    names = [folder / "scheduler" / "scheduler_config.json", folder / "scheduler_config.json"]
    scheduler = next((path for path in names if path.is_file()), None)
    if scheduler is None:
        raise ConfigError(f"{folder}: no scheduler_config.json, so the noise schedule of this model is not known")
    return values | _scheduler_values(scheduler)


def weights_file(folder: Path) -> Path:
    """The file with the weights of a pipeline. Raises `ConfigError` if there is none."""
    unet = _unet_folder(folder)
    for name in (WEIGHTS, _WEIGHTS_BIN):
        if (unet / name).is_file():
            return unet / name
    raise ConfigError(f"{unet}: no weights; looked for {WEIGHTS} and {_WEIGHTS_BIN}")


def read_pipeline(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(data, model and process by dotted knob name, float32 state for our `UNet`) of a pipeline folder.

    Nested (`unet/`, `scheduler/`) or flat; weights in safetensors, or `.bin` read as plain tensors only; attention by
    its present names or the older query, key, value, proj_attn. Raises `ConfigError` as `read_config` does, and for
    weights that are damaged or not of such a network.
    """
    return read_config(folder), read_unet(folder)[1]


def read_unet(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`read_pipeline` without the process: a folder without a scheduler will do, such as `unet/` alone."""
    import torch

    from tunediff.training.weights import read, shape_of, words

    values = _unet_values(_unet_folder(folder) / "config.json")
    file = weights_file(folder)
    given = {_present_name(name): tensor for name, tensor in read(file).items()}
    config = cfg.override(_default(), values, where=str(file), check=False)
    state = {}
    for name, tensor in _network(config.knobs).state_dict().items():
        shape = tuple(tensor.shape)
        names = _their_names(config.model, name)
        part = (shape[0] // len(names), *shape[1:])
        for theirs in names:
            if theirs not in given:
                raise ConfigError(f"{file}: {theirs} is missing")
            if (found := shape_of(given[theirs])) != part:
                raise ConfigError(
                    f"{file}: {theirs} has shape {words(found)}; by config.json it should be {words(part)}"
                )
        state[name] = torch.cat([given.pop(theirs) for theirs in names]).float()
    if given:
        raise ConfigError(f"{file}: {next(iter(given))} has no place in our U-Net")
    return values, state


def initial_weights(path: Path, knobs: Knobs) -> dict[str, Tensor]:
    """Weights to start a training from: a `.safetensors` file of ours, or a pipeline or U-Net folder.

    Raises `ConfigError` naming the first weight that is missing, too many or of another shape.
    """
    from tunediff.training.weights import check_fit, read

    if not path.is_dir():
        weights = read(path)
    else:
        values, weights = read_unet(path)
        if (groups := values["model.norm_groups"]) != knobs.model.norm_groups:  # the only size no shape shows
            raise ConfigError(f"{path}: norm_num_groups is {groups}, but model.norm_groups = {knobs.model.norm_groups}")
    check_fit(weights, _network(knobs), str(path))
    return weights


def _network(knobs: Knobs) -> UNet:
    """Its shapes only."""
    import torch

    from tunediff.workloads.diffusion.unet import network

    with torch.device("meta"):
        return network(knobs)


def _default() -> Any:
    """The configuration with every knob at its default."""
    return cfg.find("diffusion").schema.default()


def _unet_folder(folder: Path) -> Path:
    """Where config.json and weights lie: google/ddpm-cifar10-32 has them at the root."""
    if (folder / "unet" / "config.json").is_file():
        return folder / "unet"
    if (folder / "config.json").is_file():
        return folder
    raise ConfigError(f"{folder}: no U-Net; looked for unet/config.json and config.json")


def _load_json(path: Path, kinds: tuple[str, ...], known: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path}: is not JSON") from None
    if not isinstance(content, dict) or content.get("_class_name", kinds[0]) not in kinds:
        kind = content.get("_class_name") if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"{path}: _class_name: {kind!r} is not understood; allowed: {' and '.join(kinds)}")
    for name, value in content.items():
        if name not in known and not name.startswith("_") and value is not None:
            raise ConfigError(f"{path}: {name}: {value!r}: this option is not known here")
    return content


def _refuse_others(path: Path, content: Mapping[str, Any], allowed: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (ours, default) in allowed.items():
        if (value := content.get(name, default)) != ours:
            left_out = "" if name in content else " (diffusers' default)"
            raise ConfigError(f"{path}: {name}: {value!r}{left_out} is not what we compute; allowed: {ours!r}")


def _unet_values(path: Path) -> dict[str, Any]:
    content = _load_json(path, ("UNet2DModel",), _UNET | _SIZES)
    if content.get("act_fn") == "swish":  # another name of silu
        content["act_fn"] = "silu"
    _refuse_others(path, content, _UNET)
    found = _SIZES | content

    def refuse(name: str, allowed: str) -> ConfigError:
        left_out = "" if name in content else " (diffusers' default)"
        return ConfigError(f"{path}: {name}: {found[name]!r}{left_out} is not what we compute; allowed: {allowed}")

    size, widths, downs, ups = (
        found[n] for n in ("sample_size", "block_out_channels", "down_block_types", "up_block_types")
    )
    if isinstance(size, list) and len(set(size)) == 1:
        size = size[0]
    if not isinstance(size, int):
        raise refuse("sample_size", "the side of square images in pixels")
    if found["out_channels"] != found["in_channels"]:
        raise refuse("out_channels", f"in_channels = {found['in_channels']}: no variance is learned")
    if (
        not isinstance(widths, list)
        or not widths
        or any(not isinstance(width, int) or width < 1 or width % widths[0] for width in widths)
    ):
        raise refuse("block_out_channels", "multiples of the first")
    if (
        not isinstance(downs, list)
        or len(downs) != len(widths)
        or any(kind not in ("DownBlock2D", "AttnDownBlock2D") for kind in downs)
    ):
        raise refuse("down_block_types", "DownBlock2D or AttnDownBlock2D for each of block_out_channels")
    attended = [kind == "AttnDownBlock2D" for kind in downs]
    mirrored = ["AttnUpBlock2D" if attends else "UpBlock2D" for attends in reversed(attended)]
    if ups != mirrored:
        raise refuse("up_block_types", f"{mirrored}, the mirror image of down_block_types")
    heads = found["attention_head_dim"]
    attending = {width for width, attends in zip(widths, attended, strict=True) if attends} | {widths[-1]}
    if heads is not None and attending != {heads}:
        raise refuse("attention_head_dim", "null: one head over all channels")
    if found["time_embedding_dim"] not in (None, 4 * widths[0]):
        raise refuse("time_embedding_dim", f"null or {4 * widths[0]}, 4 times the first of block_out_channels")
    if found["attn_norm_num_groups"] not in (None, found["norm_num_groups"]):
        raise refuse("attn_norm_num_groups", "null or norm_num_groups")
    values = {
        "data.image_size": size,
        "data.channels": found["in_channels"],
        "model.channels": widths[0],
        "model.multipliers": [width // widths[0] for width in widths],
        "model.blocks": found["layers_per_block"],
        "model.attention": [size >> level for level, attends in enumerate(attended) if attends],
        "model.dropout": found["dropout"],
        "model.norm_groups": found["norm_num_groups"],
    }
    cfg.override(_default(), values | {"evaluation.extractor": "classifier"}, where=str(path))
    return values


def _scheduler_values(path: Path) -> dict[str, Any]:
    # Of a DDIM scheduler the chain is the same. Options of inference alone (spacing, offset, …) do not change it.
    inference = (
        "timestep_spacing",
        "steps_offset",
        "set_alpha_to_one",
        "dynamic_thresholding_ratio",
        "sample_max_value",
    )
    chain: dict[str, Any] = {
        "num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear",
        "prediction_type": "epsilon", "variance_type": "fixed_small",
    }  # fmt: skip
    known = _SCHEDULER | chain | dict.fromkeys(inference)
    content = _load_json(path, ("DDPMScheduler", "DDIMScheduler"), known)
    _refuse_others(path, content, _SCHEDULER)
    found = chain | content
    steps = found["num_train_timesteps"]

    def among(name: str, ours: Mapping[str, str]) -> str:
        if found[name] not in ours:
            raise ConfigError(f"{path}: {name}: {found[name]!r} is not what we compute; allowed: {', '.join(ours)}")
        return ours[found[name]]

    schedule = among("beta_schedule", {"linear": "linear", "squaredcos_cap_v2": "cosine"})
    for name, ours in (("beta_start", 1e-4), ("beta_end", 0.02)) if schedule == "linear" else ():
        scaled = ours * 1000 / steps if isinstance(steps, int) and steps > 0 else ours
        if not isinstance(found[name], float | int) or not math.isclose(found[name], scaled, rel_tol=1e-6):
            raise ConfigError(
                f"{path}: {name}: {found[name]!r} is not what we compute; allowed: {scaled:.6g} in {steps} steps"
            )
    values = {
        "process.schedule": schedule,
        "process.steps": steps,
        "process.prediction": among("prediction_type", {theirs: ours for ours, theirs in _PREDICTIONS.items()}),
        "process.variance": among(
            "variance_type",
            {"fixed_small": "fixed_small", "fixed_small_log": "fixed_small", "fixed_large": "fixed_large"},
        ),
    }
    cfg.override(_default(), values, where=str(path), check=False)
    return values


# ---------------------------------------------------------------------------------------------------------------- names
_LEAVES = {"time": "time_emb_proj", "shortcut": "conv_shortcut", "norm": "group_norm", "out": "to_out.0"}
_OUTER = {
    "time.linear1": "time_embedding.linear_1", "time.linear2": "time_embedding.linear_2", "input": "conv_in",
    "norm": "conv_norm_out", "output": "conv_out",
}  # fmt: skip
_OLD_LEAVES = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}


def _their_names(model: Model, name: str) -> list[str]:
    """diffusers' name of one of our weights; three for queries, keys and values, which we keep stacked."""
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return [f"{_OUTER[module]}.{kind}"]
    layer, leaf = module.rsplit(".", 1)
    prefix = dict(_layers(model))[layer]
    leaves = ["to_q", "to_k", "to_v"] if leaf == "qkv" else [_LEAVES.get(leaf, leaf)]
    return [f"{prefix}.{theirs}.{kind}" for theirs in leaves]


def _layers(model: Model) -> Iterator[tuple[str, str]]:
    """(our layer, theirs), for every layer that may be there: our flat lists hold their nested ones in order."""
    levels = len(model.multipliers)
    yield from (("middle.0", "mid_block.resnets.0"), ("middle.0.attention", "mid_block.attentions.0"))
    yield "middle.1", "mid_block.resnets.1"
    for ours, theirs, blocks, sampler in (
        ("down", "down_blocks", model.blocks, "downsamplers"),
        ("up", "up_blocks", model.blocks + 1, "upsamplers"),
    ):
        for level in range(levels):
            first = level * (blocks + 1)
            for block in range(blocks):
                yield f"{ours}.{first + block}", f"{theirs}.{level}.resnets.{block}"
                yield f"{ours}.{first + block}.attention", f"{theirs}.{level}.attentions.{block}"
            yield f"{ours}.{first + blocks}", f"{theirs}.{level}.{sampler}.0"


def _present_name(name: str) -> str:
    """Older pipelines name the maps of their attention otherwise."""
    for old, present in _OLD_LEAVES.items():
        name = name.replace(old, present)
    return name
