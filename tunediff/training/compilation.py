"""torch.compile as the section `compile` asks for it, and its code, which trials share.

The first trial of a kind compiles into an empty folder, and its seconds are kept there. Further
ones find the code there, and their clocks are moved on by what they were spared: a configuration
that is compiled has the same seconds whoever comes first, and the search does not wait for them
again. A trial whose code turns out not to be there compiles it, and pays that.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.config.knobs import refuse
from tunediff.config.systems import CUDA_GRAPHS, Compile
from tunediff.core import environment
from tunediff.core.clock import Clock
from tunediff.core.files import write_text
from tunediff.experiment import model as experiment


class Compilation:
    """torch.compile of one training, and what it has made of it."""

    def __init__(self, options: Compile) -> None:
        self._options, self._before = options, counted()

    def apply(
        self, model: nn.Module, network: nn.Module, blocks: type[nn.Module] | None
    ) -> nn.Module:
        """Compile `model`; `network`: the plain one in it; `blocks`: its repeated modules.

        Raises `ConfigError` where blocks are to be compiled and the network has none of that class.
        """
        if not self._options.active:
            return model
        mode, dynamic = self._options.mode, self._options.dynamic
        if self._options.scope == "model" or blocks is None:
            compiled = torch.compile(model, mode=mode, dynamic=dynamic or None)
            return compiled  # type: ignore[return-value]
        modules = [module for module in network.modules() if isinstance(module, blocks)]
        why = "the model has no blocks that trial.prepare(model, blocks=…) names; allowed: model"
        refuse(not modules, f"compile.scope: 'blocks' is not allowed: {why}")
        # Blocks share their code, and torch compiles a function for 8 kinds of calls only, then
        # runs it as it is: here there may be as many as blocks, trained and judged, with and
        # without gradients.
        torch._dynamo.config.recompile_limit = max(8, 4 * len(modules))
        torch._dynamo.config.accumulated_recompile_limit = max(256, 4 * len(modules))
        for block in modules:
            # By itself torch would take the second block's other shape for a sign that shapes vary.
            block.compile(mode=mode, dynamic=dynamic)  # in place: names and state stay
        return model

    def detach(self, loss: Tensor) -> Tensor:
        """Return a detached loss to read later: a CUDA graph's next run overwrites it."""
        return loss.detach().clone() if self._options.mode in CUDA_GRAPHS else loss.detach()

    def warm_ups(self, device: str) -> int:
        """Return the steps until all is compiled: a CUDA graph's second run records it."""
        return 3 if device == "cuda" and self._options.mode in CUDA_GRAPHS else 1

    def facts(self) -> dict[str, Any]:
        """Return `compiled_graphs` and `graph_breaks` as in a `Point`; {}: nothing is compiled."""
        if not self._options.active:
            return {}
        return {name: count - self._before[name] for name, count in counted().items()}


def counted() -> dict[str, int]:
    """Return how many graphs torch.compile has made in this process, and how often one broke."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = dynamo.counters if dynamo is not None else {"stats": {}, "graph_break": {}}
    breaks = sum(counters["graph_break"].values())
    return {"compiled_graphs": counters["stats"].get("unique_graphs", 0), "graph_breaks": breaks}


@contextlib.contextmanager
def cold_cache(options: Compile) -> Iterator[None]:
    """Hide earlier trainings' compiled code on disk: compiling takes as long as at first."""
    if not options.active:
        yield
        return
    prefix = "tunediff-compile-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        triton = os.path.join(folder, "triton")
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": triton}
        with environment.restored(caches):
            os.environ |= caches
            yield


# ---- the code that trials share
FOLDER = ".compiled"
"""Folder of a search; the point hides it from what is copied to an address."""
COST = "cold.json"
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables that say where compiled code is looked for, and the folders that they name."""
NOT_COMPILED = ("seed", "evaluation.", "loader.workers", "loader.prefetch", "loader.pin_memory",
                "loader.non_blocking")  # fmt: skip
"""Knobs that no compiled code depends on."""


def code_folder(trial: Path) -> Path:
    """Return the folder of the code that a trial shares with all others of its search, confirming
    runs included: their folders lie in the search's. In a comparison it is that of its pair: what a
    side once took to compile would be in all of its pairs: a difference to the test."""
    search = trial.parents[1]
    if experiment.is_comparison(search):
        return search / FOLDER / f"pair{int(trial.name[1:]) // 2}"
    while experiment.is_search(search.parent):
        search = search.parent
    return search / FOLDER


def code_key(model: nn.Module, config: Systems) -> str:
    """Return what decides how long it takes to compile: network, shapes, knobs, torch, device.

    Knobs that are fractions (rates, decays, probabilities) do not count, unless the network shows
    them: torch compiles the same code for each, or else finds none.
    """
    parameters = [(name, one.shape, one.dtype) for name, one in model.named_parameters()]
    device = next(model.parameters()).device if parameters else torch.device("cpu")
    knobs = {
        name: value
        for name, value in cfg.flat(config).items()
        if not isinstance(value, float) and not name.startswith(NOT_COMPILED)
    }
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = f"{environment.describe()['cpu']}, {torch.get_num_threads()} threads"
    about = (torch.__version__, machine, config.schema.version, knobs, repr(model), parameters)
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


class SharedCode:
    """The compiled code of a search's trials, for one of them; `root`: None shares nothing."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._folder: Path | None = None
        self._lock: int | None = None
        self._cold_s: float | None = None

    def use(self, key: str) -> None:
        """Compile from now on with what others of this key have left, or first of all.

        While another trial is the first one, this one finds nothing, as without sharing.
        """
        if self._root is not None:
            # Another one has the lock, or the disk is full, which is said where something is lost.
            with contextlib.suppress(OSError):
                self._take(self._root / key)

    def _take(self, folder: Path) -> None:
        """Look for compiled code in a folder from now on. Raises `OSError`."""
        folder.mkdir(parents=True, exist_ok=True)
        if _cost(folder) is None:
            self._lock = os.open(folder / "lock", os.O_CREAT | os.O_WRONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._cold_s = _cost(folder)  # it may have been written meanwhile
        if self._cold_s is None:
            for name in CACHES.values():  # of a trial that was killed
                shutil.rmtree(folder / name, ignore_errors=True)
        self._folder = folder
        os.environ |= {variable: str(folder / name) for variable, name in CACHES.items()}

    def charge(self, clock: Clock, resumed: bool) -> Mapping[str, float]:
        """Keep what compiling has cost if this trial was the first, else charge it the same; return
        facts for the journal. `resumed`: a trial that goes on has been charged already."""
        if self._folder is None:
            return {}
        own_s = clock.seconds["compile"]
        if self._cold_s is None:
            with contextlib.suppress(OSError):  # a full disk: the next one is the first
                write_text(self._folder / COST, json.dumps({"compile_s": own_s}))
            self.close()
            return {}
        spared_s = 0.0 if resumed else max(0.0, self._cold_s - own_s)
        clock.add("compile", spared_s)
        return {"compile_own_s": own_s, "compile_spared_s": spared_s}

    def close(self) -> None:
        """Let others be the first, if this trial has not become it."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked process may have it open too
            os.close(self._lock)
            self._lock = None


def _cost(folder: Path) -> float | None:
    """Return the seconds of the first trial; None: there was none."""
    try:
        return float(json.loads((folder / COST).read_text())["compile_s"])
    except (OSError, ValueError, KeyError):
        return None
