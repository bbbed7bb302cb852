"""Finds a saved model by what a user calls it: a training, a search, an exported file, a pipeline of diffusers.

Finding reads configurations only; torch is imported when the weights are wanted, or when the configuration itself is
inside a checkpoint.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunediff import config as cfg
from tunediff.config import ConfigError, code
from tunediff.config.knobs import refuse
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.workloads.diffusion import diffusers_export

if TYPE_CHECKING:
    import torch

# What a training leaves (tunediff.training.weights and .state, which import torch).
WEIGHTS, _CHECKPOINT, _CONFIG = "weights.safetensors", record.CHECKPOINT, "config.yaml"


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model on disk."""

    config: Any  # of a pipeline of diffusers, data, model and process; the rest are defaults
    weights: Path  # the file that holds them
    kind: Literal["run", "weights", "diffusers"]
    """`run`: a training or a trial, finished or not; `weights`: a `.safetensors` file with its configuration;
    `diffusers`: a pipeline folder."""
    name: str  # for file names: `train-digits`, `night-t0003`, `best`
    folder: Path  # where results about it are written unless told otherwise

    def network(self, device: torch.device | str) -> Any:
        """The network with the weights that were evaluated, in evaluation mode, without gradients, in the order of
        memory that its configuration names. Raises `ConfigError` when the file is damaged or holds other weights.
        """
        import torch

        from tunediff.training import hardware
        from tunediff.training.weights import check_fit

        if (build := cfg.of(self.config).get_hook("network")) is None:
            raise ConfigError(f"{cfg.of(self.config).name}: has no function network(knobs), which builds its model")
        network, weights = build(self.config.knobs), self.state()
        check_fit(weights, network, str(self.weights))
        network.load_state_dict(weights)
        if hardware.faster_in_nhwc(network.to(device), self.config.memory.channels_last):
            network.to(memory_format=torch.channels_last)
        return network.eval().requires_grad_(False)

    def state(self) -> Any:
        """The weights that were evaluated, by name. Raises `ConfigError` when the file is damaged."""
        from tunediff.training.weights import read

        if self.kind == "diffusers":
            return diffusers_export.read_unet(self.weights.parent)[1]
        return read(self.weights) if self.weights.suffix == ".safetensors" else _inside(self.weights, "result")


def find_of(workload: str, purpose: str, what: str, storage: Path, trial: str | None = None) -> Saved:
    """As `find`, for a command that is for one of our workloads alone: tells by the name, and runs no user's file.

    `trial`: of the search that `what` names. Raises `ConfigError` for models of other workloads.
    """
    with cfg.shipped_only(f"{purpose} is for {workload}; allowed: {workload}"):
        if trial is not None:
            from tunediff import analysis, search_space
            from tunediff.analysis import evidence

            search = analysis.read(search_space.folder_of(what, storage))
            what = str(search.folder / "trials" / evidence.choose(search, trial).name)
        saved = find(what, storage)
    title = cfg.of(saved.config).title
    other = saved.config.schema.workload != workload
    refuse(other, f"{saved.name}: is a model of {title}; {purpose} is for {workload}")
    return saved


def find(what: str, storage: Path = text.STORAGE) -> Saved:
    """The model that `what` names, as a path or as a name in `storage`.

    - a training folder: its averaged weights, or while it is unfinished those of its checkpoint; `checkpoint.pt` itself
    - a search: its best trial; `NAME/t0003`: that trial
    - an exported `best.yaml` with `best.safetensors` beside it
    - a `.safetensors` file with a `.yaml` of the same stem or `config.yaml` beside it
    - a folder of diffusers: a pipeline, nested or flat

    Raises `ConfigError` saying what was looked for and which names are near.
    """
    named = [Path(what).expanduser(), storage / what]
    paths = [path for one in named for path in (one, one.parent / "trials" / one.name) if path.exists()]  # NAME/t0003
    for path in paths:
        if not path.is_dir():
            return _of_file(path)
        if (path / "search.yaml").is_file():
            from tunediff import analysis
            from tunediff.analysis import evidence

            best = evidence.choose(analysis.read(path.absolute()), None)
            return _of_run(path / "trials" / best.name)
        if any((path / name).is_file() for name in (record.JOURNAL, WEIGHTS, _CHECKPOINT)):
            return _of_run(path)
        if diffusers_export.is_pipeline(path):
            return _of_pipeline(path)
    if paths:
        raise ConfigError(
            f"{what}: no model in this folder; looked for a search (search.yaml), a training ({record.JOURNAL}, "
            f"{WEIGHTS}, {_CHECKPOINT}) and a pipeline of diffusers (model_index.json, config.json)"
        )
    names = list(_names(storage))
    near = difflib.get_close_matches(what, names, n=5, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names[:20]) or 'none'}"
    raise ConfigError(f"{what}: no such file or folder, and no training or search of that name in {storage}; {hint}")


