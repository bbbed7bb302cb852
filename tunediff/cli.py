"""Share options, exit codes, refusals and printing between all commands."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import functools
import json
import logging
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tunediff.config import ConfigError, Systems, of, removed
from tunediff.config import code as users
from tunediff.config.code import WorkloadError
from tunediff.config.workload import SHIPPED, find
from tunediff.core import machine, remote, signals, text
from tunediff.core.errors import TunediffError, UserCodeError

log = logging.getLogger(__name__)

# OpenMP threads that wait for each other spin for billions of rounds by default. Alone that costs
# nothing; beside any other load on the same cores it stops training almost completely (measured
# with 2 threads on 2 cores, images/s, alone and beside a second training: default 4,190 and 0;
# 3,000 rounds 4,050 and 490). Read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

OK, FAILED, BAD_INPUT, NO_SUCCESS, INTERRUPTED = 0, 1, 2, 3, 130
SCHEMA = 2
"""Version of what `--json` prints: it rises when a key is renamed or removed, or changes its
type."""
MOST_BYTES = 200  # of a name: a folder has 255, and names of files are made of it


def guarded(command: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Turn bad input, a diverged model and Ctrl-C of a command into one clear message and an exit
    code."""

    @functools.wraps(command)
    def run(argv: Sequence[str] | None = None) -> int:
        if sys.stdout is None:  # `>&-`
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        _replace_what_cannot_be_written()
        users.announces = True
        if early := signal.getsignal(signal.SIGINT) is signals.end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            try:
                with (
                    _log_on_stderr(),
                    _json_alone_on_stdout(sys.argv[1:] if argv is None else argv),
                ):
                    return command(argv)
            finally:
                sys.stdout.flush()
        except TunediffError as error:
            print(message_of(error), file=sys.stderr)
            return BAD_INPUT if isinstance(error, ConfigError | WorkloadError) else FAILED
        except (
            BrokenPipeError
        ):  # `… | head`: nobody reads on, which Python would say of its last flush again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        except OSError as error:
            print(f"error: {of_system(error)}", file=sys.stderr)
            return BAD_INPUT if error.errno == errno.ENAMETOOLONG else FAILED
        except KeyboardInterrupt as error:
            print(f"\n{str(error) or 'interrupted'}", file=sys.stderr)
            exec(
                ""
            )  # forgets that it came inside exec, as dataclasses use it: Python would die of it at its very end
            return INTERRUPTED
        finally:
            if early:  # what is left to Python cannot be interrupted in order
                signal.signal(signal.SIGINT, signals.end)

    return run


def message_of(error: TunediffError) -> str:
    """Return what a command prints of an error."""
    if isinstance(error, UserCodeError):
        return str(error)
    lines = [
        line if len(line) < 1000 else f"{line[:600]} … {line[-300:]}"
        for line in str(error).splitlines()
    ]
    return "error: " + "\n".join(lines)


def of_system(error: OSError) -> str:
    """Return the message about an error of the system: the file and why."""
    where = f"{text.truncate(str(error.filename), 60)}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}{users.missing_beside(error)}"


class _StderrHandler(logging.Handler):
    """Print records on the current stderr; warnings begin with WARNING."""

    def emit(self, record: logging.LogRecord) -> None:
        start = "WARNING: " if record.levelno == logging.WARNING else ""
        with contextlib.suppress(OSError):  # the terminal was closed
            print(f"{start}{self.format(record)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Print what the package logs; a call from Python leaves that to the program that calls."""
    package, calls, handler = (
        logging.getLogger("tunediff"),
        logging.getLogger("tunediff.api"),
        _StderrHandler(),
    )
    before = calls.level
    package.addHandler(handler)
    calls.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        calls.setLevel(before)


_redirection = contextlib.ExitStack()
"""Restores stdout while it is redirected."""


@contextlib.contextmanager
def _json_alone_on_stdout(words: Sequence[str]) -> Iterator[None]:
    """Send to stderr what a user's file prints, if `words` contain --json, until
    `restore_stdout`."""
    if sys.stderr is None or not any(
        word.startswith("--j") for word in words
    ):  # argparse takes --js as well
        yield
        return
    if (
        own := sys.__stdout__
    ) is not None and own is sys.stdout:  # subprocesses write to the descriptor
        duplicate = os.dup(own.fileno())
        _redirection.callback(os.close, duplicate)
        _redirection.callback(os.dup2, duplicate, own.fileno())
        _redirection.callback(own.flush)  # what loggers wrote to the object itself
        os.dup2(2, own.fileno())
    _redirection.enter_context(contextlib.redirect_stdout(sys.stderr))
    with _redirection:
        yield


def _replace_what_cannot_be_written() -> None:
    """Print `?` for a letter that the output's encoding has not, such as `×` in ASCII, instead of
    raising."""
    for stream in (sys.stdout, sys.stderr):
        encoding, errors = getattr(stream, "encoding", None), getattr(stream, "errors", None)
        utf8 = str(encoding).lower().replace("-", "") == "utf8"
        if errors == "strict" or (errors == "surrogateescape" and not utf8):
            with contextlib.suppress(
                AttributeError
            ):  # what stands in for a stream has no such method
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]


