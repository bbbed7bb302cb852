"""Options that a command and a call from Python share, each written once: a field of a dataclass.

`cli.add_options` makes the options of a command line from the fields, `api.calls.keywords` the
keywords of a function. A field that is true by default, such as `check`, is `--no-check` there.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

from tunediff.core import files, remote
from tunediff.core.refusals import allow

STORAGE_HELP = (
    "folder of all searches, comparisons and trainings, or its address, e.g. s3://bucket/prefix"
    f" (default: {files.STORAGE})"
)
REQUIRED = dataclasses.MISSING
"""Default of an option that has to be given."""


def option(default: Any, help: str, **details: Any) -> Any:
    """Return a dataclass field with what a command line needs to know of it.

    `details`: `flag`, where it is not the name of the field, `choices`, `metavar`, `short`,
    `repeated` for an option that may be given several times, and a function `convert(value, flag)`
    that returns or refuses a value.
    """
    return dataclasses.field(default=default, metadata={"help": help, **details})


def words_option(help: str, metavar: str) -> Any:
    """Return a field for the words of a command line that belong to no option."""
    return option((), help, metavar=metavar, flag="words")


@dataclasses.dataclass(kw_only=True)
class Options:
    """Base of all options. Raises `ConfigError` for a value that an option cannot have."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, flag = getattr(self, field.name), flag_of(field)
            if getattr(value, "ndim", None) == 0:  # numbers of numpy, as tables have them
                value = value.item()
            if value is not None and type_of(field) is int:
                whole = isinstance(value, int) and not isinstance(value, bool)
                allow(whole, flag, value, "a whole number")
            if choices := field.metadata.get("choices"):
                allow(value is None or value in choices, flag, value, ", ".join(choices))
            if value is not None and (convert := field.metadata.get("convert")):
                value = convert(value, flag)
            setattr(self, field.name, value)

    def command_line(self, module: str, kind: type[Options]) -> str:
        """Return the command that asks for the same: the fields of `kind` that are not defaults."""
        line = list(getattr(self, "words", ()))
        for field in dataclasses.fields(kind):
            value, flag = getattr(self, field.name), flag_of(field)
            if field.metadata.get("repeated"):
                texts = (one if isinstance(one, str) else shlex.join(one) for one in value)
                line += [word for one in texts for word in (flag, one)]
            elif field.name != "words" and value != field.default:
                line += [flag] if isinstance(value, bool) else [flag, str(value)]
        return shlex.join(["python", "-m", f"tunediff.{module}", *line])


def type_of(field: dataclasses.Field[Any]) -> type:
    """Return the type of the words that give a field its value: `int` for `int | None`."""
    names = re.findall(r"\w+", str(field.type))  # as text: annotations are not evaluated
    return next((kind for kind in (bool, str, int, float, Path) if kind.__name__ in names), str)


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Return the option of a command line that sets a field: `--dry-run`, `--no-check`."""
    prefix = "--no-" if field.default is True else "--"
    flag: str = field.metadata.get("flag") or prefix + field.name.replace("_", "-")
    return flag


@dataclasses.dataclass(kw_only=True)
class StorageOptions(Options):
    """Where results are."""

    storage: str | Path = option(
        files.STORAGE, STORAGE_HELP, convert=lambda value, _: remote.local(value)
    )


@dataclasses.dataclass(kw_only=True)
class JsonOptions(Options):
    """How a command prints its result."""

    json: bool = option(False, "print the result as JSON, nothing else on stdout")


@dataclasses.dataclass(kw_only=True)
class PrintingOptions(JsonOptions):
    """How a command prints its progress and its result."""

    quiet: bool = option(False, "print the result only", short="-q")
