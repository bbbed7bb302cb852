"""Check what the nodes of a cluster can do for a search: see its folder, import, read its data."""

from __future__ import annotations

import importlib.metadata
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines
from tunediff.tuning.resources import Machine

ANSWER_S = 180.0
"""Seconds for a node's answer; at first it unpacks this package and imports Ray's workers."""


def check_shared(folder: Path, machines: Iterable[Machine]) -> None:
    """Check that all nodes see the folder: each reads a new word. Raises `ConfigError`."""
    nonce, proof = uuid.uuid4().hex, folder / f".shared-{uuid.uuid4().hex[:8]}"
    proof.write_text(nonce)
    try:
        answers = _on_each(machines, _read, str(proof))
    finally:
        proof.unlink(missing_ok=True)
    refuse_unshared(
        folder, {machine: answer for machine, answer in answers.items() if answer != nonce}
    )


def refuse_unshared(folder: Path, answers: dict[Machine, object]) -> None:
    """Raise `ConfigError` if there are `answers`: of nodes that did not read the proof."""
    if answers:
        listed = "; ".join(f"{machine.name}: {answer}" for machine, answer in answers.items())
        raise ConfigError(
            f"--storage: {folder.parent} is not shared by all nodes ({listed}); put it on a disk"
            " that all nodes have at this path (NFS, Lustre, a volume), or leave these nodes out"
            " of the cluster"
        )


def check_packages(machines: Iterable[Machine]) -> None:
    """Check that each node imports what trains, with this torch. Raises `ConfigError`."""
    expected = _torch_version()
    answers = _on_each(machines, _import_packages)
    if differing := {machine: answer for machine, answer in answers.items() if answer != expected}:
        listed = "; ".join(
            f"node {machine.name}: {answer}" for machine, answer in differing.items()
        )
        allowed = f"nodes with all dependencies of tunediff, and {expected} as here"
        raise ConfigError(f"--address: {listed} is not allowed; allowed: {allowed}")


def check_files(config: Lines, evaluates: bool, machines: Iterable[Machine]) -> None:
    """Check that each node has a trial's data and weights. Raises `ConfigError`."""
    answers = _on_each(machines, _check_files, config, evaluates)
    if lacking := {machine: answer for machine, answer in answers.items() if answer != ""}:
        raise ConfigError(
            "; ".join(f"node {machine.name}: {answer}" for machine, answer in lacking.items())
        )


def _on_each(
    machines: Iterable[Machine], function: Callable[..., str], *args: Any
) -> dict[Machine, str]:
    """Return what a function returns on each node, or why it did not."""
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    answers = {
        machine: task.options(label_selector={"ray.io/node-id": machine.id}).remote(*args)
        for machine in machines
    }
    return {machine: answer_text(answer) for machine, answer in answers.items()}


def answer_text(answer: Any) -> str:
    try:
        return str(ray.get(answer, timeout=ANSWER_S))
    except GetTimeoutError:
        return f"no answer within {ANSWER_S:.0f} s"
    except RayError as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        return error.strerror or str(error)


def _import_packages() -> str:
    """Import what a worker imports; return its torch. Raises for a missing package."""
    import torchvision  # noqa: F401

    import tunediff.tuning.worker  # noqa: F401

    return _torch_version()


def _torch_version() -> str:
    """Return the version of torch, without its build: a node without a GPU may have another one."""
    return f"torch {importlib.metadata.version('torch').partition('+')[0]}"


def _check_files(plain: Lines, evaluates: bool) -> str:
    try:
        config = cfg.from_dict(plain, "baseline")
        if (check := cfg.of(config).get_hook("check_files")) is not None:
            check(config.knobs, evaluates)
    except ConfigError as error:
        return str(error)
    return ""
