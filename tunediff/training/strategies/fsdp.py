"""Every process keeps its share of the weights, and has a part of each batch (FSDP2,
`fully_shard`)."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tunediff.config.systems import Systems
from tunediff.distributed import World
from tunediff.training.strategies.single import Single

Gather = Callable[[DTensor, Tensor], Tensor]
"""Gives what stands for a shared tensor in a state; also gets the parameter that it is the content
of, or itself."""


class Fsdp(Single):
    """Weights, gradients and optimizer state are divided; a block's weights are gathered while it
    runs.

    States stay those of one process: `state_dict` of the model, of copies of it and of optimizers
    that are kept gives whole tensors on every rank, and `load_state_dict` takes them. All ranks
    must call each together. Only within `states_as_shares` and `states_for_file`, which spare the
    device's memory, they are others.
    """

    separate_losses = False
    _model: FSDPModule | None = None

    def __init__(self, config: Systems, world: World) -> None:
        super().__init__(config, world)
        self._gather: Gather = _whole

    def wrap(self, model: nn.Module, blocks: type[nn.Module] | None = None) -> nn.Module:
        self._blocks = blocks
        nowhere = {
            id(one): nn.Parameter(torch.empty_like(one, device="meta"))
            for one in model.parameters()
        }
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
        # A partial, since torch sets an attribute of the hook, which a bound method does not take.
        model.register_state_dict_post_hook(functools.partial(self._gather_network))  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(_share_out)  # type: ignore[no-untyped-call]
        model.__deepcopy__ = functools.partial(self._twin, model)  # type: ignore[assignment]

    def _twin(self, model: nn.Module, memo: Any) -> nn.Module:
        """What `copy.deepcopy` makes: a second model, shared out alike."""
        twin = self._whole_network(model)
        self._shard(twin)
        return twin

    def _whole_network(self, model: nn.Module) -> nn.Module:
        """Return the network or a copy of it with all of its weights."""
        plain = copy.deepcopy(self._plain)
        buffers = dict(model.named_buffers())
        state = {
            name: one.clone() if name in buffers else one
            for name, one in model.state_dict().items()
        }
        plain.load_state_dict(state, assign=True)
        for mine, theirs in zip(plain.modules(), model.modules(), strict=True):
            mine.training = theirs.training
        return plain

    def keeps(self, one: Any) -> None:
        if isinstance(one, torch.optim.Optimizer):
            one.register_state_dict_post_hook(
                lambda optimizer, state: gathered(state, self._gather)
            )
            one.register_load_state_dict_pre_hook(_share_out_moments)

    def _gather_network(
        self, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        parameters = {
            prefix + name: one for name, one in module.named_parameters(remove_duplicate=False)
        }
        for name, value in state.items():
            if isinstance(value, DTensor):
                state[name] = self._gather(value, parameters.get(name, value))

    def states_as_shares(self) -> contextlib.AbstractContextManager[object]:
        return self._gathering(lambda tensor, _: tensor)

    def states_for_file(self) -> contextlib.AbstractContextManager[object]:
        return self._gathering(_OnHost(self._world.main))

    @contextlib.contextmanager
    def _gathering(self, gather: Gather) -> Iterator[None]:
        before, self._gather = self._gather, gather
        try:
            yield
        finally:
            self._gather = before

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
        parts = [
            part
            for root in roots
            for part in cast(nn.Module, root).modules()
            if isinstance(part, FSDPModule)
        ]
        try:
            for root in roots:
                # a copy that has never been called does not know its root yet
                root._get_fsdp_state()._lazy_init()
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
    """Return the networks in a model that are shared out: itself, or those within a wrapper such as
    `AveragedModel`."""
    if isinstance(model, FSDPModule):
        return [model]
    return list(dict.fromkeys(part for child in model.children() for part in _outermost(child)))


def gathered(state: Any, gather: Gather) -> Any:
    """Nested dictionaries and lists with `gather(tensor, tensor)` for every shared tensor."""
    if isinstance(state, DTensor):
        return gather(state, state)
    if isinstance(state, dict):
        return type(state)((key, gathered(value, gather)) for key, value in state.items())
    return (
        type(state)(gathered(value, gather) for value in state)
        if isinstance(state, list | tuple)
        else state
    )


def _whole(tensor: DTensor, _: Tensor) -> Tensor:
    return tensor.full_tensor()


class _OnHost:
    """Gathers for a file: no device holds more than one whole tensor at a time, and no rank but the
    first keeps any.

    A parameter that several states have is gathered once, so that a file holds it once.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps, self._gathered = keeps, dict[int, tuple[Tensor, Tensor]]()

    def __call__(self, tensor: DTensor, parameter: Tensor) -> Tensor:
        if id(parameter) not in self._gathered:
            whole = tensor.full_tensor()
            on_host = whole.cpu() if self._keeps else whole.new_empty(0, device="cpu")
            # The parameter is held as well: its id is that of no other tensor as long as it exists
            self._gathered[id(parameter)] = parameter, on_host
        return self._gathered[id(parameter)][1]


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
    return distribute_tensor(
        value.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None
    )
