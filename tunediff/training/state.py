"""What a training has learned, listed once: what is saved, restored, and put back after the warm-up
follows from it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import errno
import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from tunediff.core.files import write_atomically
from tunediff.core.trial_record import CHECKPOINT
from tunediff.data import randomness
from tunediff.data.items import mix, with_values
from tunediff.distributed import World
from tunediff.training import memory


class Stateful(Protocol):
    """Anything that a training can keep: modules, optimizers, or an object of one's own.

    `state_dict` holds tensors, numbers, strings, lists and dictionaries; all ranks call it
    together.
    """

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class State:
    """Everything that changes while a training learns, by name."""

    def __init__(self, world: World) -> None:
        self._world, self.stateful = world, dict[str, Stateful]()
        self.rng = torch.Generator(world.device)
        """Of equal state on all ranks."""

    def keep(self, objects: Mapping[str, Stateful]) -> None:
        """Take more into the list. Raises `TypeError` for what has no state, ValueError for a name
        given twice."""
        for name, stateful in objects.items():
            # A wrapper may pass its attributes on, which isinstance of a protocol does not see from
            # Python 3.12 on.
            if not all(
                callable(getattr(stateful, method, None))
                for method in ("state_dict", "load_state_dict")
            ):
                raise TypeError(
                    f"keep({name}=…): {type(stateful).__name__} has no state_dict and"
                    " load_state_dict"
                )
            if name in self.stateful:
                raise ValueError(f"keep({name}=…): the name is taken")
            self.stateful[name] = plain(stateful) if isinstance(stateful, nn.Module) else stateful

    @property
    def names(self) -> list[str]:
        """Of all that is kept."""
        return list(self.stateful)

    def take(self) -> dict[str, Any]:
        """Return all that is kept, as of now. Its tensors are not copied."""
        states = {name: stateful.state_dict() for name, stateful in self.stateful.items()}
        return {
            "kept": states, "shared_rng": self.rng.get_state(), "rng": self._world.gather(self._own_rng()),
            "library_rng": self._world.gather(randomness.library_state()),
        }  # fmt: skip

    def put(self, state: Mapping[str, Any]) -> None:
        """Put everything back as it was when `state` was taken. Raises what the parts raise for a
        foreign state.

        Another number of ranks draws other numbers from there on, which follow from what rank 0 had
        drawn.
        """
        for name, stateful in self.stateful.items():
            try:
                stateful.load_state_dict(state["kept"][name])
            except Exception as error:
                error.add_note(f"while {name}, which trial.keep was given, took up its state")
                raise
        self.put_generators(state)

    def put_generators(self, state: Mapping[str, Any]) -> None:
        """Put the generators alone back as they were when `state` was taken."""
        self.rng.set_state(state["shared_rng"].cpu())
        if len(state["rng"]) != self._world.size:  # goes on with another number of ranks
            torch.manual_seed(mix(state["rng"][0][0].tolist(), self._world.rank))
            randomness.seed_libraries(torch.initial_seed())
            return
        self.set_own(state["rng"][self._world.rank], state["library_rng"][self._world.rank])

    def own(self) -> tuple[list[Tensor], dict[str, list[Any]]]:
        """Return the states of this rank's global generators, for `set_own`."""
        return self._own_rng(), randomness.library_state()

    def set_own(self, own: list[Tensor], library: Mapping[str, list[Any]]) -> None:
        """Put this rank's global generators back."""
        randomness.set_library_state(library)
        torch.set_rng_state(own[0].cpu())
        if len(own) > 1:
            torch.cuda.set_rng_state(own[1].cpu(), self._world.device)

    def _own_rng(self) -> list[Tensor]:
        """Return the states of the global generators, which dropout uses."""
        device = self._world.device
        return [
            torch.get_rng_state(),
            *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else []),
        ]


