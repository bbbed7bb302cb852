"""What a training has learned, listed once: what is saved, restored, and put back after the warm-up follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tunediff import randomness
from tunediff.data.loader import mix
from tunediff.distributed import World
from tunediff.files import write_atomically
from tunediff.record import CHECKPOINT


@runtime_checkable
class Stateful(Protocol):
    """Anything that a training can keep: modules, optimizers, or an object of one's own.

    `state_dict` holds tensors, numbers, strings, lists and dictionaries; all ranks call it together.
    """

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class State:
    """Everything that changes while a training learns, by name."""

    def __init__(self, world: World) -> None:
        self._world, self._kept = world, dict[str, Stateful]()
        self.rng = torch.Generator(world.device)
        """Of equal state on all ranks."""

    def keep(self, kept: Mapping[str, Stateful]) -> None:
        """Take more into the list. Raises `TypeError` for what has no state, ValueError for a name given twice."""
        for name, one in kept.items():
            if not isinstance(one, Stateful):
                raise TypeError(f"keep({name}=…): {type(one).__name__} has no state_dict and load_state_dict")
            if name in self._kept:
                raise ValueError(f"keep({name}=…): the name is taken")
            self._kept[name] = plain(one) if isinstance(one, nn.Module) else one

    @property
    def names(self) -> list[str]:
        """Of all that is kept."""
        return list(self._kept)

    def take(self) -> dict[str, Any]:
        """All of it, as of now. Its tensors are not copied."""
        kept = {name: one.state_dict() for name, one in self._kept.items()}
        return {
            "kept": kept, "shared_rng": self.rng.get_state(), "rng": self._world.gather(self._own_rng()),
            "library_rng": self._world.gather(randomness.library_state()),
        }  # fmt: skip

    def put(self, state: Mapping[str, Any]) -> None:
        """Everything as it was when `state` was taken. Raises what the parts raise for a state of something else.

        Another number of ranks draws other numbers from there on, which follow from what rank 0 had drawn.
        """
        for name, one in self._kept.items():
            one.load_state_dict(state["kept"][name])
        self.rng.set_state(state["shared_rng"].cpu())
        if len(state["rng"]) != self._world.size:  # goes on with another number of ranks
            torch.manual_seed(mix(state["rng"][0][0].tolist(), self._world.rank))
            randomness.seed_libraries(torch.initial_seed())
            return
        randomness.set_library_state(state["library_rng"][self._world.rank])
        own = state["rng"][self._world.rank]
        torch.set_rng_state(own[0].cpu())
        if len(own) > 1:
            torch.cuda.set_rng_state(own[1].cpu(), self._world.device)

    def _own_rng(self) -> list[Tensor]:
        """The global generators' states, as dropout uses them."""
        device = self._world.device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def plain(module: nn.Module) -> nn.Module:
    """The module inside what torch.compile, DistributedDataParallel and DataParallel put around it."""
    module = getattr(module, "_orig_mod", module)
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel) else module


def copied(state: Any) -> Any:
    """A copy in host memory of nested dictionaries and lists of tensors."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    return type(state)(map(copied, state)) if isinstance(state, list | tuple) else state


# -------------------------------------------------------------------------------------------------------------- files
def save(state: Mapping[str, Any], folder: Path) -> None:
    """Write a checkpoint. Raises `OSError` when the disk is full; the previous one then stays."""
    write_atomically(folder / CHECKPOINT, lambda file: torch.save(state, file), durable=True)


def load(folder: Path) -> dict[str, Any] | None:
    """The checkpoint in `folder`; None without one, or when it is damaged (training then starts anew).

    Its tensors are on the CPU: whoever loads them copies them to the device, and RNG states and the optimizer's step
    counts must not be on one.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # never runs code from a file
    except Exception as error:  # a damaged archive raises many things; each means the same
        path.rename(path.with_suffix(".damaged"))
        print(f"{path}: damaged ({type(error).__name__}), kept as .damaged; training starts from the beginning")
        return None
    return state if isinstance(state, dict) else None
