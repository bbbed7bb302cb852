"""Which modules of a process are the user's: those loaded from outside the environment."""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

PACKAGE = Path(__file__).resolve().parents[1]
_PATHS = sysconfig.get_paths()
_FOLDERS = [_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_FOLDERS += [*map(os.path.realpath, _FOLDERS), site.getusersitepackages(), str(PACKAGE)]
_ENVIRONMENT = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_users(file: str) -> bool:
    """Return whether a file is the user's: neither Python's, nor installed, nor of this package."""
    installed = any(part in file for part in _INSTALLED)
    return os.path.isabs(file) and not installed and not file.startswith(_ENVIRONMENT)


def loaded(package: str = "") -> dict[str, ModuleType]:
    """Return the user's modules in this process, by name.

    `package`: one that counts as the user's wherever it is installed.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        content = getattr(module, "__dict__", {})
        # A package without `__init__.py` has no file
        files = [content.get("__file__") or "", *list(content.get("__path__") or ())]
        file = next(filter(None, files), "")
        mine = name == package or name.startswith(f"{package}.") if package else False
        if not name.startswith(("__main__", "__mp_main__")) and (mine or is_users(str(file))):
            found[name] = module
    return found


def import_anew(name: str, package: str = "") -> dict[str, ModuleType]:
    """Import a module and all that it imports of the user's, as their files are now.

    Returns these modules by name. Modules of the program's that have these names are replaced; the
    others stay.
    """
    before = loaded(package)
    for other in before:
        del sys.modules[other]
    try:
        importlib.invalidate_caches()
        # bytecode tells contents apart by size and whole seconds, so that an edit can be missed
        with mock.patch.object(sys, "dont_write_bytecode", True):
            importlib.import_module(name)
        return loaded(package)
    except BaseException:
        for other in loaded(package):
            del sys.modules[other]
        raise
    finally:
        for other, module in before.items():
            sys.modules.setdefault(other, module)


def relative_paths(name: str, file: Path, root: Path) -> Iterator[Path]:
    """Yield the places where a module's copy needs its file: by folder, and by import."""
    if file.is_relative_to(root):
        yield file.relative_to(root)
    parts = Path(*name.split("."))
    yield parts / file.name if file.name.startswith("__init__.") else parts.parent / file.name
