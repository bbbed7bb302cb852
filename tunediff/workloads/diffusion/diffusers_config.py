"""Our U-Net and process as the options of diffusers' config files, and the U-Net back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Values
from tunediff.workloads.diffusion.knobs import EDM_SIGMAS, Process

PIPELINES = {
    "DDPMScheduler": "DDPMPipeline",
    "FlowMatchEulerDiscreteScheduler": "DDPMPipeline",
    # The one without a condition that lets its scheduler scale.
    "EDMEulerScheduler": "ConsistencyModelPipeline",
}
"""The pipeline of each scheduler that we write."""

# Options with one value that our U-Net computes.
_UNET: dict[str, Any] = {
    "time_embedding_type": "positional",
    "freq_shift": 1,
    "flip_sin_to_cos": False,
    "mid_block_type": "UNetMidBlock2D",
    "mid_block_scale_factor": 1,
    "downsample_padding": 0,
    "downsample_type": "conv",
    "upsample_type": "conv",
    "norm_eps": 1e-6,
    "resnet_time_scale_shift": "default",
    "add_attention": True,
    "class_embed_type": None,
    "num_class_embeds": None,
    "center_input_sample": False,
}
# What diffusers takes for options that a config.json leaves out, where that is another value, and
# for options that describe sizes.
_DEFAULTS: dict[str, Any] = _UNET | {
    "freq_shift": 0,
    "flip_sin_to_cos": True,
    "downsample_padding": 1,
    "norm_eps": 1e-5,
    "act_fn": "silu",
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
_SCHEDULERS: dict[str, dict[str, Any]] = {
    "DDPMScheduler": {
        "clip_sample": True,
        "clip_sample_range": 1.0,
        "thresholding": False,
        "rescale_betas_zero_snr": False,
        "trained_betas": None,
    },
    "FlowMatchEulerDiscreteScheduler": {
        "shift": 1.0,
        "use_dynamic_shifting": False,
        "shift_terminal": None,
        "invert_sigmas": False,
        "use_karras_sigmas": False,
        "use_exponential_sigmas": False,
        "use_beta_sigmas": False,
        "stochastic_sampling": False,
    },
    "EDMEulerScheduler": {
        "sigma_min": EDM_SIGMAS[0],
        "sigma_max": EDM_SIGMAS[1],
        "sigma_schedule": "karras",
        "rho": 7.0,
        "final_sigmas_type": "zero",
        "prediction_type": "v_prediction",
    },
}
_BETA_SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
_PREDICTIONS = {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}
_BETAS = {"beta_start": 1e-4, "beta_end": 0.02}
"""Of 1000 steps; scaled for others."""


# ---- writing
def unet_options(config: Any) -> dict[str, Any]:
    """Return the content of `unet/config.json`."""
    model, data = config.model, config.data
    sides = [data.image_size >> level for level in range(len(model.multipliers))]
    downs = ["AttnDownBlock2D" if side in model.attention else "DownBlock2D" for side in sides]
    return _UNET | {
        "_class_name": "UNet2DModel",
        "act_fn": "silu",
        "sample_size": data.image_size,
        "in_channels": data.channels,
        "out_channels": data.channels,
        "block_out_channels": [model.channels * multiplier for multiplier in model.multipliers],
        "down_block_types": downs,
        "up_block_types": [kind.replace("Down", "Up") for kind in reversed(downs)],
        "layers_per_block": model.blocks,
        "dropout": model.dropout,
        "attention_head_dim": None,  # one head over all channels
        "norm_num_groups": model.norm_groups,
    }


def scheduler_class(process: Process) -> str:
    """Return the name of diffusers' scheduler of this process."""
    if process.path == "flow":
        return "FlowMatchEulerDiscreteScheduler"
    return "EDMEulerScheduler" if process.schedule == "edm" else "DDPMScheduler"


def index_options(config: Any) -> dict[str, object]:
    """Return the content of `model_index.json`."""
    scheduler = scheduler_class(config.process)
    return {
        "_class_name": PIPELINES[scheduler],
        "scheduler": ["diffusers", scheduler],
        "unet": ["diffusers", "UNet2DModel"],
    }


def scheduler_options(config: Any) -> dict[str, Any]:
    """Return the content of `scheduler/scheduler_config.json`."""
    process, name = config.process, scheduler_class(config.process)
    options = {"_class_name": name, "num_train_timesteps": process.steps} | _SCHEDULERS[name]
    if name == "EDMEulerScheduler":
        options["sigma_data"] = process.sigma_data
    if name == "DDPMScheduler":
        options |= {beta: value * 1000 / process.steps for beta, value in _BETAS.items()}
        options["beta_schedule"] = _BETA_SCHEDULES[process.schedule]
        options["prediction_type"] = _PREDICTIONS[process.prediction]
        options["variance_type"] = process.variance
    return options