class _Parser(argparse.ArgumentParser):
    def parse_args(self, *args: Any, **named: Any) -> Any:
        _complete(self)
        return super().parse_args(*args, **named)

    def parse_intermixed_args(self, args: Sequence[str] | None = None) -> Any:  # type: ignore[override]
        """Parse options and `words` in any order; what follows `--` is no option, which argparse
        forgets here."""
        _complete(self)
        line = list(sys.argv[1:] if args is None else args)
        end = line.index("--") if "--" in line else len(line)
        parsed = super().parse_intermixed_args(line[:end])
        parsed.words += line[end + 1 :]
        return parsed

    def print_help(self, file: Any = None) -> None:
        restore_stdout()
        super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` with one line instead of printing the usage."""
        refusal = re.sub(
            r"invalid int value: (.*)", r"\1 is not allowed; allowed: a whole number", message
        )
        refusal = re.sub(
            r"invalid float value: (.*)", r"\1 is not allowed; allowed: a number", refusal
        )
        refusal = re.sub(
            r"\binvalid choice: (.*) \(choose from (.*)\)",
            r"\1 is not allowed; allowed: \2",
            refusal,
        )
        if knob := re.match(r"unrecognized arguments: --([a-z_]+\.?\w*)[= ]([^ -]\S*)", refusal):
            refusal += f"; a knob is written {knob[1]}={knob[2]}"
        refusal = _removed(message, re.split(r"[ .]", self.prog)[-1]) or refusal
        raise ConfigError(
            f"command line: {refusal.removeprefix('argument ')}; all options: {self.prog} --help"
        )


def _removed(message: str, command: str) -> str:
    """Return the refusal of an option, or of its value, that an earlier version had; '' if none had
    it."""
    option, value = (
        re.search(r"--([a-z-]+)", message),
        re.search(r"invalid (?:choice|float value): '(.*?)'", message),
    )
    name = option[1].removeprefix("no-") if option is not None else ""
    if message.startswith("unrecognized") and (gone := removed.reason(f"{command} --{name}")):
        return f"--{name} is not allowed: {gone}"
    kind = "H,H" if value is not None and "," in value[1] else value and value[1]
    gone = removed.reason(name.replace("-", "_"), kind) if kind else ""
    return f"--{name}: {value[1]!r} is not allowed: {gone}" if value is not None and gone else ""


def parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return the argument parser of a command; it raises `ConfigError` for what it refuses."""
    return _Parser(
        prog=text.program(module),
        description=description,
        epilog="Exit codes: 0 ok, 1 failed, 2 bad input, 3 no successful trial, 130 interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _complete(parser: argparse.ArgumentParser) -> None:
    """Print how the command line may go on, and exit, where a shell asks for that: the extra
    `completion`."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options="long")


def completes(action: argparse.Action, names: Callable[[], Iterable[str]] = list) -> None:
    """Let shells complete the words of an argument: with these names, with files, and with knobs up
    to the `=`."""

    def matching(prefix: str, **_: Any) -> list[str]:
        from argcomplete.completers import FilesCompleter

        words = dict.fromkeys(
            [*names(), *FilesCompleter()(prefix), *(f"{knob}=" for knob in _knobs())]
        )
        return [word for word in words if word.startswith(prefix)]

    action.completer = matching  # type: ignore[attr-defined]


def completes_knob(action: argparse.Action) -> None:
    """Let shells complete the name of a knob."""

    def matching(prefix: str, **_: Any) -> list[str]:
        return [knob for knob in _knobs() if knob.startswith(prefix)]

    action.completer = matching  # type: ignore[attr-defined]


def _knobs() -> Iterable[str]:
    """Return the knobs of all shipped workloads, each once."""
    return dict.fromkeys(knob for name in SHIPPED for knob in find(name).schema.knobs)


def add_storage(parser: argparse.ArgumentParser, of: str = "all searches") -> None:
    """Add the option --storage."""
    words = f"folder of {of}, or its address, e.g. s3://bucket/prefix (default: %(default)s)"
    parser.add_argument("--storage", type=remote.local, default=text.STORAGE, help=words)


def add_average(parser: argparse.ArgumentParser) -> None:
    """Add the option --ema."""
    words = (
        "weights averaged with this half-life, as ema.half_life counts it, where the training has"
        " ema.snapshots=true"
    )
    parser.add_argument(
        "--ema", type=float, metavar="H", help=f"{words} (default: those that were evaluated)"
    )


def add_unit(parser: argparse.ArgumentParser) -> None:
    """Add the option --unit, which belongs to --budget."""
    words = (
        "what the budget counts: training seconds (wall, the default), or these times devices"
        " (device)"
    )
    parser.add_argument("--unit", choices=("wall", "device"), help=words)


def add_printing(parser: argparse.ArgumentParser, quiet: bool = True) -> None:
    """Add the options --json and, for commands that tell their progress (`quiet`), --quiet and
    --progress."""
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, nothing else on stdout"
    )
    if quiet:
        parser.add_argument("-q", "--quiet", action="store_true", help="print the result only")
        progress = (
            "how far it is: text (on stderr with --json), or jsonl, a JSON object per line on"
            " stderr"
        )
        parser.add_argument("--progress", choices=("text", "jsonl"), default="text", help=progress)


def add_machine(parser: argparse.ArgumentParser, of: str) -> None:
    """Add the options --address, --cpus and --gpus."""
    parser.add_argument(
        "--address", help=f"a running Ray cluster (default: one on this machine for this {of})"
    )
    parser.add_argument("--cpus", type=int, help="CPU cores of this machine to use (default: all)")
    parser.add_argument("--gpus", type=int, help="GPUs of this machine to use (default: all)")


def check_here(config: Systems, evaluates: bool) -> None:
    """Refuse missing files that the workload of a training reads. Raises `ConfigError`."""
    if (check_files := of(config).get_hook("check_files")) is not None:
        check_files(config.knobs, evaluates)


def warn_emulated(formats: Iterable[str], address: str | None = None) -> None:
    """Warn on stderr of those values of `precision.amp` that the CPU that trains here only
    emulates."""
    if address is None and not machine.gpus():
        for name in sorted(machine.emulated().intersection(formats)):
            log.warning("precision.amp=%s: this CPU has no units for it and emulates it", name)


def command_of(module: str, kind: type[Any], options: Any) -> str:
    """Return the command that asks for `options`, a dataclass `kind` whose fields are named as the
    command's options.

    Its field `words` comes first; options that have their default are left out.
    """
    words = list(options.words)
    for field in dataclasses.fields(kind):
        value, name = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if field.name != "words" and value != field.default:
            words += [name] if value is True else [name, str(value)]
    return shlex.join(["python", "-m", f"tunediff.{module}", *words])


def result(
    values: Mapping[str, Any], as_json: bool, typed: Mapping[str, Any] | None = None
) -> None:
    """Print a result as lines of `key: value`, or as JSON; `typed`: its JSON where that differs
    from `values`."""
    if as_json:
        print_json(values if typed is None else typed)
    else:
        print(text.block(values))


def restore_stdout() -> None:
    """End what --json does to stdout: what is printed from here on is the result."""
    _redirection.close()


def print_json(values: Mapping[str, Any]) -> None:
    """Print a result as JSON, with the number of the version that its keys and types are of."""
    restore_stdout()
    print(json.dumps(versioned(values), indent=2, allow_nan=False, default=str), flush=True)


def versioned(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result as `--json` prints it: with the number of the version of its keys, without
    NaN."""
    return {"schema": SCHEMA, **text.finite(values)}


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Raise `ConfigError` that names the option for any error of the disk inside."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from None


def allow(fits: bool, option: str, value: Any, allowed: str) -> None:
    """Refuse the value of an option unless it fits. Raises `ConfigError`."""
    if not fits:
        quoted = repr(str(value) if isinstance(value, Path) else value)
        raise ConfigError(
            f"{option}: {text.truncate(quoted, 60)} is not allowed; allowed: {allowed}"
        )


def check_name(name: str, storage: Path) -> None:
    """Refuse a name that no folder or no command line would take, or that is taken. Raises
    `ConfigError`."""
    check_plain(name)
    check_free(storage / name)


def check_plain(name: str) -> None:
    """Refuse a name that no folder or no command line would take. Raises `ConfigError`."""
    plain = name.isprintable() and not set(name) & set("/\\") and name[:1] not in ("", ".", "-")
    allowed = (
        f"a plain folder name of at most {MOST_BYTES} bytes, without / and \\, that begins with"
        " neither . nor -"
    )
    allow(plain and len(os.fsencode(name)) <= MOST_BYTES, "--name", name, allowed)


def check_free(folder: Path) -> None:
    """Refuse to begin anew where there is something. Raises `ConfigError`."""
    if folder.exists():
        name = folder.name
        raise ConfigError(
            f"--name: {name!r} exists in {folder.parent}; choose another name, or --resume {name}"
        )


def check_writable(option: str, path: Path) -> None:
    """Find out before hours of work that its result could not be written. Raises `ConfigError`."""
    with writing(option, path):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option}: {path} cannot be written: no permission in {path.parent}")


def check_creatable(option: str, path: Path) -> None:
    """Find out whether a folder could be made, and leave nothing behind. Raises `ConfigError`."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    with writing(option, path):
        os.rmdir(tempfile.mkdtemp(prefix=".tunediff-", dir=above))
