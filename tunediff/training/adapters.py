"""Adapters of the package peft, such as LoRA: checkpoints and saved weights hold what is trained.

The frozen base model is left out, since the workload's file builds it again. A digest stands for
it, so that an adapter is never put onto another base.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tunediff.config.code import WorkloadError
from tunediff.training import weights
from tunediff.training.weights import FROZEN_BASE

ADAPTER = "adapter"
"""Metadata of a file of weights: peft's configuration of the adapter, and its names of weights."""


class _FrozenBase:
    """The weights of a peft model that do not learn and are no part of its adapter."""

    def __init__(self, model: Any) -> None:
        adapter = {id(one) for name in model.peft_config for one in _adapter(model, name).values()}
        self.names = {
            name
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and id(parameter) not in adapter
        }
        self.at_first = self.digest_in(model.state_dict())

    def digest_in(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the digest of the base in a model's complete state, uint8 [8]."""
        base = {name: state[name] for name in sorted(self.names & state.keys())}
        return torch.tensor(list(bytes.fromhex(weights.digest(base))), dtype=torch.uint8)


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


def about(model: nn.Module | None, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what a file of these weights says of its adapter, for `write`; {} without one."""
    if model is None or model not in _bases:
        return {}
    name = cast(Any, model).active_adapter
    names = {id(value): key for key, value in state.items()}
    as_saved = _adapter(model, name, {key: one for key, one in state.items() if key != FROZEN_BASE})
    if not as_saved.keys() or any(id(value) not in names for value in as_saved.values()):
        return {}  # peft has computed what it would save
    config = copy.copy(cast(Any, model).peft_config[name])
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        content = json.loads((Path(folder) / "adapter_config.json").read_text())
    own_names = {saved: names[id(value)] for saved, value in as_saved.items()}
    return {ADAPTER: json.dumps({"config": content, "names": own_names})}


def write(metadata: Mapping[str, str], state: Mapping[str, Tensor], folder: Path) -> bool:
    """Write the adapter in a file of weights for peft's `from_pretrained`; False if it has none."""
    if ADAPTER not in metadata:
        return False
    adapter = json.loads(metadata[ADAPTER])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter["config"], indent=2) + "\n")
    tensors = {saved: state[key] for saved, key in adapter["names"].items()}
    weights.save(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return True


def _adapter(model: Any, name: str, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return what peft saves of an adapter, by the names in its files."""
    peft = sys.modules["peft"]
    return cast(
        "dict[str, Tensor]",
        peft.get_peft_model_state_dict(
            model, state_dict=state or model.state_dict(keep_vars=True), adapter_name=name,
            save_embedding_layers=False,
        ),
    )  # fmt: skip
