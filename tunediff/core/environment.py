"""Describe hardware and software that a measurement depends on; compare descriptions."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tunediff.core import machine

RAY_BEFORE = "TUNEDIFF_RAY_BEFORE"
"""Set where tunediff runs Ray: the variables of Ray that the user had set before, as JSON."""


@contextlib.contextmanager
def restored(names: Iterable[str]) -> Iterator[None]:
    """Restore these variables at the end. Others stay as they are: what a training sets is its own,
    and clearing all of them for a moment would meet threads that read one."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def of_user() -> dict[str, str]:
    """Return the environment of this process without what tunediff has set for its own Ray.

    A training that uses Ray itself would join that cluster, and wait for the cores that it holds.
    """
    if RAY_BEFORE not in os.environ:
        return dict(os.environ)
    before: dict[str, str] = json.loads(os.environ[RAY_BEFORE])
    others = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", RAY_BEFORE))}
    return others | before


_LADDERS = (
    ("avx2", "avx512f", "avx512_fp16", "avx512_bf16"),
    ("amx_tile", "amx_fp16", "amx_bf16"),
    ("asimd", "sve", "sve2"),
    ("bf16", "svebf16"),
)
"""Instruction sets that torch uses, as in /proc/cpuinfo; the best one decides the speed."""
_AFTERWARDS = ("analysis", "doctor", "profiling", "report")
"""Packages inside tunediff that no measurement of a trial depends on."""


def describe() -> dict[str, Any]:
    """Return what a measurement depends on: the hardware and the versions of this machine."""
    # A later call may use another part of the machine.
    return {**describe_machine(), "usable_cores": machine.cores()}


@functools.lru_cache(maxsize=1)
def describe_machine() -> dict[str, Any]:
    packages = ("tunediff", "torch", "torchvision", "ray", "optuna", "torch-fidelity", "numpy")
    versions = dict.fromkeys(packages, "not installed")
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cpu, features = _cpu()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu,
        "cpu_cores": psutil.cpu_count(),
        # processors of the same name may differ in them
        "cpu_features": features,
        "gpus": machine.cards(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "versions": versions,
        "code": code_digest(Path(__file__).parents[1]),
    }


def hardware(environment: Mapping[str, Any]) -> str:
    """Return what a trial ran on: `NVIDIA H200 (700 W)`, `AMD EPYC (avx512_bf16)`; '' if unknown.

    The power limit of a GPU and the instruction sets of a CPU determine its speed, not its name.
    """
    device = environment.get("device")
    if device is None:
        return ""
    if device == "cpu":
        name, features = environment.get("cpu", "CPU"), environment.get("cpu_features", ())
        available = [[feature for feature in ladder if feature in features] for ladder in _LADDERS]
        details = [ladder[-1] for ladder in available if ladder]
    else:
        name = device
        cards = [line.split(", ") for line in environment.get("gpus", ())]
        limits = dict.fromkeys(card[1] for card in cards if card[0] == device and len(card) > 1)
        details = [re.sub(r"\.0+ W$", " W", limit) for limit in limits]
    return f"{name} ({', '.join(details)})" if details else str(name)


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation."""
    return f"pip install '.[{extra}]' in the folder of tunediff"


def _cpu() -> tuple[str, list[str]]:
    """Return the processor's name and those of its instruction sets that matter."""
    content = machine.CPUINFO.read_text()
    name = re.search(r"model name\s*:\s*(.+)", content)
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", content, re.MULTILINE)
    available = set(flags.group(1).split()) if flags else set()
    features = [feature for ladder in _LADDERS for feature in ladder if feature in available]
    return name.group(1).strip() if name else platform.processor() or "unknown", features


def code_digest(package: Path) -> str:
    """Return a digest of a package's sources and weights that measurements depend on."""
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.safetensors")]):
        if (relative := path.relative_to(package)).parts[0] not in _AFTERWARDS:
            digest.update(repr((relative.as_posix(), path.read_bytes())).encode())
    return digest.hexdigest()[:12]
