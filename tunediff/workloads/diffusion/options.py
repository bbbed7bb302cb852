"""Convert our U-Net and process to the options of diffusers' config files, and the U-Net back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tunediff.config import ConfigError, Lines, Values
from tunediff.workloads.diffusion.knobs import EDM_SIGMAS, Process

PIPELINES = {
    "DDPMScheduler": "DDPMPipeline",
    "FlowMatchEulerDiscreteScheduler": "DDPMPipeline",
    "EDMEulerScheduler": (
        "ConsistencyModelPipeline"
    ),  # the one without a condition that lets its scheduler scale
}
"""The pipeline of each scheduler that we write."""

# The one value of each option that our U-Net computes, and diffusers' default where a config.json
# leaves it out.
_UNET: dict[str, tuple[Any, Any]] = {
    "time_embedding_type": ("positional", "positional"), "freq_shift": (1, 0), "flip_sin_to_cos": (False, True),
    "mid_block_type": ("UNetMidBlock2D", "UNetMidBlock2D"), "mid_block_scale_factor": (1, 1),
    "downsample_padding": (0, 1), "downsample_type": ("conv", "conv"), "upsample_type": ("conv", "conv"),
    "norm_eps": (1e-6, 1e-5), "resnet_time_scale_shift": ("default", "default"), "add_attention": (True, True),
    "class_embed_type": (None, None), "num_class_embeds": (None, None), "center_input_sample": (False, False),
}  # fmt: skip
# Other options that we know, with diffusers' defaults.
_SIZES: dict[str, object] = {
    "act_fn": "silu", "sample_size": None, "in_channels": 3, "out_channels": 3, "time_embedding_dim": None,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [224, 448, 672, 896], "layers_per_block": 2, "dropout": 0.0, "attention_head_dim": 8,
    "norm_num_groups": 32, "attn_norm_num_groups": None,
    "num_train_timesteps": None,  # of learned time embeddings only
}  # fmt: skip
_SCHEDULER: dict[str, tuple[Any, Any]] = {
    "clip_sample": (True, True), "clip_sample_range": (1.0, 1.0), "thresholding": (False, False),
    "rescale_betas_zero_snr": (False, False), "trained_betas": (None, None),
}  # fmt: skip
_FLOW: dict[str, tuple[Any, Any]] = {
    "shift": (1.0, 1.0), "use_dynamic_shifting": (False, False), "shift_terminal": (None, None),
    "invert_sigmas": (False, False), "use_karras_sigmas": (False, False), "use_exponential_sigmas": (False, False),
    "use_beta_sigmas": (False, False), "stochastic_sampling": (False, False),
}  # fmt: skip
_EDM: dict[str, tuple[Any, Any]] = {
    "sigma_min": (EDM_SIGMAS[0], 0.002), "sigma_max": (EDM_SIGMAS[1], 80.0), "sigma_schedule": ("karras", "karras"),
    "rho": (7.0, 7.0), "final_sigmas_type": ("zero", "zero"), "prediction_type": ("v_prediction", "epsilon"),
}  # fmt: skip
# Of these options our knob, and our word for each of theirs; the first of several is the one we
# write.
_CHOICES = {
    "beta_schedule": ("schedule", {"linear": "linear", "squaredcos_cap_v2": "cosine"}),
    "prediction_type": ("prediction", {"epsilon": "epsilon", "sample": "x0", "v_prediction": "v"}),
    "variance_type": (
        "variance",
        {
            "fixed_small": "fixed_small",
            "fixed_small_log": "fixed_small",
            "fixed_large": "fixed_large",
        },
    ),
}
_BETAS = {"beta_start": 1e-4, "beta_end": 0.02}
"""Of 1000 steps; scaled for others."""


# ---- writing
def of_unet(config: Any) -> dict[str, object]:
    """Return the content of `unet/config.json`."""
    model, data = config.model, config.data
    sides = [data.image_size >> level for level in range(len(model.multipliers))]
    downs = ["AttnDownBlock2D" if side in model.attention else "DownBlock2D" for side in sides]
    return {name: ours for name, (ours, _) in _UNET.items()} | {
        "_class_name": "UNet2DModel",
        "act_fn": "silu",
        "sample_size": data.image_size,
        "in_channels": data.channels,
        "out_channels": data.channels,
        "block_out_channels": [model.channels * multiplier for multiplier in model.multipliers],
        "down_block_types": downs,
        "up_block_types": _mirrored(downs),
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


def of_index(config: Any) -> dict[str, object]:
    """Return the content of `model_index.json`."""
    scheduler = scheduler_class(config.process)
    unet = ["diffusers", "UNet2DModel"]
    return {
        "_class_name": PIPELINES[scheduler],
        "scheduler": ["diffusers", scheduler],
        "unet": unet,
    }


def of_scheduler(config: Any) -> dict[str, object]:
    """Return the content of `scheduler/scheduler_config.json`."""
    process, name = config.process, scheduler_class(config.process)
    fixed = {"DDPMScheduler": _SCHEDULER, "EDMEulerScheduler": _EDM}.get(name, _FLOW)
    options = {option: ours for option, (ours, _) in fixed.items()}
    options |= {"_class_name": name, "num_train_timesteps": process.steps}
    if name == "EDMEulerScheduler":
        options["sigma_data"] = process.sigma_data
    if name != "DDPMScheduler":
        return options
    options |= {name: beta * 1000 / process.steps for name, beta in _BETAS.items()}
    for option, (knob, words) in _CHOICES.items():
        options[option] = next(
            theirs for theirs, ours in words.items() if ours == getattr(process, knob)
        )
    return options


def _mirrored(downs: list[str]) -> list[str]:
    """Return the block types of the way up for those of the way down."""
    return [kind.replace("Down", "Up") for kind in reversed(downs)]


# ---- reading
_Rule = tuple[str, bool, str]
"""An option, whether its value is what we compute, and what is allowed."""


def _content(path: Path, kinds: tuple[str, ...]) -> Lines:
    """Return what is in a file of one of these classes. Raises `ConfigError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path}: is not JSON") from None
    if not isinstance(content, dict) or content.get("_class_name", kinds[0]) not in kinds:
        kind = content.get("_class_name") if isinstance(content, dict) else type(content).__name__
        raise ConfigError(
            f"{path}: _class_name: {kind!r} is not understood; allowed: {' and '.join(kinds)}"
        )
    return content


def _options(
    path: Path,
    kinds: tuple[str, ...],
    fixed: Mapping[str, tuple[Any, Any]],
    others: Mapping[str, object],
    rules: Callable[[Mapping[str, Any]], Iterable[_Rule]],
) -> Lines:
    """Return the options in a file of one of these classes, with diffusers' defaults for missing
    ones.

    A rule may rely on those before it. Raises `ConfigError` for the first that is broken, and for
    unknown options.
    """
    content = _content(path, kinds)
    options = {name: default for name, (_, default) in fixed.items()} | dict(others)
    for name, value in content.items():
        if name not in options and not name.startswith("_") and value is not None:
            raise ConfigError(f"{path}: {name}: {value!r}: this option is not known here")
    options |= content
    equal = ((name, options[name] == ours, repr(ours)) for name, (ours, _) in fixed.items())
    for name, holds, allowed in itertools.chain(equal, rules(options)):
        if not holds:
            left_out = "" if name in content else " (diffusers' default)"
            raise ConfigError(
                f"{path}: {name}: {options[name]!r}{left_out} is not what we compute; allowed:"
                f" {allowed}"
            )
    return options


def _side(size: Any) -> Any:
    """Return the side of a square size; any other size as it is."""
    return size[0] if isinstance(size, list) and len(set(size)) == 1 else size


def _unet_rules(options: Mapping[str, Any]) -> Iterable[_Rule]:
    yield "act_fn", options["act_fn"] in ("silu", "swish"), "'silu'"
    yield (
        "sample_size",
        isinstance(_side(options["sample_size"]), int),
        "the side of square images in pixels",
    )
    images = options["in_channels"]
    yield (
        "out_channels",
        options["out_channels"] == images,
        f"in_channels = {images}: no variance is learned",
    )
    widths, downs = options["block_out_channels"], options["down_block_types"]
    multiples = isinstance(widths, list) and all(
        isinstance(w, int) and w > 0 and w % widths[0] == 0 for w in widths
    )
    yield "block_out_channels", multiples and bool(widths), "multiples of the first"
    allowed = isinstance(downs, list) and all(
        kind in ("DownBlock2D", "AttnDownBlock2D") for kind in downs
    )
    allowed_kinds = "DownBlock2D or AttnDownBlock2D for each of block_out_channels"
    yield "down_block_types", allowed and len(downs) == len(widths), allowed_kinds
    ups = _mirrored(downs)
    yield (
        "up_block_types",
        options["up_block_types"] == ups,
        f"{ups}, the mirror image of down_block_types",
    )
    attending = {
        width for width, kind in zip(widths, downs, strict=True) if kind.startswith("Attn")
    } | {widths[-1]}
    heads = options["attention_head_dim"]
    yield (
        "attention_head_dim",
        heads is None or attending == {heads},
        "null: one head over all channels",
    )
    embedding = 4 * widths[0]
    allowed_kinds = f"null or {embedding}, 4 times the first of block_out_channels"
    yield "time_embedding_dim", options["time_embedding_dim"] in (None, embedding), allowed_kinds
    groups = (None, options["norm_num_groups"])
    yield (
        "attn_norm_num_groups",
        options["attn_norm_num_groups"] in groups,
        "null or norm_num_groups",
    )


def read_unet(path: Path) -> Values:
    """Return what `unet/config.json` says about data and model, by dotted knob name. Raises
    `ConfigError`."""
    content = _options(path, ("UNet2DModel",), _UNET, _SIZES, _unet_rules)
    size, widths, downs = (
        _side(content["sample_size"]),
        content["block_out_channels"],
        content["down_block_types"],
    )
    return {
        "data.image_size": size,
        "data.channels": content["in_channels"],
        "model.channels": widths[0],
        "model.multipliers": [width // widths[0] for width in widths],
        "model.blocks": content["layers_per_block"],
        "model.attention": [
            size >> level for level, kind in enumerate(downs) if kind.startswith("Attn")
        ],
        "model.dropout": content["dropout"],
        "model.norm_groups": content["norm_num_groups"],
    }
