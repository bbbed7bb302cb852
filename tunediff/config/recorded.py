"""Find the file that trained results: their own copy, whatever their journals name.

A folder of results may come from somebody else. To read it runs at most the file that its search,
comparison or training has in `workload/`, which commands announce.
"""

from __future__ import annotations

import functools
from pathlib import Path

from tunediff.config.code import FOLDER
from tunediff.config.files import read_yaml
from tunediff.config.knobs import ConfigError, refuse
from tunediff.config.workload import is_users

SEARCH, BASELINE, CONFIG = "search.yaml", "baseline.yaml", "config.yaml"
SIDES = ("A", "B")
"""Folders inside that of a comparison, each with a configuration."""


def own_file(config: Path, folder: Path) -> Path | None:
    """Return the user's file of a configuration of results; None: a shipped workload.

    Raises `ConfigError` for a file that is not in the `workload/` of that folder.
    """
    name = _workload(config, config.stat().st_mtime_ns)
    if not is_users(name.partition(":")[0]):
        return None
    outside = f"{config}: workload: {name} is not allowed; allowed: a file in {folder / FOLDER}"
    refuse(not _is_copy(config.parent / name, folder), outside)
    return config.parent / name


def _is_copy(file: Path, folder: Path) -> bool:
    return file.resolve().is_relative_to(folder.resolve() / FOLDER)


@functools.lru_cache(maxsize=64)  # every journal of a search asks
def _workload(config: Path, mtime_ns: int) -> str:
    return str(read_yaml(config).get("workload"))


def check_search(folder: Path) -> None:
    """Refuse a search folder that would run another file than its copy. Raises `ConfigError`."""
    own_file(folder / SEARCH, folder)
    base = folder / str(read_yaml(folder / SEARCH).get("base", BASELINE))
    if base.is_file():
        own_file(base, folder)


def trained_by(name: str, folder: Path) -> str:
    """Return the workload of a journal or checkpoint in `folder`, which may have moved.

    Raises `ConfigError` for a file other than that of the folder's search, comparison or training.
    """
    if not is_users(name):
        return name
    for root, configs in _declaring(folder):
        files = [own_file(config, config.parent) for config in configs]
        if not configs:  # a checkpoint that was copied, or a training that has just begun
            copy = root / FOLDER / name.rpartition(f"/{FOLDER}/")[2]
            files = [copy] if copy.is_file() and _is_copy(copy, root) else []
        for file in filter(None, files):
            if name.endswith(f"/{file.resolve().relative_to(root.resolve()).as_posix()}"):
                return str(file.absolute())
        if configs:
            break
    raise ConfigError(
        f"{folder}: workload: {name} is not allowed; allowed: the file of its own search or"
        " training"
    )


def _declaring(folder: Path) -> list[tuple[Path, list[Path]]]:
    """Return the result folders that a journal may belong to, with their configurations."""
    places = [(folder, [folder / CONFIG])]
    if folder.parent.name == "trials":
        search = folder.parent.parent
        names = (SEARCH, BASELINE, *(f"{side}/{CONFIG}" for side in SIDES))
        places.insert(0, (search, [search / name for name in names]))
    return [(root, [config for config in configs if config.is_file()]) for root, configs in places]