def _names(storage: Path) -> Iterator[str]:
    for folder in sorted(path for path in storage.glob("*") if path.is_dir()):
        if (folder / "search.yaml").is_file():
            yield folder.name
            journals = sorted(folder.glob(f"trials/*/{record.JOURNAL}"))
            yield from (f"{folder.name}/{journal.parent.name}" for journal in journals)
        elif (folder / record.JOURNAL).is_file() or diffusers_export.is_pipeline(folder):
            yield folder.name


def _of_run(folder: Path) -> Saved:
    weights = next((folder / name for name in (WEIGHTS, _CHECKPOINT) if (folder / name).is_file()), None)
    if weights is None:
        if (known := record.read_trial(folder)) is not None and known.status not in (None, "ok"):
            raise ConfigError(f"{folder}: no weights: it ended as {known.status}, and only what ends as ok keeps them")
        raise ConfigError(f"{folder}: no weights yet; a training writes {_CHECKPOINT} at its first evaluation")
    if (known := record.read_trial(folder)) is not None:
        config = cfg.from_dict(cfg.nest(known.config), str(folder / record.JOURNAL))
    elif (folder / _CONFIG).is_file():
        config = cfg.load(folder / _CONFIG)
    elif weights.name == _CHECKPOINT:
        return _of_checkpoint(weights)
    else:
        raise ConfigError(f"{folder}: no configuration; looked for {record.JOURNAL} and {_CONFIG}")
    return Saved(config, weights, "run", _name_of_run(folder), folder)


def _name_of_run(folder: Path) -> str:
    place = folder.absolute()
    return f"{place.parent.parent.name}-{place.name}" if place.parent.name == "trials" else place.name


def _of_checkpoint(path: Path) -> Saved:
    content = _inside(path, "config")
    content["workload"] = code.near(content["workload"], path.absolute().parent)
    config = cfg.from_dict(content, str(path))
    return Saved(config, path, "run", _name_of_run(path.parent), path.parent)


def _of_file(path: Path) -> Saved:
    config, weights = path, path.with_suffix(".safetensors")
    if path.suffix == ".pt":
        return _of_checkpoint(path)
    if path.suffix == ".safetensors":
        if path.name == WEIGHTS and (path.parent / record.JOURNAL).is_file():
            return _of_run(path.parent)
        beside = [path.with_suffix(".yaml"), path.with_suffix(".yml"), path.parent / _CONFIG]
        if not (there := [candidate for candidate in beside if candidate.is_file()]):
            raise ConfigError(f"{path}: weights without a configuration; looked for {', '.join(map(str, beside))}")
        config = there[0]
    elif path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: no model; allowed: .yaml, .safetensors, {_CHECKPOINT} or a folder")
    elif not weights.is_file():
        raise ConfigError(f"{path}: a configuration without weights; looked for {weights}")
    return Saved(cfg.load(config), weights, "weights", weights.stem, weights.parent)


def _of_pipeline(folder: Path) -> Saved:
    values, default = diffusers_export.read_config(folder), diffusers_export.default()
    values["evaluation.steps"] = min(default.evaluation.steps, values["process.steps"])
    if values["data.image_size"] < 16:  # Inception says nothing about such images
        values["evaluation.extractor"] = "classifier"
    config = cfg.override(default, values, where=str(folder))
    return Saved(config, diffusers_export.weights_file(folder), "diffusers", folder.absolute().name, folder)


def _inside(path: Path, key: str) -> dict[str, Any]:
    from tunediff.training.weights import read

    content = read(path).get(key)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: is no checkpoint of a training; it has no {key}")
    return content