# ---- reading
def read_unet(path: Path, default: Any) -> Values:
    """Return what `unet/config.json` says about data and model, by dotted knob name.

    The options are translated to our knobs, and these back: what then differs is what our U-Net
    does not compute. `default` is any configuration of this workload. Raises `ConfigError`.
    """
    content = _content(path)
    for name, value in content.items():
        if name not in _DEFAULTS and not name.startswith("_") and value is not None:
            raise ConfigError(f"{path}: {name}: {value!r}: this option is not known here")
    options = _DEFAULTS | content

    def require(name: str, allowed: str, holds: bool) -> None:
        if not holds:
            left_out = "" if name in content else " (diffusers' default)"
            raise ConfigError(
                f"{path}: {name}: {options[name]!r}{left_out} is not what we compute; allowed:"
                f" {allowed}"
            )

    values, attending = _sizes(options, require)

    # ---- options that may be written in several ways
    allowed = _alternatives(options, attending)
    checked = cfg.override(default, values | {"evaluation.extractor": "classifier"}, str(path))
    for name, ours in unet_options(checked).items():
        equal, words = allowed.pop(name, ([ours], repr(ours)))
        if not name.startswith("_"):
            require(name, words, options[name] in equal)
    for name, (equal, words) in allowed.items():
        require(name, words, options[name] in equal)
    return values


def _sizes(
    options: Mapping[str, Any], require: Callable[[str, str, bool], None]
) -> tuple[Values, list[bool]]:
    """Return the knobs of the network's sizes, and which levels have attention.

    `require(option, allowed, holds)` raises `ConfigError` for an option that does not fit.
    """
    size, widths = options["sample_size"], options["block_out_channels"]
    size = size[0] if isinstance(size, list) and len(set(size)) == 1 else size
    require("sample_size", "the side of square images in pixels", isinstance(size, int))
    require("block_out_channels", "multiples of the first", _are_multiples(widths))
    downs, kinds = options["down_block_types"], {"DownBlock2D", "AttnDownBlock2D"}
    require(
        "down_block_types",
        "DownBlock2D or AttnDownBlock2D for each of block_out_channels",
        isinstance(downs, list) and len(downs) == len(widths) and {*downs} <= kinds,
    )
    attending = [kind.startswith("Attn") for kind in downs]
    values: Values = {
        "data.image_size": size,
        "data.channels": options["in_channels"],
        "model.channels": widths[0],
        "model.multipliers": [width // widths[0] for width in widths],
        "model.blocks": options["layers_per_block"],
        "model.attention": [size >> level for level, attends in enumerate(attending) if attends],
        "model.dropout": options["dropout"],
        "model.norm_groups": options["norm_num_groups"],
    }
    return values, attending


def _alternatives(
    options: Mapping[str, Any], attending: list[bool]
) -> dict[str, tuple[list[Any], str]]:
    """Return, for options that may be written in several ways, the values, and the ways in words.

    `attending`: which levels have attention.
    """
    widths, channels = options["block_out_channels"], options["in_channels"]
    heads = {width for width, attends in zip(widths, attending, strict=True) if attends}
    heads.add(widths[-1])  # the middle attends too
    one_head = [None, *heads] if len(heads) == 1 else [None]
    return {
        "act_fn": (["silu", "swish"], "'silu'"),
        "sample_size": ([options["sample_size"]], ""),
        "out_channels": ([channels], f"in_channels = {channels}"),
        "attention_head_dim": (one_head, "null: one head over all channels"),
        "time_embedding_dim": ([None, 4 * widths[0]], f"null or {4 * widths[0]}"),
        "attn_norm_num_groups": ([None, options["norm_num_groups"]], "null or norm_num_groups"),
    }


def _are_multiples(widths: Any) -> bool:
    if not isinstance(widths, list) or not widths:
        return False
    return all(isinstance(w, int) and w > 0 and w % widths[0] == 0 for w in widths)


def _content(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path}: is not JSON") from None
    is_options = isinstance(content, dict)
    kind = content.get("_class_name", "UNet2DModel") if is_options else type(content).__name__
    if kind != "UNet2DModel":
        raise ConfigError(f"{path}: _class_name: {kind!r} is not understood; allowed: UNet2DModel")
    return content
