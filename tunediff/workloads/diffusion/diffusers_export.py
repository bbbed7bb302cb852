"""Write pipeline folders of diffusers, and read their networks, without diffusers being installed.

Our U-Net is diffusers' `UNet2DModel` as the DDPM authors' own weights use it
(google/ddpm-cifar10-32), name by name. What the other side cannot represent is refused, never
approximated. Torch is imported only where weights are touched, so that a folder is judged at once.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Values
from tunediff.config.knobs import refuse
from tunediff.workloads.diffusion import diffusers_config

if TYPE_CHECKING:
    from torch import Tensor

    from tunediff.workloads.diffusion.knobs import Knobs, Model
    from tunediff.workloads.diffusion.unet import UNet

WEIGHTS = "diffusion_pytorch_model.safetensors"


# ---- writing
def check(folder: Path, config: Any) -> None:
    """Refuse what `write_pipeline` could not write: a full folder, an unknown model.

    Raises `ConfigError`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is not empty; allowed: a new or an empty folder")
    multipliers, process = list(config.model.multipliers), config.process
    scheduler = diffusers_config.scheduler_class(process)
    ddpm = scheduler == "DDPMScheduler"

    def refuse_if(condition: bool, name: str, value: object, why: str) -> None:
        refuse(condition, f"{name}: {value!r} cannot be handed to diffusers: {why}")

    refuse_if(
        multipliers[0] != 1,
        "model.multipliers",
        multipliers,
        "UNet2DModel gives its first convolution as many channels as its first resolution, so the"
        " first multiplier must be 1",
    )
    refuse_if(
        not ddpm and process.prediction != "v",
        "process.prediction",
        process.prediction,
        f"{scheduler}, which has these noise levels, takes v",
    )
    refuse_if(
        ddpm and process.sigma_data != 1.0,
        "process.sigma_data",
        process.sigma_data,
        "DDPMScheduler has 1; EDMEulerScheduler has it, with process.schedule = edm",
    )
    refuse_if(
        ddpm and process.schedule == "linear" and 0.02 * 1000 / process.steps > 0.999,
        "process.steps",
        process.steps,
        "DDPMScheduler does not limit β to 0.999, which schedule = linear reaches in so few steps",
    )


def write_pipeline(folder: Path, config: Any, weights: Mapping[str, Tensor]) -> None:
    """Write a folder for `from_pretrained`, complete or absent; `weights`: our `UNet`'s state.

    The pipeline samples as we do with `sampler = ddpm`, called with `num_inference_steps` =
    `process.steps`; that of `path = flow` or `schedule = edm` as with `sampler = euler` of as many
    steps. Raises `ConfigError` for what `check` refuses, `OSError` if the disk does.
    """
    from safetensors.torch import save

    check(folder, config)
    tensors = {}
    for name, tensor in weights.items():
        names = _their_names(config.model, name)
        for theirs, part in zip(names, tensor.detach().cpu().chunk(len(names)), strict=True):
            tensors[theirs] = part.contiguous()
    files = {
        "model_index.json": _json(diffusers_config.index_options(config)),
        "unet/config.json": _json(diffusers_config.unet_options(config)),
        f"unet/{WEIGHTS}": save(tensors, metadata={"format": "pt"}),
        "scheduler/scheduler_config.json": _json(diffusers_config.scheduler_options(config)),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, content in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(content)
        temporary.chmod(0o755)  # mkdtemp gives 0700
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


# ---- reading
def example(folder: Path, config: Any) -> str:
    """Return the call that samples from a pipeline as we do."""
    scheduler = diffusers_config.scheduler_class(config.process)
    steps = config.process.steps if scheduler == "DDPMScheduler" else config.evaluation.steps
    load = f"diffusers.{diffusers_config.PIPELINES[scheduler]}.from_pretrained({str(folder)!r})"
    return f"{load}(num_inference_steps={steps})"


def read_unet(folder: Path) -> tuple[Values, dict[str, Tensor]]:
    """Return (data and model knobs, float32 state for our `UNet`) of a pipeline or `unet/`.

    Nested (`unet/`, `scheduler/`) or flat; weights in safetensors, or `.bin` read as plain tensors
    only; attention by its present names or the older query, key, value, proj_attn. Raises
    `ConfigError` for weights that are damaged or not of such a network.
    """
    import torch

    from tunediff.training.weights import read, shape_of, words

    default, unet = cfg.find("diffusion").schema.default(), _unet_folder(folder)
    values = diffusers_config.read_unet(unet / "config.json", default)
    kinds = (WEIGHTS, "diffusion_pytorch_model.bin")
    file = _first(unet, kinds, f"no weights; looked for {' and '.join(kinds)}")
    tensors = {}
    for name, tensor in read(file).items():
        for old, present in _OLD_LEAVES.items():
            name = name.replace(old, present)
        tensors[name] = tensor
    config: Any = cfg.override(default, values, where=str(file), check=False)
    state = {}
    for name, tensor in _network(config.knobs).state_dict().items():
        shape = tuple(tensor.shape)
        names = _their_names(config.model, name)
        part = (shape[0] // len(names), *shape[1:])
        for theirs in names:
            if theirs not in tensors:
                raise ConfigError(f"{file}: {theirs} is missing")
            if (actual := shape_of(tensors[theirs])) != part:
                raise ConfigError(
                    f"{file}: {theirs} has shape {words(actual)}; by config.json it should be"
                    f" {words(part)}"
                )
        state[name] = torch.cat([tensors.pop(theirs) for theirs in names]).float()
    if tensors:
        raise ConfigError(f"{file}: {next(iter(tensors))} has no place in our U-Net")
    return values, state


def initial_weights(path: Path, knobs: Knobs) -> dict[str, Tensor]:
    """Read initial weights: a `.safetensors` file of ours, or a pipeline or U-Net folder.

    Raises `ConfigError` naming the first weight that is missing, too many or of another shape.
    """
    from tunediff.training.weights import check_fit, read

    if not path.is_dir():
        weights = read(path)
    else:
        values, weights = read_unet(path)
        groups, expected = values["model.norm_groups"], knobs.model.norm_groups
        if groups != expected:  # the only size that no shape shows
            raise ConfigError(
                f"{path}: norm_num_groups is {groups}, but model.norm_groups = {expected}"
            )
    check_fit(weights, _network(knobs), str(path))
    return weights


def _network(knobs: Knobs) -> UNet:
    import torch

    from tunediff.workloads.diffusion.unet import network

    with torch.device("meta"):
        return network(knobs)


def _unet_folder(folder: Path) -> Path:
    """Return the folder of config.json and weights: google/ddpm-cifar10-32 has them at the root."""
    names = ("unet/config.json", "config.json")
    return _first(folder, names, f"no U-Net; looked for {' and '.join(names)}").parent


def _first(folder: Path, names: Sequence[str], missing: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"{folder}: {missing}")


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
_OLD_LEAVES = {
    ".query.": ".to_q.",
    ".key.": ".to_k.",
    ".value.": ".to_v.",
    ".proj_attn.": ".to_out.0.",
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
