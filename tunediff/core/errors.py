"""The exceptions that commands and calls raise, and the exit codes that they become."""

from __future__ import annotations

import dataclasses
import os

OK, FAILED, BAD_INPUT, NO_SUCCESS, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes of the commands."""


class TunediffError(Exception):
    """What a command prints after `error:`; raised by every call of the Python interface."""


class ConfigError(TunediffError, ValueError):
    """Invalid input of the user: names the place, the key, the value, and what is allowed."""


class CaptureFailedError(RuntimeError):
    """A step could not be captured, and the device may be of no more use to this process."""


class UserCodeError(TunediffError):
    """The code of a user's workload has raised an error; the message is its traceback."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error as a value that crosses the borders of processes and stands in journals."""

    message: str
    error: str = ""
    """The name of its class; '' where a process ended without one."""
    errno: int | None = None
    path: str | None = None
    """The file that an error of the system names."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return what is known of an exception."""
        code, path = (error.errno, error.filename) if isinstance(error, OSError) else (None, None)
        known = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else None
        return cls(str(error), type(error).__name__, code, known)

    @property
    def system_error(self) -> OSError:
        """Return it as the error of the system that it was."""
        return OSError(self.errno, os.strerror(self.errno or 0), self.path)

    def __str__(self) -> str:
        words = ": ".join(filter(None, [self.error, self.message]))
        return " ".join(words.split())[:300]


class RunError(Exception):
    """The cause of an error that was raised in another process: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def refuse(broken: object, why: str) -> None:
    """Raise `ConfigError` with the message `why` if `broken` is true."""
    if broken:
        raise ConfigError(why)


def message_of(error: TunediffError) -> str:
    """Return what a command prints of an error."""
    if isinstance(error, UserCodeError):
        return str(error)
    lines = str(error).splitlines()
    short = [line if len(line) < 1000 else f"{line[:600]} … {line[-300:]}" for line in lines]
    return "error: " + "\n".join(short)
