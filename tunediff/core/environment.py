"""The machine and the software that a measurement depends on."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import psutil

from tunediff.core import machine

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that say nothing about the configuration that met them."""


_LADDERS = (
    ("avx2", "avx512f", "avx512_fp16", "avx512_bf16"),
    ("amx_tile", "amx_fp16", "amx_bf16"),
    ("asimd", "sve", "sve2"),
    ("bf16", "svebf16"),
)
"""Instruction sets of CPUs that torch computes with, as /proc/cpuinfo names them; the last of each says most."""
_AFTERWARDS = ("analysis", "doctor", "profiling", "report")
"""Packages inside tunediff that no measurement of a trial depends on."""


class Environment(TypedDict):
    """Hardware and versions that a measurement depends on."""

    python: str
    system: str
    cpu: str
    cpu_cores: int | None
    usable_cores: int | None
    """What this process may use of them."""
    cpu_features: list[str]
    """Instruction sets that torch computes with: processors of one name may differ in them."""
    gpus: list[str]
    """`NVIDIA H200, 700.00 W, 143771 MiB`: name, power limit and memory of each, as nvidia-smi says."""
    memory_gib: float
    versions: dict[str, str]
    """Of packages, by name."""
    code: str
    """12 hex digits that are equal exactly for equal sources and shipped weights of what trains and measures here."""


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
        "usable_cores": machine.cores(),
        "cpu_features": _cpu_features(),
        "gpus": _gpus(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "versions": versions,
        "code": _code(Path(__file__).parents[1]),
    }


def hardware(known: Mapping[str, Any]) -> str:
    """What computed, from the environment of a trial: `NVIDIA H200 (700 W)`, `AMD EPYC (avx512_bf16)`; '' if unknown.

    The power limit of a GPU and the instruction sets of a CPU decide about its speed, and its name does not tell them.
    """
    device, features, gpus = known.get("device"), _words(known, "cpu_features"), _words(known, "gpus")
    if device is None:
        return ""
    if device == "cpu":
        name = known.get("cpu", "CPU")
        about = [reached[-1] for ladder in _LADDERS if (reached := [one for one in ladder if one in features])]
    else:
        name, lines = device, [[part.strip() for part in line.split(",")] for line in gpus]
        limits = dict.fromkeys(line[1] for line in lines if line[0] == device and len(line) > 1)
        about = [re.sub(r"\.0+ W$", " W", limit) for limit in limits]
    return f"{name} ({', '.join(about)})" if about else str(name)


def differences(there: Mapping[str, Any], device: str) -> list[str]:
    """Why what was measured `there`, in the environment of a trial, cannot be compared with what is measured here.

    `device`: "cpu" or "cuda", what trains here. Each in words: `torch 2.14 there, 2.15 here`.
    """
    ours, theirs = _decisive({**describe(), "device": device}, device), _decisive(there, device)
    return [f"{what} {theirs[what]} there, {ours[what]} here" for what in ours if theirs[what] != ours[what]]


def _decisive(known: Mapping[str, Any], device: str) -> dict[str, str]:
    """What two measurements must have in common to be comparable, by what it is called."""
    kind = {"cpu": "a CPU", None: "unknown"}.get(known.get("device"), "a GPU")
    facts = {"trained on": kind, "CPU": known.get("cpu"), "CPU cores": known.get("usable_cores")}
    facts |= {"instruction sets": " ".join(_words(known, "cpu_features"))}
    facts |= {"GPU": "; ".join(sorted(set(_words(known, "gpus"))))} if device != "cpu" else {}
    versions = known.get("versions")
    facts |= {"torch": versions.get("torch") if isinstance(versions, dict) else None}
    facts |= {"tunediff's code": known.get("code")}
    return {what: str(value or "unknown") for what, value in facts.items()}


def _words(known: Mapping[str, Any], name: str) -> list[str]:
    """A list of a record, which may be of an earlier version, or a stranger's."""
    value = known.get(name)
    return [str(one) for one in value] if isinstance(value, list) else []


def _cpu_name() -> str:
    match = re.search(r"model name\s*:\s*(.+)", _cpuinfo())
    return match.group(1).strip() if match else platform.processor() or "unknown"


def _cpu_features() -> list[str]:
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _cpuinfo(), re.MULTILINE)
    there = set(match.group(1).split()) if match else set()
    return [feature for ladder in _LADDERS for feature in ladder if feature in there]


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _gpus() -> list[str]:
    if (command := machine.nvidia_smi()) is None:
        return []
    query = [command, "--query-gpu=name,power.limit,memory.total", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no driver, or one that hangs
        return []
    return [line.strip() for line in said.splitlines() if line.strip()]


def _code(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.safetensors")]):
        if (relative := path.relative_to(package)).parts[0] not in _AFTERWARDS:
            digest.update(repr((relative.as_posix(), path.read_bytes())).encode())
    return digest.hexdigest()[:12]
