"""The machine and the software that a measurement depends on."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import TypedDict

import psutil

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that say nothing about the configuration that met them."""


class Environment(TypedDict):
    """Hardware and versions that a measurement depends on."""

    python: str
    system: str
    cpu: str
    cpu_cores: int | None
    memory_gib: float
    versions: dict[str, str]
    """Of packages, by name."""


def unwritable(folder: Path) -> str | None:
    """Why nothing of use can be written to the folder; None: it can. A disk with under 8 MiB left counts as full."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        with open(probe, "wb") as file:
            file.write(bytes(8 * 2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


@functools.lru_cache(maxsize=1)
def describe() -> Environment:
    """Hardware and versions that a measurement depends on."""
    packages = ("tunediff", "torch", "torchvision", "ray", "optuna", "torch-fidelity", "numpy")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "versions": versions,
    }


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or "unknown"
