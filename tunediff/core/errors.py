"""The exception that every error of a user's input or of a run derives from."""


class TunediffError(Exception):
    """What a command of tunediff prints after `error:`; raised by every call of the Python
    interface."""


class ConfigError(TunediffError, ValueError):
    """Invalid input of the user: the message names the place, the key, the value and the allowed
    values."""


class EvaluationStoppedError(TunediffError):
    """Raised on all ranks by an evaluation that ends early because `trial.should_stop()` is true on
    one of them."""


class UserCodeError(TunediffError):
    """The code of a user's workload has raised an error; the message is its traceback."""


def refuse(broken: object, why: str) -> None:
    """Raise `ConfigError` with the message `why` if `broken` is true."""
    if broken:
        raise ConfigError(why)
