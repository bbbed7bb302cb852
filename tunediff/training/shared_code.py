"""Share torch.compile's code between trials, and charge each what it costs alone.

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
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core import environment
from tunediff.core.clock import Clock
from tunediff.core.files import write_text
from tunediff.experiment import model as experiment

FOLDER = ".compiled"
"""Folder of a search; the point hides it from what is copied to an address."""
COST = "cold.json"
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables that say where compiled code is looked for, and the folders that they name."""
NOT_COMPILED = ("seed", "evaluation.", "loader.workers", "loader.prefetch", "loader.pin_memory",
                "loader.non_blocking")  # fmt: skip
"""Knobs that no compiled code depends on."""


def folder_of(trial: Path) -> Path:
    """Return the folder of the code that a trial shares with all others of its search, confirming
    runs included: their folders lie in the search's. In a comparison it is that of its pair: what a
    side once took to compile would be in all of its pairs: a difference to the test."""
    search = trial.parents[1]
    if experiment.is_comparison(search):
        return search / FOLDER / f"pair{int(trial.name[1:]) // 2}"
    while experiment.is_search(search.parent):
        search = search.parent
    return search / FOLDER


def key(model: nn.Module, config: Systems) -> str:
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
        if self._root is None:
            return
        folder = self._root / key
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:  # a full disk is said where something is lost by it
            return
        self._cold_s = _cost(folder)
        if self._cold_s is None:
            self._lock = _locked(folder / "lock")
            self._cold_s = _cost(folder)  # it may have been written meanwhile
            if self._lock is None and self._cold_s is None:
                return
        self._folder = folder
        if self._cold_s is None:
            for name in CACHES.values():  # of a trial that was killed
                shutil.rmtree(folder / name, ignore_errors=True)
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


def _locked(path: Path) -> int | None:
    """Return a descriptor of a file locked until it is closed; None: it cannot be."""
    try:
        file = os.open(path, os.O_CREAT | os.O_WRONLY)
    except OSError:  # a full disk is said where something is lost by it
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
