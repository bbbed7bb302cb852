"""Find a saved model by what a user calls it: a training, a search, an exported file.

Finding reads configurations only; torch is imported when the weights are read, or when the
configuration itself is inside a checkpoint.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.core import remote, text
from tunediff.core import trial_record as record
from tunediff.core.outcomes import Status
from tunediff.experiment.model import FILE, is_search

if TYPE_CHECKING:
    import torch

# What a training leaves (tunediff.training.weights and .state, which import torch).
WEIGHTS, CONFIG = "weights.safetensors", "config.yaml"
LACKS = {
    "sample_images": "generate images (it has no function sample_images)",
    "write_pipeline": "write another library's files",
}
"""What a workload without a hook does not do."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model on disk."""

    config: Any
    weights: Path
    """The file that holds them."""
    kind: str
    """`run`: a training or trial; `weights`: a `.safetensors` file with its configuration."""
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

        from tunediff.training import adapters, judging
        from tunediff.training.weights import check_fit

        weights = self.state()
        if (build := cfg.of(self.config).get_hook("network")) is None:
            network = judging.built(self.config, weights)
        else:
            network = build(self.config.knobs)
            check_fit(weights, network, str(self.weights))
            adapters.note_base(network)
            adapters.put_into(network, weights)
        if self.config.memory.channels_last:
            network.to(memory_format=torch.channels_last)
        return network.to(device).eval().requires_grad_(False)

    def state(self) -> Any:
        """Return the evaluated weights by name. Raises `ConfigError` for a damaged file."""
        from tunediff.training.weights import read

        if self.weights.suffix == ".safetensors":
            return read(self.weights)
        return _from_checkpoint(self.weights, "result")

    def weights_digest(self) -> str:
        """Return the sha256 of the file of weights."""
        with open(self.weights, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def find(what: str, storage: Path = text.STORAGE) -> Saved:
    """Return the model that `what` names, as a path or as a name in `storage`.

    - a training folder: its averaged weights, or while it is unfinished those of its checkpoint
    - a search: its best trial; `NAME/t0003`: that trial
    - an exported `best.yaml` with `best.safetensors` beside it

    Raises `ConfigError` saying what was looked for and which names are near.
    """
    paths = list[Path]()
    for name in (Path(what).expanduser(), storage / what):
        if (place := remote.storage_and_run(name)) is not None:
            remote.pull(place[1])
        in_search = name.parent / "trials" / name.name  # NAME/t0003
        paths += [path for path in (name, in_search) if path.exists()]
    for path in paths:
        if not path.is_dir():
            return _of_file(path)
        if is_search(path):
            from tunediff.analysis import evidence, read

            best = evidence.choose(read(path.absolute()), None)
            return _of_run(path / "trials" / best.name)
        if any((path / name).is_file() for name in (record.JOURNAL, WEIGHTS, record.CHECKPOINT)):
            return _of_run(path)
    if paths:
        empty = f"no model in this folder; looked for a search ({FILE}) and a training"
        files = f"{record.JOURNAL}, {WEIGHTS}, {record.CHECKPOINT}"
        raise ConfigError(f"{what}: {empty} ({files})")
    names = list(_names(storage))
    hint = f"there are: {', '.join(names[:20]) or 'none'}"
    if near := difflib.get_close_matches(what, names, n=5, cutoff=0.5):
        hint = f"did you mean {' or '.join(near)}?"
    missing = f"no such file or folder, and no training or search of that name in {storage}"
    raise ConfigError(f"{what}: {missing}; {hint}")


def find_with_hook(
    hook: str,
    purpose: str,
    what: str,
    storage: Path,
    trial: str | None = None,
) -> Saved:
    """Find a model for the command `purpose`, which needs this hook of its workload.

    `trial`: of the search that `what` names. Raises `ConfigError` without the hook.
    """
    if trial is not None:
        from tunediff import analysis, search_space
        from tunediff.analysis import evidence

        search = analysis.read(search_space.folder_of(what, storage))
        what = str(search.folder / "trials" / evidence.choose(search, trial).name)
    saved = find(what, storage)
    workload = cfg.of(saved.config)
    if workload.get_hook(hook) is None:
        shipped = ", ".join(cfg.shipped_hooks(hook))
        lacks = f"which does not {LACKS[hook]}; {purpose} is for {shipped}"
        raise ConfigError(f"{saved.name}: is a model of {workload.title}, {lacks}")
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
    """Return a training folder's model, from journal, config.yaml or checkpoint."""
    remote.pull(folder, heavy=True)
    trial = record.read_trial(folder)
    files = [folder / name for name in (WEIGHTS, record.CHECKPOINT)]
    weights = next((file for file in files if file.is_file()), None)
    if weights is None:
        why = f"no weights yet; a training writes {record.CHECKPOINT} at its first evaluation"
        if trial is not None and trial.status not in (None, Status.OK):
            why = f"no weights: it ended as {trial.status}, and only what ends as ok keeps them"
        raise ConfigError(f"{folder}: {why}")
    if trial is not None:
        config = cfg.from_dict(cfg.nest(trial.config), str(folder / record.JOURNAL))
    elif (folder / CONFIG).is_file():
        config = cfg.load(folder / CONFIG)
    else:
        raise ConfigError(f"{folder}: no configuration; looked for {record.JOURNAL} and {CONFIG}")
    return Saved(config, weights, "run", _name_of_run(folder), folder)


def _name_of_run(folder: Path) -> str:
    folder = folder.absolute()
    search = f"{folder.parent.parent.name}-" if folder.parent.name == "trials" else ""
    return f"{search}{folder.name}"


def _of_file(path: Path) -> Saved:
    """Return the model of a configuration with its weights beside it."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: no model; allowed: a folder, or .yaml with its weights beside")
    if not (weights := path.with_suffix(".safetensors")).is_file():
        raise ConfigError(f"{path}: a configuration without weights; looked for {weights}")
    return Saved(cfg.load(path), weights, "weights", weights.stem, weights.parent)


def _from_checkpoint(path: Path, key: str) -> dict[str, Any]:
    """Return an entry of a checkpoint. Raises `ConfigError` where it is none."""
    from tunediff.training.weights import read

    content = read(path).get(key)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: is no checkpoint of a training; it has no {key}")
    return content
