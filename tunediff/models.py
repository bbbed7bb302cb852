"""Find a saved model by what a user calls it: a training, a search, an exported file.

Finding reads configurations only; torch is imported when the weights are read, or when the
configuration itself is inside a checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.config.knobs import nearest
from tunediff.core import files, remote
from tunediff.core import trial_record as record
from tunediff.core.options import allow
from tunediff.experiment.model import is_search

if TYPE_CHECKING:
    import torch

WEIGHTS = "weights.safetensors"
"""What a training leaves (`tunediff.training.weights`, which imports torch)."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model on disk."""

    config: Any
    weights: Path
    """The file that holds them."""
    name: str
    """For file names: `train-digits`, `night-t0003`, `best`."""
    folder: Path
    """Where results about it are written by default."""

    def network(self, device: torch.device | str) -> Any:
        """Return the network with the evaluated weights, in evaluation mode, without gradients.

        A file without `network(knobs)` builds it in its `train`, which gets no batch. Its memory
        format is the one that the configuration names. Raises `ConfigError` when the file is
        damaged or holds other weights.
        """
        import torch

        from tunediff.training import judging
        from tunediff.training.weights import note_base, put_into, refused

        weights = self.state()
        if (build := cfg.of(self.config).get_hook("network")) is None:
            network = judging.built(self.config, weights)
        else:
            network = build(self.config.knobs)
            note_base(network)
            with refused(str(self.weights)):
                put_into(network, weights)
        if self.config.memory.channels_last:
            network.to(memory_format=torch.channels_last)
        return network.to(device).eval().requires_grad_(False)

    def state(self) -> Any:
        """Return the evaluated weights by name. Raises `ConfigError` for a damaged file."""
        from tunediff.training.weights import read

        content = read(self.weights)
        return content if self.weights.suffix == ".safetensors" else content["result"]


def find(what: str, storage: Path = files.STORAGE) -> Saved:
    """Return the model that `what` names, as a path or as a name in `storage`.

    - a training folder: its averaged weights, or while it is unfinished those of its checkpoint
    - a search: its best trial; `NAME/t0003`: that trial
    - an exported `best.yaml` with `best.safetensors` beside it

    Raises `ConfigError` saying what was looked for and which names are near.
    """
    for name in (Path(what).expanduser(), storage / what):
        if (place := remote.storage_and_run(name)) is not None:
            remote.pull(place[1])
        for path in (name, name.parent / "trials" / name.name):  # NAME/t0003
            if path.is_file():
                weights = path.with_suffix(".safetensors")
                fits = path.suffix in (".yaml", ".yml") and weights.is_file()
                allow(fits, what, path, "a .yaml file with its .safetensors file beside it")
                return Saved(cfg.load(path), weights, weights.stem, weights.parent)
            if is_search(path):
                from tunediff.analysis import evidence, read

                best = evidence.choose(read(path.absolute()), None)
                return _of_run(path / "trials" / best.name)
            if (path / record.JOURNAL).is_file():
                return _of_run(path)
    raise ConfigError(
        f"{what}: no training, search or exported file of that name in {storage};"
        f" {nearest(what, list(_names(storage)))}"
    )


def find_with_hook(hook: str, purpose: str, what: str, storage: Path) -> Saved:
    """Find a model for the command `purpose`, which needs this hook of its workload. Raises
    `ConfigError` without it."""
    saved = find(what, storage)
    title = cfg.of(saved.config).title
    allowed = f"for {purpose} one of a workload with a function {hook}; this is of {title}"
    allow(cfg.of(saved.config).get_hook(hook) is not None, saved.name, title, allowed)
    return saved


def _names(storage: Path) -> Iterator[str]:
    """Yield the names of all models in `storage`, those of trials after their search."""
    for folder in sorted(path for path in storage.glob("*") if path.is_dir()):
        if is_search(folder):
            yield folder.name
            for journal in sorted(folder.glob(f"trials/*/{record.JOURNAL}")):
                yield f"{folder.name}/{journal.parent.name}"
        elif (folder / record.JOURNAL).is_file():
            yield folder.name


def _of_run(folder: Path) -> Saved:
    """Return the model of a training or trial, as its journal and its weights say."""
    remote.pull(folder, heavy=True)
    trial = record.read_trial(folder)
    files = [folder / name for name in (WEIGHTS, record.CHECKPOINT)]
    weights = next((file for file in files if file.is_file()), None)
    if trial is None or weights is None:
        status = trial.status if trial is not None else None
        raise ConfigError(
            f"{folder}: no weights (status: {status or 'unfinished'}); a training writes"
            f" {record.CHECKPOINT} at its first evaluation, and keeps {WEIGHTS} if it ends as ok"
        )
    config = cfg.from_dict(cfg.nest(trial.config), str(folder / record.JOURNAL))
    at = folder.absolute()
    search = f"{at.parent.parent.name}-" if at.parent.name == "trials" else ""
    return Saved(config, weights, f"{search}{at.name}", folder)
