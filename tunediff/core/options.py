"""Options of commands, of calls from Python and of experiments, each written once: a field of a
pydantic model.

`cli.add_options` makes the options of a command line from the fields, `api.calls.keywords` the
keywords of a function, `experiment.model` a file. A field that is true by default, such as `check`,
is `--no-check` on a command line; one without `option` is of files alone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo

from tunediff.core import text
from tunediff.core.errors import ConfigError

REQUIRED = ...
"""Default of an option that has to be given."""
S = TypeVar("S", bound="Section")
_SWITCHES = (True, False, ())
ALLOWED = {"int": "a whole number", "float": "a number", "bool": "true, false"}
"""What takes the place of a value that is none of its type."""


def option(default: Any, help: str, **details: Any) -> Any:
    """Return a field with what a command line needs to know of it.

    `details`: `flag`, where it is not the name of the field, `metavar`, `short`, `repeated` for an
    option that may be given several times, `allowed` in words, and the limits of pydantic (`ge`).
    """
    limits = {name: details.pop(name) for name in ("ge", "gt", "le", "lt") if name in details}
    return pydantic.Field(default, description=help, json_schema_extra=details, **limits)


def words_option(help: str, metavar: str) -> Any:
    """Return a field for the words of a command line that belong to no option."""
    return option((), help, metavar=metavar, flag="words")


class Section(pydantic.BaseModel):
    """Fields that belong together: a part of a file, and of the options of commands."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        arbitrary_types_allowed=True,
        coerce_numbers_to_str=True,
        ser_json_inf_nan="constants",
    )


class Options(Section):
    """Base of the options of commands and calls. None means: not given."""

    if not TYPE_CHECKING:  # type checkers see one parameter for each field

        def __init__(self, **values: Any) -> None:
            """Raises `ConfigError` for a value that an option cannot have."""
            # numbers of numpy, as tables have them
            plain = {
                name: value.item() if getattr(value, "ndim", None) == 0 else value
                for name, value in values.items()
            }
            given = {name: value for name, value in plain.items() if value is not None}
            try:
                super().__init__(**given)
            except pydantic.ValidationError as error:
                raise ConfigError(_refusal(type(self), error.errors()[0])) from None

    def given(self, *kinds: type[Section]) -> dict[str, Any]:
        """Return the values of the fields of `kinds` that are given, as text takes them."""
        fields = {name: field for kind in kinds for name, field in kind.model_fields.items()}
        given = {
            name
            for name in fields.keys() & self.model_fields_set
            # a switch that stands as it does by itself, words that are none
            if getattr(self, name) != fields[name].default or fields[name].default not in _SWITCHES
        }
        return self.model_dump(include=given, mode="json", exclude_none=True)

    def part(self, kind: type[S], **others: Any) -> S:
        """Return the fields that make up `kind`, and others."""
        names = kind.model_fields.keys() & self.model_fields_set
        return kind(**{name: getattr(self, name) for name in names} | others)

    def command_words(self, *kinds: type[Section]) -> list[str]:
        """Return the words of a command line that give the fields of `kinds` their values."""
        line = list[str]()
        for name, value in self.given(*kinds).items():
            field = type(self).model_fields[name]
            if name == "words":
                line = [*value, *line]
                continue
            for one in value if about_of(field).get("repeated") else [value]:
                line.append(flag_of(name, field))
                if not isinstance(one, bool):
                    line.append(shlex.join(one) if isinstance(one, list) else str(one))
        return line

    def command_line(self, module: str, kind: type[Section]) -> str:
        """Return the command that asks for the same, as far as `kind` has options for it."""
        return text.command(module, *self.command_words(kind))


def about_of(field: FieldInfo) -> dict[str, Any]:
    """Return what `option` says of a field."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def flag_of(name: str, field: FieldInfo) -> str:
    """Return the option of a command line that sets a field: `--dry-run`, `--no-check`."""
    prefix = "--no-" if field.default is True else "--"
    return str(about_of(field).get("flag") or prefix + name.replace("_", "-"))


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values of a type such as `Literal["a", "b"] | None`; () if they are not listed."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next(filter(None, map(choices_of, get_args(annotation))), ())


def _refusal(kind: type[Section], detail: Any) -> str:
    """Return the message for one pydantic error."""
    name, value, what = detail["loc"][0], detail["input"], detail["type"]
    if (field := kind.model_fields.get(name)) is None or what == "missing":
        return f"{name}: {'no such option' if field is None else 'is missing'}"
    flag = flag_of(name, field)
    shown = text.truncate(repr(str(value) if isinstance(value, Path) else value), 60)
    if what == "value_error":
        error = detail["ctx"]["error"]
        return str(error) if isinstance(error, ConfigError) else f"{flag}: {shown} {error}"
    listed = ", ".join(choices_of(field.annotation))
    allowed = about_of(field).get("allowed") or listed or ALLOWED.get(what.partition("_")[0])
    return f"{flag}: {shown} is not allowed; allowed: {allowed or detail['msg']}"


class JsonOptions(Options):
    """How a command prints its result."""

    as_json: bool = option(False, "print the result as JSON, nothing else on stdout", flag="--json")


class PrintingOptions(JsonOptions):
    """How a command prints its progress and its result."""

    quiet: bool = option(False, "print the result only", short="-q")


# ---- refusals, in the form `KEY: VALUE is not allowed; allowed: …`
MAX_NAME_BYTES = 200
"""Of a folder's name, of which names of files are made; file systems take 255 bytes."""


def allow(fits: bool, key: str, value: Any, allowed: str) -> None:
    """Refuse the value of an option or a knob unless it fits. Raises `ConfigError`."""
    if not fits:
        quoted = text.truncate(repr(str(value) if isinstance(value, Path) else value), 60)
        raise ConfigError(f"{key}: {quoted} is not allowed; allowed: {allowed}")


def check_name(name: str) -> None:
    """Refuse a name that is no plain folder name or looks like an option. Raises `ConfigError`."""
    plain = name.isprintable() and not set(name) & set("/\\") and name[:1] not in ("", ".", "-")
    allowed = (
        f"a plain folder name of at most {MAX_NAME_BYTES} bytes, without / and \\, that begins"
        " with neither . nor -"
    )
    allow(plain and len(os.fsencode(name)) <= MAX_NAME_BYTES, "--name", name, allowed)


def timed_name(stem: str) -> str:
    """Return a name with this millisecond, as `digits-20261128-133439-512`."""
    now = time.time()
    second = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{stem}-{second}-{int(now % 1 * 1000):03d}"


def check_new(folder: Path, resumes: str = "") -> None:
    """Refuse a folder that exists; one with this file can be resumed. Raises `ConfigError`."""
    if folder.exists():
        name = folder.name
        resume = f", or --resume {name}" if resumes and (folder / resumes).is_file() else ""
        raise ConfigError(
            f"--name: {name!r} exists in {folder.parent}; choose another name{resume}"
        )


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turn an error of the disk inside into a `ConfigError` that names the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from None


def check_writable(option: str, path: Path) -> None:
    """Refuse a path whose folder cannot be made or written to. Raises `ConfigError`."""
    with writing(option, path):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option}: {path} cannot be written: no permission in {path.parent}")
