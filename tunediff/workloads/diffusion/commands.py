"""What the commands that use saved models call of this workload. Imports torch late.

Pipeline folders are those of diffusers: our U-Net is its `UNet2DModel` as the DDPM authors' own
weights use it (google/ddpm-cifar10-32), name by name. What the other side cannot represent is
refused, never approximated.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff.config import ConfigError
from tunediff.config.knobs import refuse
from tunediff.core.environment import install_command
from tunediff.workloads.diffusion.knobs import EDM_SIGMAS, Process

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.evaluation.generation import SampleRequest
    from tunediff.workloads.diffusion.knobs import Model

PIPELINES = {
    "DDPMScheduler": "DDPMPipeline",
    "FlowMatchEulerDiscreteScheduler": "DDPMPipeline",
    # The one without a condition that lets its scheduler scale.
    "EDMEulerScheduler": "ConsistencyModelPipeline",
}
"""The pipeline of each scheduler that we write."""
_BETA_SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
_PREDICTIONS = {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}


def sample_images(
    network: Any, config: Any, request: SampleRequest
) -> Iterator[tuple[int, Tensor]]:
    """Iterate over this rank's batches: (first number, uint8 [b, C, H, W]).

    It raises `NonFiniteError`, which may happen on one rank alone.
    """
    from tunediff.workloads.diffusion.evaluator import generate
    from tunediff.workloads.diffusion.process import Diffusion

    # What does not depend on the batch is built before the first batch, for sampling is timed.
    process = Diffusion(config.process, request.device)
    protocol = dataclasses.replace(
        config.evaluation, seed=request.seed, batch_size=request.batch_size
    )
    shape = (config.data.channels, config.data.image_size, config.data.image_size)
    return generate(
        network,
        process,
        protocol,
        shape,
        request.images,
        request.device,
        rank=request.rank,
        world=request.ranks,
        progress=request.progress,
    )


# ---- pipelines of diffusers
def scheduler_class(process: Process) -> str:
    """Return the name of diffusers' scheduler of this process."""
    if process.path == "flow":
        return "FlowMatchEulerDiscreteScheduler"
    return "EDMEulerScheduler" if process.schedule == "edm" else "DDPMScheduler"


def check(folder: Path, config: Any) -> None:
    """Refuse what `write_pipeline` could not write: a full folder, an unknown model.

    Raises `ConfigError`.
    """
    missing = importlib.util.find_spec("diffusers") is None
    refuse(missing, f"--diffusers: it is not installed; run: {install_command('diffusers')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is not empty; allowed: a new or an empty folder")
    multipliers, process = list(config.model.multipliers), config.process
    ddpm = (scheduler := scheduler_class(process)) == "DDPMScheduler"
    for condition, name, value, why in (
        (multipliers[0] != 1, "model.multipliers", multipliers, "UNet2DModel begins with 1"),
        (
            not ddpm and process.prediction != "v",
            "process.prediction",
            process.prediction,
            f"{scheduler}, which has these noise levels, takes v",
        ),
        (
            ddpm and process.sigma_data != 1.0,
            "process.sigma_data",
            process.sigma_data,
            "DDPMScheduler has 1; EDMEulerScheduler has it, with process.schedule = edm",
        ),
        (
            ddpm and process.schedule == "linear" and 0.02 * 1000 / process.steps > 0.999,
            "process.steps",
            process.steps,
            "DDPMScheduler does not limit β to 0.999, which schedule = linear reaches in so few"
            " steps",
        ),
    ):
        refuse(condition, f"{name}: {value!r} cannot be handed to diffusers: {why}")


def unet_options(config: Any) -> dict[str, Any]:
    """Return the arguments of `UNet2DModel`; others have the values that our U-Net computes."""
    model, data = config.model, config.data
    sides = [data.image_size >> level for level in range(len(model.multipliers))]
    downs = ["AttnDownBlock2D" if side in model.attention else "DownBlock2D" for side in sides]
    return {
        "sample_size": data.image_size,
        "in_channels": data.channels,
        "out_channels": data.channels,
        "block_out_channels": [model.channels * multiplier for multiplier in model.multipliers],
        "down_block_types": downs,
        "up_block_types": [kind.replace("Down", "Up") for kind in reversed(downs)],
        "layers_per_block": model.blocks,
        "dropout": model.dropout,
        "norm_num_groups": model.norm_groups,
        "norm_eps": 1e-6,
        "freq_shift": 1,
        "flip_sin_to_cos": False,
        "downsample_padding": 0,
        "attention_head_dim": None,  # one head over all channels
    }


