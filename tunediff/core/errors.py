"""The exceptions that commands and calls raise, and the exit codes that they become."""

from __future__ import annotations

OK, FAILED, BAD_INPUT, NO_SUCCESS, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes of the commands."""


class TunediffError(Exception):
    """What a command prints after `error:`; raised by every call of the Python interface."""


class ConfigError(TunediffError, ValueError):
    """Invalid input of the user: names the place, the key, the value, and what is allowed."""


class EvaluationStoppedError(TunediffError):
    """Raised on all ranks by an evaluation that ends early: `trial.should_stop()` on one."""


class CaptureFailedError(RuntimeError):
    """A step could not be captured, and the device may be of no more use to this process."""


class UserCodeError(TunediffError):
    """The code of a user's workload has raised an error; the message is its traceback."""


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
