"""Every process keeps its share of the weights, and has a part of each batch (FSDP2, `fully_shard`)."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tunediff.training.strategies.single import Single


class Fsdp(Single):
    """Weights, gradients and optimizer state are divided; a block's weights are gathered while it runs.

    States stay those of one process: `state_dict` of the model, of copies of it and of optimizers that are kept gives
    whole tensors on every rank, and `load_state_dict` takes them. All ranks must call each together.
    """

    separate_losses = False
    _model: FSDPModule | None = None

    def wrap(self, model: nn.Module, blocks: type[nn.Module] | None = None) -> nn.Module:
        self._blocks = blocks
        nowhere = {id(one): nn.Parameter(torch.empty_like(one, device="meta")) for one in model.parameters()}
        self._plain = copy.deepcopy(model, nowhere)  # without weights
        self._mesh = init_device_mesh(self._world.device.type, (self._world.size,))
        self._shard(model)
        self._model = cast(FSDPModule, model)
        return model

    def _shard(self, model: nn.Module) -> None:
        """In place: block by block, then what is left."""
        half = self._options.gradients == "bf16"
        options: dict[str, Any] = {
            "mesh": self._mesh, "reshard_after_forward": self._options.reshard,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if half else None),
        }  # fmt: skip
        for part in model.modules() if self._blocks is not None else ():
            if isinstance(part, self._blocks):  # type: ignore[arg-type]
                fully_shard(part, **options)
        fully_shard(model, **options)
        model.register_state_dict_post_hook(_gather)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(_share_out)  # type: ignore[no-untyped-call]
        model.__deepcopy__ = functools.partial(self._twin, model)  # type: ignore[assignment]

    def _twin(self, model: nn.Module, memo: Any) -> nn.Module:
        """What `copy.deepcopy` makes: a second model, shared out alike."""
        twin = self._whole_network(model)
        self._shard(twin)
        return twin

    def whole(self, model: nn.Module) -> nn.Module:
        if not (parts := _outermost(model)):
            return model
        return _replaced(model, {id(part): self._whole_network(cast(nn.Module, part)) for part in parts})

    def _whole_network(self, model: nn.Module) -> nn.Module:
        """Return the network or a copy of it with all of its weights."""
        plain = copy.deepcopy(self._plain)
        buffers = dict(model.named_buffers())
        state = {name: one.clone() if name in buffers else one for name, one in model.state_dict().items()}
        plain.load_state_dict(state, assign=True)
        for mine, theirs in zip(plain.modules(), model.modules(), strict=True):
            mine.training = theirs.training
        return plain

    def keeps(self, one: Any) -> None:
        if isinstance(one, torch.optim.Optimizer):
            one.register_state_dict_post_hook(lambda optimizer, state: gathered(state))
            one.register_load_state_dict_pre_hook(_share_out_moments)

    @contextlib.contextmanager
    def unsynchronized(self) -> Iterator[None]:
        assert self._model is not None
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)

    @contextlib.contextmanager
    def callable_alone(self, *models: nn.Module) -> Iterator[None]:
        roots = list(dict.fromkeys(root for model in models for root in _outermost(model)))
        parts = [part for root in roots for part in cast(nn.Module, root).modules() if isinstance(part, FSDPModule)]
        try:
            for root in roots:
                root._get_fsdp_state()._lazy_init()  # a copy that has never been called does not know its root yet
                root.set_reshard_after_forward(False)
            for part in parts:
                part.unshard()
            yield
        finally:
            for part in parts:
                part.reshard()
            for root in roots:
                root.set_reshard_after_forward(self._options.reshard)


def _outermost(model: nn.Module) -> list[FSDPModule]:
    """Return the networks in a model that are shared out: itself, or those within a wrapper such as `AveragedModel`."""
    if isinstance(model, FSDPModule):
        return [model]
    return list(dict.fromkeys(part for child in model.children() for part in _outermost(child)))


def _replaced(model: nn.Module, parts: Mapping[int, nn.Module]) -> nn.Module:
    """Return the model with other parts in place of those with these ids; what has none of them is shared."""
    if id(model) in parts or not _outermost(model):
        return parts.get(id(model), model)
    changed = copy.copy(model)
    changed._modules = {
        name: None if child is None else _replaced(child, parts) for name, child in model._modules.items()
    }
    return changed


def gathered(state: Any) -> Any:
    """Nested dictionaries and lists with every shared tensor whole."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return type(state)((key, gathered(value)) for key, value in state.items())
    return type(state)(map(gathered, state)) if isinstance(state, list | tuple) else state


def _gather(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name in state:
        state[name] = gathered(state[name])


def _share_out(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, mine in module.named_parameters():
        if (key := prefix + name) in state and state[key].shape == mine.shape:
            state[key] = _like(mine, state[key])


def _share_out_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    mine = [one for group in optimizer.param_groups for one in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    shared = {
        number: {
            name: _like(one, value) if isinstance(value, Tensor) and value.shape == one.shape else value
            for name, value in state["state"][number].items()
        }
        for number, one in zip(numbers, mine, strict=False) if number in state["state"]
    }  # fmt: skip
    return {**state, "state": shared}


def _like(mine: Tensor, value: Tensor) -> Tensor:
    """This rank's share of a whole tensor, as a parameter has it."""
    if not isinstance(mine, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None)
