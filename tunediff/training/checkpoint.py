"""A training on disk: written beside and moved into place, so that a kill leaves the old one or the new one, whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NAME = "checkpoint.pt"
WEIGHTS = "ema.safetensors"


def save(state: dict[str, Any], folder: Path) -> None:
    """Write the state of a training. Raises `OSError` when the disk is full; the previous state then stays."""
    _replace(folder / NAME, lambda path: torch.save(state, path))


def load(folder: Path) -> dict[str, Any] | None:
    """The state of the training in `folder`; None without one, or when it is damaged (training then starts anew).

    Its tensors are on the CPU: whoever loads them copies them to the device, and RNG states and the optimizer's step
    counts must not be on one.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # never runs code from a file
    except Exception as error:  # a damaged archive raises many things; each means the same
        path.rename(path.with_suffix(".damaged"))
        print(f"{path}: damaged ({type(error).__name__}), kept as .damaged; training starts from the beginning")
        return None
    return state if isinstance(state, dict) else None


def save_weights(weights: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write weights as safetensors, contiguous and on the CPU."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
    _replace(path, lambda to: save_file(tensors, to, metadata=metadata))


def _replace(path: Path, write: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(beside)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
