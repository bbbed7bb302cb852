"""What calls from Python share: keywords, errors, and what they leave of the process."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tunediff.config import ConfigError
from tunediff.config.files import setting
from tunediff.core import machine, remote
from tunediff.core.options import Options, option
from tunediff.core.signals import terminable

Knobs = str | Mapping[str, Any]
"""Knobs that are set: `knob=value` as on a command line, or values by dotted name."""
C = TypeVar("C", bound=Callable[..., Any])
OF_COMMANDS = ("words", "config", "resume", "dry_run", "every")
"""Options that are no keywords: arguments of their own, or methods."""
_SET_BY_MACHINE = (machine.PART, machine.VISIBLE, "OMP_NUM_THREADS")


def keywords(options: type[Options]) -> Callable[[C], C]:
    """Make the fields of the model `options` the keywords of a function of `**options`.

    Its signature and its documentation list them; the model refuses others.
    """
    fields = {
        name: field
        for name, field in options.model_fields.items()
        if field.description is not None and name not in OF_COMMANDS
    }

    def decorate(call: C) -> C:
        parameters = [*inspect.signature(call).parameters.values()][:-1]
        for name, field in fields.items():
            about: dict[str, Any] = {"default": field.default, "annotation": field.annotation}
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **about))
        lines = [f"    {name}: {field.description}" for name, field in fields.items()]
        call.__doc__ = "\n".join([inspect.cleandoc(call.__doc__ or ""), "", "Keywords:", *lines])
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return decorate


class ProgressKeywords(Options):
    """A keyword of all calls that take long."""

    progress: bool = option(
        True,
        "show a table in a notebook or a terminal, elsewhere lines on stderr, or in the log of a"
        " program that shows `tunediff.api` at level INFO; false: show nothing",
    )


@contextlib.contextmanager
def called(cluster: bool = False) -> Iterator[None]:
    """Leave signal handlers and environment as they were, and let refusals name keywords.

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
    except ConfigError as error:
        error.args = (_with_keyword(str(error)),)
        raise
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: it was not installed from Python
                signal.signal(number, handler)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _with_keyword(message: str) -> str:
    """Return the refusal of an option, `--early-stopping: …`, as that of a keyword."""
    message = message.removeprefix("command line: ")
    return re.sub(r"^--([a-z-]+):", lambda match: match[1].replace("-", "_") + ":", message)


def plain(number: Any) -> Any:
    """Return a number of numpy or torch as one of Python; anything else as it is."""
    return number.item() if getattr(number, "ndim", None) == 0 else number


def words(knobs: tuple[Knobs, ...]) -> list[str]:
    """Return knobs as words `knob=value`; those of a mapping carry their values."""
    result: list[str] = []
    for knob in knobs:
        if isinstance(knob, str):
            result.append(knob)
        else:
            result += [setting(name, value) for name, value in knob.items()]
    return result


def folder(storage: str | Path) -> Path:
    """Return the absolute folder of all searches, of an address its local one."""
    return remote.local(storage).expanduser().absolute()


def as_printed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result exactly as `--json` prints it and a program reads it."""
    printed: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False, default=str))
    return printed
