"""What a training has learned, listed once: what is saved, restored, and put back after the warm-up
follows from it. And the file that holds it, the checkpoint."""

from __future__ import annotations

import _codecs
import copy
import errno
import os
import re
from collections.abc import Callable, Mapping
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
from tunediff.training import memory, weights
from tunediff.training.strategies import Single

NUMPY: list[Any] = [
    np.float64(0).__reduce__()[0], np.dtype, _codecs.encode,
    *{type(np.dtype(kind)) for kind in np.sctypeDict.values()},
]  # fmt: skip
"""What numpy's numbers are made of: `lr * np.cos(…)` puts them into an optimizer's state."""


class Stateful(Protocol):
    """Anything that a training can keep: modules, optimizers, or an object of one's own.

    `state_dict` holds tensors, numbers, strings, lists, dictionaries; all ranks call it.
    """

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class State:
    """Everything that changes while a training learns, by name."""

    def __init__(self, world: World, strategy: Single, scaler: torch.amp.GradScaler) -> None:
        self._world, self._strategy, self._scaler = world, strategy, scaler
        self.stateful = dict[str, Stateful]()
        self.rng = torch.Generator(world.device)
        """Of equal state on all ranks."""

    def keep(self, objects: Mapping[str, Stateful]) -> None:
        """Take more into the list. Raises `TypeError` without state, `ValueError` if named."""
        for name, stateful in objects.items():
            # Not isinstance: a wrapper may pass its attributes on, which that does not see.
            if not all(
                callable(getattr(stateful, method, None))
                for method in ("state_dict", "load_state_dict")
            ):
                kind = type(stateful).__name__
                raise TypeError(f"keep({name}=…): {kind} has no state_dict and load_state_dict")
            if name in self.stateful:
                raise ValueError(f"keep({name}=…): the name is taken")
            self.stateful[name] = plain(stateful) if isinstance(stateful, nn.Module) else stateful

    @property
    def names(self) -> list[str]:
        """Return the names of all that is kept."""
        return list(self.stateful)

    def take(self, complete: bool = False) -> dict[str, Any]:
        """Return all that is kept, as of now. Its tensors are not copied.

        `complete`: with the frozen base of an adapter, which is put back as well if it changes.
        """
        generators, libraries = self.global_generators()
        return {
            "kept": {
                name: weights.state_of(stateful)
                if isinstance(stateful, nn.Module) and not complete
                else stateful.state_dict()
                for name, stateful in self.stateful.items()
            },
            "shared_rng": self.rng.get_state(),
            "rng": self._world.gather(generators),
            "library_rng": self._world.gather(libraries),
            "scaler": self._scaler.state_dict(),
        }

    def copied(self) -> dict[str, Any]:
        """Return a copy of it in host memory, for `put` on the same ranks."""
        with self._strategy.states_as_shares():
            return cast("dict[str, Any]", copied(self.take(complete=True)))

    def put(self, state: Mapping[str, Any]) -> None:
        """Restore everything as of when `state` was taken; raises for a state of others."""
        for name, stateful in self.stateful.items():
            try:
                if isinstance(stateful, nn.Module):
                    weights.put_into(stateful, state["kept"][name])
                else:
                    stateful.load_state_dict(state["kept"][name])
            except Exception as error:
                error.add_note(f"while {name}, which trial.keep was given, took up its state")
                raise
        self.put_generators(state)
        self._scaler.load_state_dict(state["scaler"])

    def put_generators(self, state: Mapping[str, Any]) -> None:
        """Put the generators back as they were when `state` was taken.

        Another number of ranks draws other numbers, which follow from what rank 0 had drawn.
        """
        self.rng.set_state(state["shared_rng"].cpu())
        if len(state["rng"]) != self._world.size:
            torch.manual_seed(mix(state["rng"][0][0].tolist(), self._world.rank))
            randomness.seed_libraries(torch.initial_seed())
            return
        self.set_global_generators(
            state["rng"][self._world.rank], state["library_rng"][self._world.rank]
        )

    def global_generators(self) -> tuple[list[Tensor], dict[str, list[Any]]]:
        """Return the states of this rank's global generators, for `set_global_generators`."""
        states, device = [torch.get_rng_state()], self._world.device
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return states, randomness.library_state()

    def set_global_generators(
        self, states: list[Tensor], libraries: Mapping[str, list[Any]]
    ) -> None:
        """Put this rank's global generators back."""
        randomness.set_library_state(libraries)
        torch.set_rng_state(states[0].cpu())
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1].cpu(), self._world.device)


def plain(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DistributedDataParallel, DataParallel."""
    module = getattr(module, "_orig_mod", module)
    is_wrapped = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    return module.module if is_wrapped else module  # type: ignore[return-value]


def copied(state: Any) -> Any:
    """Return an independent copy of a state: equal containers, tensors in host memory."""
    return _mapped(
        state,
        lambda leaf: (
            leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
        ),
    )


def _mapped(state: Any, change: Callable[[Any], Any]) -> Any:
    """Return a state with `change(leaf)` for its leaves, in new containers."""
    if isinstance(state, Mapping):
        return with_values(state, lambda value: _mapped(value, change))
    if isinstance(state, list | tuple):
        make = getattr(type(state), "_make", type(state))  # a named tuple takes no list
        return make([_mapped(value, change) for value in state])
    return change(state)


def broadcast(state: Any, world: World) -> Any:
    """Return rank 0's state on every rank, its tensors in host memory.

    One by one: `World.tell` would hold all bytes at once on each rank's device.
    """
    if world.size == 1:
        return state
    tensors = list[Tensor]()

    def take_out(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return Tensor

    outline = world.tell(_mapped(state, take_out) if world.main else None)
    unsent = iter(tensors)

    def put_in(leaf: Any) -> Any:
        if leaf is not Tensor:
            return leaf
        # A copy: a view would be sent with all that it is a part of.
        return world.tell(next(unsent).detach().cpu().clone() if world.main else None)

    return _mapped(outline, put_in)


# ---- the file
def save(state: Mapping[str, Any], folder: Path) -> None:
    """Write a checkpoint. Raises `OSError` when the disk is full; the previous one then stays."""
    write_atomically(folder / CHECKPOINT, lambda file: torch.save(state, file), durable=True)


def load(folder: Path, explain: Callable[[str], object] = print) -> dict[str, Any] | None:
    """Return the checkpoint in `folder`, its tensors on the CPU; None without one, and after
    `explain` was called with why it is of no use. Such a file is set aside as `.damaged`.

    Raises `OSError` with its path if the disk or memory fails, which is no damage.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        with torch.serialization.safe_globals(NUMPY):
            state = torch.load(
                path, map_location="cpu", weights_only=True
            )  # runs no code of a file
    except Exception as error:  # a damaged archive raises many things; each means the same
        if memory.is_oom(error):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from error
        _read_through(path)
        unsupported = re.search(r"Unsupported \w+: .*?(?=\.? was not| Please)", str(error))
        kind = unsupported[0] if unsupported is not None else type(error).__name__
        reason = f"{CHECKPOINT} cannot be read ({kind})"
    else:
        if isinstance(state, dict):
            return cast("dict[str, Any]", state)
        reason = f"{CHECKPOINT} holds {type(state).__name__}, not a training"
    set_aside(folder)
    explain(reason)
    return None


def _read_through(path: Path) -> None:
    """Raise `OSError` if a file cannot be read; torch raises that for a damaged one too."""
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
