"""What all commands share: exit codes, their command line, and printing of results."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import re
import signal
import sys
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tunediff.config import code as users
from tunediff.config.code import WorkloadError
from tunediff.core import machine, signals, text
from tunediff.core.errors import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    NO_SUCCESS,
    OK,
    ConfigError,
    RunError,
    TunediffError,
    message_of,
)
from tunediff.core.options import Options, Section, about_of, choices_of, flag_of

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "NO_SUCCESS", "OK"]

Command = Callable[[Sequence[str] | None], int]
O = TypeVar("O", bound=Options)  # noqa: E741


def guarded(command: Command) -> Callable[..., int]:
    """Turn bad input, a failed training and Ctrl-C of a command into one message and an exit
    code."""

    @functools.wraps(command)
    def run(argv: Sequence[str] | None = None) -> int:
        return _guarded(command, argv)

    return run


def _guarded(command: Command, argv: Sequence[str] | None) -> int:
    if sys.stdout is None:  # `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    machine.limit_spinning()
    if early := signal.getsignal(signal.SIGINT) is signals.end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            words = sys.argv[1:] if argv is None else argv
            with _log_on_stderr(), _json_alone_on_stdout(words):
                return command(argv)
        finally:
            sys.stdout.flush()
    except TunediffError as error:
        print(message_of(error), file=sys.stderr)
        return BAD_INPUT if isinstance(error, ConfigError | WorkloadError) else FAILED
    except BrokenPipeError:  # `… | head`; Python would report its last flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        print(f"error: {users.system_message(error)}", file=sys.stderr)
        return FAILED
    except Exception as error:
        if not isinstance(error.__cause__, RunError):
            raise
        # Python would print this process's traceback as well, which ends in the same error
        print(str(error.__cause__).strip(), file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as error:
        print(f"\n{str(error) or 'interrupted'}", file=sys.stderr)
        exec("")  # clears an interruption inside exec (of dataclasses), which ends Python at exit
        return INTERRUPTED
    finally:
        if early:  # what is left to Python cannot be interrupted in order
            signal.signal(signal.SIGINT, signals.end)


class _StderrHandler(logging.Handler):
    """Print records on the current stderr; warnings begin with WARNING."""

    def emit(self, record: logging.LogRecord) -> None:
        start = "WARNING: " if record.levelno == logging.WARNING else ""
        with contextlib.suppress(OSError):  # the terminal was closed
            print(f"{start}{self.format(record)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Print what the package logs; a call from Python leaves that to the program that calls."""
    package, calls = logging.getLogger("tunediff"), logging.getLogger("tunediff.api")
    handler, before = _StderrHandler(), calls.level
    package.addHandler(handler)
    calls.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        calls.setLevel(before)


# ---- printing
_redirection = contextlib.ExitStack()
"""Restores stdout while it is redirected."""


@contextlib.contextmanager
def _json_alone_on_stdout(words: Sequence[str]) -> Iterator[None]:
    """Send to stderr what a user's file prints, if `words` contain --json, until
    `restore_stdout`."""
    # argparse takes --js as well
    if sys.stderr is None or not any(word.startswith("--j") for word in words):
        yield
        return
    stdout = sys.__stdout__
    if stdout is not None and stdout is sys.stdout:  # subprocesses write to the descriptor
        duplicate = os.dup(stdout.fileno())
        _redirection.callback(os.close, duplicate)
        _redirection.callback(os.dup2, duplicate, stdout.fileno())
        _redirection.callback(stdout.flush)  # what loggers wrote to the object itself
        os.dup2(2, stdout.fileno())
    _redirection.enter_context(contextlib.redirect_stdout(sys.stderr))
    with _redirection:
        yield


def restore_stdout() -> None:
    """End what --json does to stdout: what is printed from now on is the result."""
    _redirection.close()


def result(
    values: Mapping[str, Any], as_json: bool, typed: Mapping[str, Any] | None = None
) -> None:
    """Print a result as lines of `key: value`, or as JSON; `typed`: its JSON where that differs
    from `values`."""
    if as_json:
        print_json(values if typed is None else typed)
    else:
        print(text.block(values))


def print_json(values: Mapping[str, Any]) -> None:
    """Print a result as JSON, with the version of its keys and types."""
    restore_stdout()
    print(json.dumps(text.versioned(values), indent=2, allow_nan=False, default=str), flush=True)


def open_in_browser(page: Path) -> None:
    """Open a page in a browser; say where it is if there is none."""
    if not webbrowser.open(page.absolute().as_uri()):
        print(f"--open: there is no browser; the report is {page}", file=sys.stderr)


# ---- command line
class _Parser(argparse.ArgumentParser):
    def print_help(self, file: Any = None) -> None:
        restore_stdout()
        super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` with one line instead of printing the usage."""
        refusal = message.removeprefix("argument ")
        if knob := re.match(r"unrecognized arguments: --([a-z_]+\.\w+)[= ]([^ -]\S*)", refusal):
            refusal += f"; a knob is written {knob[1]}={knob[2]}"
        raise ConfigError(f"command line: {refusal}; all options: {self.prog} --help")


def parse(
    module: str, description: str | None, kind: type[O], argv: Sequence[str] | None,
    exits: str = "0 ok, 1 failed, 2 bad input, 3 no successful trial, 130 interrupted",
) -> O:  # fmt: skip
    """Return the options of a command line, whose `words` may stand before and after the others.

    `exits`: what its exit codes say. Raises `ConfigError`.
    """
    parser = _Parser(
        prog=" ".join(text.program(module)),
        description=description,
        epilog=f"Exit codes: {exits}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, kind)
    values = vars(parser.parse_intermixed_args(argv))
    repeated = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return kind(**values | repeated)


def add_options(parser: argparse.ArgumentParser, options: type[Section]) -> None:
    """Add the fields of a model to a command line; the model converts and refuses their values."""
    for name, field in options.model_fields.items():
        if field.description is None:
            continue
        about, choices = about_of(field), choices_of(field.annotation)
        details: dict[str, Any] = {"help": field.description.replace("%", "%%")}
        if choices or "metavar" in about:
            details["metavar"] = about.get("metavar", f"{{{','.join(choices)}}}")
        if not (flag := flag_of(name, field)).startswith("-"):
            count = "*" if name == "words" else None if field.is_required() else "?"
            parser.add_argument(name, nargs=count, **details)
            continue
        if field.annotation is bool:
            details["action"] = "store_false" if field.default else "store_true"
            details["help"] = "do not " * bool(field.default) + details["help"]
        else:
            details |= {"required": field.is_required()}
        if about.get("repeated"):
            details["action"] = "append"
        flags = [*([about["short"]] if "short" in about else []), flag]
        parser.add_argument(*flags, dest=name, default=argparse.SUPPRESS, **details)
