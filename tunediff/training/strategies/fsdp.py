"""Processes share the weights and have parts of each batch (FSDP2, `fully_shard`)."""

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
"""Replaces a shared tensor in a state; also gets its parameter, or the tensor again."""


class Fsdp(Single):
    """Divides weights, gradients, optimizer state; gathers a block's weights to run it.

    States stay those of one process: `state_dict` of the model, of copies of it and of optimizers
    that are kept gives complete tensors on every rank, and `load_state_dict` takes them. All ranks
    call each together. `states_as_shares` and `states_for_file` change that, to spare memory.
    """

    _model: FSDPModule | None = None

    def __init__(self, config: Systems, world: World) -> None:
        super().__init__(config, world)
        self._gather: Gather = _full_tensor

    # ---- the model
    def wrap(self, model: nn.Module, blocks: type[nn.Module] | None = None) -> nn.Module:
        self._blocks = blocks
        without_weights = {
            id(one): nn.Parameter(torch.empty_like(one, device="meta"))
            for one in model.parameters()
        }
        self._plain = copy.deepcopy(model, without_weights)
        self._mesh = init_device_mesh(self._world.device.type, (self._world.size,))
        self._shard(model)
        self._model = cast(FSDPModule, model)
        return model

    def _shard(self, model: nn.Module) -> None:
        """Divide a model in place: block by block, then what is left."""
        half = self._options.gradients == "bf16"
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": self._options.reshard,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if half else None),
        }
        for part in model.modules() if self._blocks is not None else ():
            if isinstance(part, self._blocks):  # type: ignore[arg-type]
                fully_shard(part, **options)
        fully_shard(model, **options)
        # A partial, since torch sets an attribute of the hook, which a bound method does not take.
        model.register_state_dict_post_hook(functools.partial(self._gather_model))  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(_share_out)  # type: ignore[no-untyped-call]
        model.__deepcopy__ = functools.partial(self._deepcopy, model)  # type: ignore[assignment]

    def _deepcopy(self, model: nn.Module, memo: Any) -> nn.Module:
        """Return a second model, divided as the first."""
        twin = copy.deepcopy(self._plain)
        buffers = dict(model.named_buffers())
        state = {
            name: value.clone() if name in buffers else value
            for name, value in model.state_dict().items()
        }
        twin.load_state_dict(state, assign=True)
        for mine, theirs in zip(twin.modules(), model.modules(), strict=True):
            mine.training = theirs.training
        self._shard(twin)
        return twin

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
        modules = [part for root in roots for part in cast(nn.Module, root).modules()]
        parts = [part for part in modules if isinstance(part, FSDPModule)]
        try:
            for root in roots:
                # a copy that was never called does not know its root yet
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

    # ---- states
    def keeps(self, stateful: Any) -> None:
        if isinstance(stateful, torch.optim.Optimizer):
            stateful.register_state_dict_post_hook(
                lambda optimizer, state: gathered(state, self._gather)
            )
            stateful.register_load_state_dict_pre_hook(_share_out_moments)

    def _gather_model(
        self, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        named = module.named_parameters(remove_duplicate=False)
        parameters = {prefix + name: parameter for name, parameter in named}
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


def _outermost(model: nn.Module) -> list[FSDPModule]:
    """Return a model's divided parts: itself, or those in wrappers like `AveragedModel`."""
    if isinstance(model, FSDPModule):
        return [model]
    return list(dict.fromkeys(part for child in model.children() for part in _outermost(child)))


def gathered(state: Any, gather: Gather) -> Any:
    """Return nested containers with `gather(tensor, tensor)` for each shared tensor."""
    if isinstance(state, DTensor):
        return gather(state, state)
    if isinstance(state, dict):
        return type(state)((key, gathered(value, gather)) for key, value in state.items())
    if isinstance(state, list | tuple):
        return type(state)(gathered(value, gather) for value in state)
    return state


def _full_tensor(tensor: DTensor, _: Tensor) -> Tensor:
    return tensor.full_tensor()


class _OnHost:
    """Gathers for a file: one complete tensor at a time, kept by the first rank alone.

    A parameter that several states have is gathered once, so that a file holds it once.
    """

    def __init__(self, keeps: bool) -> None:
        # The parameter is held as well: its id is that of no other tensor as long as it exists.
        self._keeps, self._gathered = keeps, dict[int, tuple[Tensor, Tensor]]()

    def __call__(self, tensor: DTensor, parameter: Tensor) -> Tensor:
        if id(parameter) not in self._gathered:
            full = tensor.full_tensor()
            on_host = full.cpu() if self._keeps else full.new_empty(0, device="cpu")
            self._gathered[id(parameter)] = parameter, on_host
        return self._gathered[id(parameter)][1]


def _share_out(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters():
        if (key := prefix + name) in state:
            state[key] = _share(state[key], parameter)


def _share_out_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    moments = {
        number: {name: _share(value, parameter) for name, value in state["state"][number].items()}
        for number, parameter in zip(numbers, parameters, strict=False)
        if number in state["state"]
    }
    return {**state, "state": moments}


def _share(value: Any, parameter: Tensor) -> Any:
    """Return this rank's share of a tensor shaped as a parameter; anything else itself."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
