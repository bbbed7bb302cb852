"""Adapters of the package peft, such as LoRA: checkpoints and saved weights hold what is trained.

The frozen base model is left out, since the workload's file builds it again. A digest stands for
it, so that an adapter is never put onto another base.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tunediff.config.code import WorkloadError
from tunediff.training import weights
from tunediff.training.weights import FROZEN_BASE


class _FrozenBase:
    """The weights of a peft model that do not learn."""

    def __init__(self, model: nn.Module) -> None:
        parameters = model.named_parameters(remove_duplicate=False)
        self.names = {name for name, parameter in parameters if not parameter.requires_grad}
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