def scheduler_options(config: Any) -> dict[str, Any]:
    """Return the configuration of the scheduler."""
    process, name = config.process, scheduler_class(config.process)
    options = {"_class_name": name, "num_train_timesteps": process.steps}
    if name == "FlowMatchEulerDiscreteScheduler":
        return options | {"shift": 1.0, "use_dynamic_shifting": False}
    if name == "EDMEulerScheduler":
        return options | {
            "sigma_min": EDM_SIGMAS[0],
            "sigma_max": EDM_SIGMAS[1],
            "sigma_data": process.sigma_data,
            "sigma_schedule": "karras",
            "rho": 7.0,
            "final_sigmas_type": "zero",
            "prediction_type": "v_prediction",
        }
    return options | {
        "beta_start": 1e-4 * 1000 / process.steps,  # DDPM's are of 1,000 steps
        "beta_end": 0.02 * 1000 / process.steps,
        "beta_schedule": _BETA_SCHEDULES[process.schedule],
        "prediction_type": _PREDICTIONS[process.prediction],
        "variance_type": process.variance,
        "clip_sample": True,
        "clip_sample_range": 1.0,
    }


def write_pipeline(folder: Path, config: Any, weights: Callable[[], Mapping[str, Tensor]]) -> str:
    """Write a folder for `from_pretrained`; return the call that samples from it as we do.

    `weights`: returns our `UNet`'s state, after everything else was checked. The pipeline samples
    as we do with `sampler = ddpm`, called with `num_inference_steps` = `process.steps`; that of
    `path = flow` or `schedule = edm` as with `sampler = euler` of as many steps. Raises
    `ConfigError` for what `check` refuses, `OSError` if the disk does.
    """
    check(folder, config)
    import diffusers

    tensors: dict[str, Tensor] = {}
    for name, tensor in weights().items():
        names = _their_names(config.model, name)
        tensors |= dict(zip(names, tensor.chunk(len(names)), strict=True))
    unet: Any = diffusers.UNet2DModel(**unet_options(config))  # type: ignore[no-untyped-call]
    unet.load_state_dict(tensors)
    scheduler = scheduler_class(config.process)
    pipeline = getattr(diffusers, PIPELINES[scheduler])(
        unet=unet, scheduler=getattr(diffusers, scheduler).from_config(scheduler_options(config))
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as made:
        pipeline.save_pretrained(Path(made) / folder.name)
        os.replace(Path(made) / folder.name, folder)  # whole, or not there
    steps = config.process.steps if scheduler == "DDPMScheduler" else config.evaluation.steps
    load = f"diffusers.{PIPELINES[scheduler]}.from_pretrained({str(folder)!r})"
    return f"{load}(num_inference_steps={steps})"


# ---- names
_LEAVES = {
    "time": "time_emb_proj",
    "shortcut": "conv_shortcut",
    "norm": "group_norm",
    "out": "to_out.0",
}
_OUTER = {
    "time.linear1": "time_embedding.linear_1",
    "time.linear2": "time_embedding.linear_2",
    "input": "conv_in",
    "norm": "conv_norm_out",
    "output": "conv_out",
}


def _their_names(model: Model, name: str) -> list[str]:
    """Return diffusers' name of our weight; three names for stacked queries, keys, values."""
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return [f"{_OUTER[module]}.{kind}"]
    layer, leaf = module.rsplit(".", 1)
    prefix = _layers(model)[layer.removesuffix(".attention")]
    if layer.endswith(".attention"):
        prefix = prefix.replace("resnets", "attentions")
    leaves = ["to_q", "to_k", "to_v"] if leaf == "qkv" else [_LEAVES.get(leaf, leaf)]
    return [f"{prefix}.{theirs}.{kind}" for theirs in leaves]


def _layers(model: Model) -> dict[str, str]:
    """Return diffusers' name of each possible layer: our flat lists hold nested ones."""
    names = {"middle.0": "mid_block.resnets.0", "middle.1": "mid_block.resnets.1"}
    for side, blocks in (("down", model.blocks), ("up", model.blocks + 1)):
        inner = [*(f"resnets.{block}" for block in range(blocks)), f"{side}samplers.0"]
        layers = itertools.product(range(len(model.multipliers)), inner)
        for number, (level, layer) in enumerate(layers):
            names[f"{side}.{number}"] = f"{side}_blocks.{level}.{layer}"
    return names
