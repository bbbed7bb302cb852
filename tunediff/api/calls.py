"""What every call from Python has in common: its errors, what it leaves of the process, and its
arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tunediff import cli
from tunediff.config import ConfigError
from tunediff.config.files import as_word
from tunediff.core import machine, remote, text
from tunediff.core.errors import TunediffError
from tunediff.core.signals import terminable

Knobs = str | Mapping[str, Any]
"""Knobs that are set: `knob=value` as on a command line, or values by dotted name."""
T = TypeVar("T")
_SET_BY_MACHINE = (machine.PART, machine.VISIBLE, "OMP_NUM_THREADS")


@contextlib.contextmanager
def called(cluster: bool = False) -> Iterator[None]:
    """Leave signal handlers and environment as they were, and turn errors of the system into
    `TunediffError`.

    `cluster`: Ray starts inside, and SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does. Raises
    `ConfigError` where Ray runs in this process already.
    """
    if cluster and (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        raise ConfigError(
            "Ray runs in this process already, and a search starts its own; call ray.shutdown()"
            " first"
        )
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # those that Ray Tune takes
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signals} if in_main else {}
    environment = {name: os.environ.get(name) for name in _SET_BY_MACHINE}
    try:
        with terminable() if cluster else contextlib.nullcontext():
            yield
    except OSError as error:
        raise TunediffError(cli.of_system(error)) from error
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: it was not installed from Python
                signal.signal(number, handler)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def words(knobs: tuple[Knobs, ...]) -> list[str]:
    """Return knobs as the words of a command line: `knob=value`."""
    result: list[str] = []
    for knob in knobs:
        result += (
            [knob]
            if isinstance(knob, str)
            else [f"{name}={_as_yaml(value)}" for name, value in knob.items()]
        )
    return result


def plain(number: Any) -> Any:
    """Return a number of numpy or torch as one of Python; anything else as it is."""
    return number.item() if getattr(number, "ndim", None) == 0 else number


def with_plain_numbers(options: T) -> T:
    """Return the options of a command with numbers of Python instead of those of numpy, as tables
    have them.

    Raises `ConfigError` for a count that is no whole number.
    """
    for name in ("trials", "pairs", "confirm", "seed", "cpus", "gpus"):
        value = plain(getattr(options, name, None))
        cli.allow(
            value is None or (isinstance(value, int) and not isinstance(value, bool)),
            name,
            value,
            "a whole number",
        )
    return dataclasses.replace(
        options, **{name: plain(value) for name, value in vars(options).items()}
    )  # type: ignore[type-var]


def duration(value: str | float | None) -> str | None:
    """Return a duration as an option takes it, `90s`; a number counts seconds."""
    value = plain(value)
    return text.format_exact(value) if isinstance(value, int | float) else value


def folder(storage: str | Path) -> Path:
    """Return the folder of all searches, absolute: the working directory may change; the local one
    for an address."""
    return remote.local(storage).expanduser().absolute()


def as_printed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result exactly as `--json` prints it and a program reads it."""
    printed: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False, default=str))
    return printed


def _as_yaml(value: Any) -> str:
    return as_word(value) if isinstance(value, str) else json.dumps(value, default=_as_json)


def _as_json(value: Any) -> Any:
    """Return a number or an array of numpy or torch as Python has it; anything else, such as a
    path, as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
