"""Find search files: shipped ones, those of searches, and workloads that stand for one."""

from __future__ import annotations

from pathlib import Path

from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.config.knobs import nearest
from tunediff.core import remote, text
from tunediff.experiment import model

_PACKAGE = Path(__file__).resolve().parents[1]
# In a checkout the search files lie beside the package; an installed wheel carries them inside it.
SHIPPED = next(
    (d for d in (_PACKAGE.parent / "search_spaces", _PACKAGE / "search_spaces") if d.is_dir()),
    _PACKAGE,
)
DEFAULT = "digits.yaml"


def find(name: str | None) -> Path:
    """Return the search file that a user names: a path, or a shipped one's name (`cifar10`).

    A workload's file or module stands for a search file that contains only its name.
    """
    if name is None:
        return SHIPPED / DEFAULT
    if is_workload(Path(name)):
        return Path(name)
    for path in (Path(name), SHIPPED / name, SHIPPED / f"{name}.yaml"):
        if path.is_file():
            return path
    if Path(name).is_dir():
        hint = f"to learn the images in it: {text.command('search', 'images', f'data.path={name}')}"
        if model.is_search(Path(name)):
            hint = f"its search file is {Path(name) / model.FILE}"
        raise ConfigError(f"{name}: is a folder, not a search file; {hint}")
    if Path(name).exists():  # a device: reading it says what is wrong
        return Path(name)
    hint = nearest(name.removesuffix(".yaml"), shipped()).replace("allowed:", "shipped:")
    raise ConfigError(f"{name}: no such search file; {hint}")


def shipped() -> list[str]:
    """Return the names of the shipped search files: `digits`, `studies/ladder`, …"""
    return sorted(
        str(path.relative_to(SHIPPED).with_suffix("")) for path in SHIPPED.rglob("*.yaml")
    )


def is_workload(path: Path) -> bool:
    """Return whether a path is the file or module of a workload, perhaps with a preset's name."""
    return cfg.is_users(str(path).partition(":")[0])


def folder_of(name: str, storage: Path) -> Path:
    """Return the absolute folder of an experiment that a user names: inside `storage`, or as a
    path.

    What is new at a storage's address is fetched, without weights. Raises `ConfigError`.
    """
    remote.pull(storage / name)
    places = (storage / name, Path(name))
    return next(
        (place for place in places if model.kind_of(place) is not None), places[0]
    ).absolute()


def of_search(folder: Path) -> Path:
    """Return the file in the folder of a search.

    Raises `ConfigError` if there is none, with a list.
    """
    if not model.is_search(folder):
        searches = sorted(path.name for path in folder.parent.glob("*/") if model.is_search(path))
        missing = f"{folder.name or folder}: no such search in {folder.parent}"
        others = ", ".join(searches) or "none; --storage names another folder"
        raise ConfigError(f"{missing}; there are: {others}")
    return folder / model.FILE