def plain(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of torch.compile, DistributedDataParallel and
    DataParallel."""
    module = getattr(module, "_orig_mod", module)
    return (
        module.module
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
        else module
    )


def copied(state: Any) -> Any:
    """Return a copy of a state that shares nothing with it: containers of the same types, tensors
    in host memory."""
    return _mapped(
        state, lambda leaf: _on_host(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
    )


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _mapped(state: Any, change: Callable[[Any], Any]) -> Any:
    """Return a state with `change(leaf)` for all that is no container, in new containers of the
    same types."""
    if isinstance(state, Mapping):
        return with_values(state, lambda value: _mapped(value, change))
    if isinstance(state, list | tuple):
        return getattr(type(state), "_make", type(state))(
            [_mapped(value, change) for value in state]
        )
    return change(state)


@dataclasses.dataclass(frozen=True)
class _TensorSpec:
    """Stands for a tensor that is sent by itself."""

    shape: torch.Size
    dtype: torch.dtype


def broadcast(state: Any, world: World) -> Any:
    """Return rank 0's state on every rank, its tensors in host memory.

    They are sent one by one: `World.tell` would hold the bytes of all of them at once on the device
    of each rank.
    """
    if world.size == 1:
        return state
    tensors = list[Tensor]()

    def taken_out(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_quantized:
            return leaf
        tensors.append(leaf)
        return _TensorSpec(leaf.shape, leaf.dtype)

    outline = world.tell(_mapped(state, taken_out) if world.main else None)
    own = iter(tensors)

    def put_in(leaf: Any) -> Any:
        return (
            _broadcast_tensor(next(own, None), leaf, world)
            if isinstance(leaf, _TensorSpec)
            else leaf
        )

    return _mapped(outline, put_in)


def _broadcast_tensor(own: Tensor | None, spec: _TensorSpec, world: World) -> Tensor:
    """Return rank 0's tensor, `own` there and None elsewhere."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype) if own is None else own.detach()
    on_device = tensor.to(world.device).contiguous()
    if tensor.numel():
        world.first(on_device.view(-1).view(torch.uint8))  # as bytes: NCCL does not know all types
    return on_device.cpu() if own is None else own


# ---- files
def save(state: Mapping[str, Any], folder: Path) -> None:
    """Write a checkpoint. Raises `OSError` when the disk is full; the previous one then stays."""
    content = without_numpy_scalars(state)
    write_atomically(folder / CHECKPOINT, lambda file: torch.save(content, file), durable=True)


def load(folder: Path, explain: Callable[[str], object] = print) -> dict[str, Any] | None:
    """Return the checkpoint in `folder`; None without one, and after `explain` was called with why
    it is of no use.

    Such a file is set aside as `.damaged`, and the training starts from the beginning. Tensors are
    on the CPU: whoever loads them copies them to the device, and RNG states and the optimizer's
    step counts must not be on one.

    Raises `OSError` with its path where the disk cannot read it now or memory runs out; it need not
    be damaged.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        state = torch.load(
            path, map_location="cpu", weights_only=True
        )  # never runs code from a file
        reason = (
            ""
            if isinstance(state, dict)
            else f"{CHECKPOINT} holds {type(state).__name__}, not a training"
        )
    except Exception as error:  # a damaged archive raises many things; each means the same
        if memory.is_oom(error):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from error
        _read_through(path)
        reason = f"{CHECKPOINT} cannot be read ({type(error).__name__})"
    if not reason:
        return cast("dict[str, Any]", state)
    set_aside(folder)
    explain(reason)
    return None


def _read_through(path: Path) -> None:
    """Raise `OSError` if a file cannot be read. torch raises that for a damaged one as well, which
    reads well here."""
    try:
        with open(path, "rb") as file:
            while file.read(2**24):
                pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def set_aside(folder: Path) -> None:
    """Rename a checkpoint that is of no use, so that the next one does not replace it."""
    path = folder / CHECKPOINT
    path.rename(path.with_suffix(".damaged"))


def without_numpy_scalars(state: Any) -> Any:
    """Return `state` with Python numbers for numpy's scalars, which `weights_only` refuses to read.

    `lr * np.cos(…)` puts them into an optimizer's state. Containers without any are returned as
    they are.
    """
    if isinstance(state, np.generic) or (isinstance(state, np.ndarray) and state.ndim == 0):
        return state.item()
    if type(state) in (dict, collections.OrderedDict):
        items = [
            (without_numpy_scalars(key), without_numpy_scalars(value))
            for key, value in state.items()
        ]
        same = all(
            key is old and value is state[old]
            for (key, value), old in zip(items, state, strict=True)
        )
        return state if same else type(state)(items)
    if type(state) in (list, tuple):
        values = [without_numpy_scalars(value) for value in state]
        return state if all(map(lambda a, b: a is b, values, state)) else type(state)(values)
    return state


def unreadable_part(state: Any) -> str:
    """Return where something lies in `state` that a checkpoint cannot hold, `["history"][0] is a
    deque`; "" if nowhere.

    Example: `unreadable_part({"seen": [Path("a")]})` is `["seen"][0] is a PosixPath`.
    """
    if _is_readable(without_numpy_scalars(state)):
        return ""
    for key, value in _parts(state):
        if inner := unreadable_part(value):
            return f"[{key}]{'' if inner.startswith('[') else ' '}{inner}"
    return f"is a {type(state).__name__}"


def _parts(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a dictionary, list or tuple with their keys as one writes them."""
    if type(state) in (dict, collections.OrderedDict):
        yield from (
            (f'"{key}"' if isinstance(key, str) else repr(key), value)
            for key, value in state.items()
        )
    elif type(state) in (list, tuple):
        yield from ((str(index), value) for index, value in enumerate(state))


def _is_readable(state: Any) -> bool:
    """Whether what is written of it can be read with `weights_only`. A part that cannot be written
    is none."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True
