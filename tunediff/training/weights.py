"""Weights as they are saved: files of safetensors, read as plain data, compared with models.

Of adapters of the package peft, such as LoRA, checkpoints and files hold what is trained. The
frozen base model is left out, since the workload's file builds it again. A digest stands for it,
so that an adapter is never put onto another base.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from tunediff import config as cfg
from tunediff.config import ConfigError, Systems
from tunediff.config.code import WorkloadError
from tunediff.core import trial_record as record
from tunediff.core.files import write_atomically

NAME = "weights.safetensors"
"""What a finished training leaves."""
FROZEN_BASE = "frozen_base.digest"
"""Entry of an adapter's weights that stands for its base model: the 8 bytes of a digest."""


def save(weights: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write weights as safetensors, contiguous and on the CPU. Raises `OSError`."""
    # Copied: weights that are tied to each other share their memory, which such a file cannot say.
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()
    }
    content = to_safetensors(tensors, metadata=metadata)
    write_atomically(path, lambda file: file.write(content), durable=True)


def digest(weights: Mapping[str, Any]) -> str:
    """Return a digest of weights: names, types, shapes and content, in 16 hexadecimal digits.

    The content is summed as integers modulo 2⁶⁴ where it lies, which is exact in any order: the
    same weights have the same digest on any device, with any number of threads and in any memory
    format. It notices changes, but does not withstand an adversary.
    """
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors.values():
        by_device.setdefault(tensor.device, []).append(_checksum(tensor))
    # One transfer from each device, not one for each tensor.
    sums = {device: iter(torch.stack(of).tolist()) for device, of in by_device.items()}
    lines = [
        (name, str(tensor.dtype), tuple(tensor.shape), next(sums[tensor.device]))
        for name, tensor in tensors.items()
    ]
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:16]


_ROW = 256
"""Words of 8 bytes that are summed before they are weighted by their place."""
_FACTOR = 0x1E3779B97F4A7C15
"""An odd number whose multiples spread over 64 bits."""


def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's 8-byte words, each weighted by its row, int64 []."""
    if not tensor.numel():  # an empty buffer, or a rank's part of a weight of fewer rows than ranks
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if content.numel() % 8 or content.data_ptr() % 8:
        content = torch.nn.functional.pad(content, (0, -content.numel() % 8))
        content = content.clone() if content.data_ptr() % 8 else content
    words = content.view(torch.int64)
    split = len(words) // _ROW * _ROW
    rows = torch.cat([words[:split].view(-1, _ROW).sum(1), words[split:]])
    return (rows * (torch.arange(1, 2 * len(rows), 2, device=rows.device) * _FACTOR)).sum()


def about(config: Systems, folder: Path, steps: int) -> dict[str, str]:
    """Return a file's metadata on its training, by name: `config`, `environment` and `result`, its
    last evaluation, as JSON. `folder`: that of its journal; `steps`: those of the weights, without
    whose evaluation there is no result.
    """
    trial = record.read_trial(folder)
    metadata: dict[str, Any] = {"config": cfg.flat(cfg.with_relative_paths(config))}
    if trial is not None:
        metadata["environment"] = trial.environment
        if trial.points and trial.points[-1].steps == steps:
            metadata["result"] = trial.points[-1].flat
    texts = {name: json.dumps(value) for name, value in metadata.items()}
    return {"fingerprint": cfg.fingerprint(config), "workload": config.schema.workload, **texts}


def read(path: Path) -> dict[str, Any]:
    """Read weights on the CPU: safetensors, or torch's format with plain data only.

    Raises `ConfigError` if it cannot be read.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # Mapped: of a checkpoint only the weights are read. weights_only: runs no code.
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:  # a damaged archive raises many things; each means the same
        kind = type(error).__name__
        raise ConfigError(f"{path}: is damaged or holds no plain weights ({kind})") from None


@contextlib.contextmanager
def refused(where: str) -> Iterator[None]:
    """Raise `ConfigError` for weights that a model does not take inside: `load_state_dict` names
    those that are missing, extra or misshapen."""
    try:
        yield
    except RuntimeError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None


# ---- the weights that a model is saved with
class _FrozenBase:
    """The weights of a peft model that do not learn."""

    def __init__(self, model: nn.Module) -> None:
        parameters = model.named_parameters(remove_duplicate=False)
        self.names = {name for name, parameter in parameters if not parameter.requires_grad}
        self.at_first = self.digest_in(model.state_dict())

    def digest_in(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the digest of the base in a model's complete state, uint8 [8]."""
        base = {name: state[name] for name in sorted(self.names & state.keys())}
        return torch.tensor(list(bytes.fromhex(digest(base))), dtype=torch.uint8)


_bases: weakref.WeakKeyDictionary[nn.Module, _FrozenBase] = weakref.WeakKeyDictionary()


def note_base(model: nn.Module) -> None:
    """Note the frozen base of a peft model as the file has built it: it is left out from now on.

    Other models, and copies of one such as averages, are saved complete.
    """
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        _bases[model] = _FrozenBase(model)


def state_of(model: nn.Module) -> Mapping[str, Any]:
    """Return the weights that a model is saved with, not copied.

    All of them, but for a peft model without its frozen base, unless that has changed: then the
    file does not build it as it is.
    """
    base = _bases.get(model)
    if base is None:
        return model.state_dict()
    state = model.state_dict()
    digest = base.digest_in(state)
    if not torch.equal(digest, base.at_first):
        return state
    return {name: value for name, value in state.items() if name not in base.names} | {
        FROZEN_BASE: digest
    }


def put_into(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a model the weights that `state_of` has returned.

    Raises `RuntimeError` for another model's, and `WorkloadError` for an adapter of another base.
    """
    if FROZEN_BASE not in state:
        model.load_state_dict(state)
        return
    base = _bases.get(model)
    if base is None or not torch.equal(
        base.digest_in(model.state_dict()), state[FROZEN_BASE].cpu()
    ):
        raise WorkloadError(
            "the frozen base model is not the one that the adapter was trained on: the file must"
            " build the same one in every run, such as by from_pretrained"
        )
    learned = {name: value for name, value in state.items() if name != FROZEN_BASE}
    outcome = model.load_state_dict(learned, strict=False)
    if wrong := [*outcome.unexpected_keys, *(set(outcome.missing_keys) - base.names)]:
        raise RuntimeError(f"{sorted(wrong)[0]} is no weight of both the adapter and its file")
