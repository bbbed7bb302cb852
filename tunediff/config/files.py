"""Read configurations from YAML files and `knob=value` words, and write them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tunediff.config import workload
from tunediff.config.knobs import ConfigError, Knob, Lines, Values, nearest, refuse
from tunediff.config.schema import (
    C,
    Configuration,
    Schema,
    flatten,
    override,
    to_dict,
    with_absolute_paths,
)
from tunediff.core.files import FORMAT, check_format

FORMAT_KEY = "tunediff_format"
"""Key of the format in a YAML file."""
FILES = (".yaml", ".yml", ".py")
"""Endings of files with configurations and workloads."""
NULLS, QUOTES = ("", "~", "null", "Null", "NULL"), ("'", '"')
"""Words that YAML reads as null, and what a quoted string begins with."""
# Ten times as fast, where PyYAML was built with libyaml.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeyLoader(_Loader):  # type: ignore[misc, valid-type]
    """SafeLoader that refuses a key given twice: YAML would silently keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            why = "a key must be a plain word" if isinstance(key, list | dict) else ""
            if why or key in seen:
                why = why or f"{key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, why, key_node.start_mark)
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes strings which `_UniqueKeyLoader` would read as numbers."""


# YAML 1.1 reads 1e-3 as text; a hash of digits, such as 12e45678, is none of these.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE]([-+]\d+|\d{1,2})$")
for _class in (_UniqueKeyLoader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read_yaml(path: Path) -> Lines:
    """Return the mapping in a YAML file. Raises `ConfigError` for anything else."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = " ".join(str(error).replace(' in "<unicode string>"', "").split())
        raise ConfigError(f"{path}: is not valid YAML: {message}") from None
    refuse(content is None, f"{path}: is empty; it needs `key: value` lines")
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, found {type(content).__name__}")
    check_format(content.pop(FORMAT_KEY, FORMAT), f"{path}: {FORMAT_KEY}")
    return content


def to_yaml(content: Lines, flow: bool | None = False) -> str:
    """Return `key: value` lines as YAML with its format; `flow`: None puts lists on one line."""
    lines = {FORMAT_KEY: FORMAT, **content}
    look: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "default_flow_style": flow}
    return str(yaml.dump(lines, Dumper=_Dumper, **look))


def load(path: Path, words: Sequence[str] = ()) -> Any:
    """Read a configuration file with sections or dotted names; `words` override its knobs.

    Raises `ConfigError`.
    """
    content = read_yaml(path)
    schema = workload.named_in(content, str(path), path.absolute().parent).schema
    knobs = flatten(content, str(path))
    config = override(schema.default(), knobs, where=str(path), check=not words)
    return with_words(config, words)


def named(path: Path, words: Sequence[str], where: str = "--config") -> Any:
    """Return the configuration that a user names: best.yaml, a baseline, or `mine.py`.

    `where`: the place that error messages name. Raises `ConfigError`.
    """
    name = str(path)
    is_shipped = name in workload.baseline_names() and not path.is_file()
    if is_shipped or workload.is_users(name.partition(":")[0]):
        return with_words(workload.baseline(name, where), words)
    if not path.exists():
        hint = nearest(name, workload.baseline_names())
        raise ConfigError(f"{name}: no such file, and no baseline of that name; {hint}")
    return load(path, words)


def with_words(config: C, words: Sequence[str]) -> C:
    """Apply `knob=value` words; make the paths absolute. Raises `ConfigError`."""
    values = parse_overrides(words, config.schema)
    return with_absolute_paths(override(config, values, where="command line"))


def dump(
    config: Configuration, comments: list[str] | None = None, folder: Path | None = None
) -> str:
    """Return the full configuration as YAML text, with `comments` as `#` lines above it.

    A user's workload inside `folder`, the future location of the text, is named relative to it.
    """
    head, content = "".join(f"# {line}\n" for line in comments or []), to_dict(config)
    file = Path(content["workload"])
    if folder is not None and file.is_relative_to(folder.absolute()):
        content["workload"] = str(file.relative_to(folder.absolute()))
    return head + to_yaml(content, flow=None)


def setting(name: str, value: Any) -> str:
    """Return the word `knob=value` of a value; numbers and arrays may be numpy's or torch's."""
    plain = json.loads(json.dumps(value, default=_plain))
    return f"{name}={as_word(plain) if isinstance(plain, str) else json.dumps(plain)}"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def parse_overrides(words: Sequence[str], schema: Schema) -> Values:
    """Return the knobs of `knob=value` words; values are YAML, plain text, or 1e-3."""
    values: Values = {}
    for word in words:
        name, equals, text = word.partition("=")
        broken = f"command line: {word!r} is not understood; write knob=value"
        refuse(not (name and equals), broken)
        knob = schema.knob(name, "command line")
        repeated = [other for other in words if other.partition("=")[0] == name]
        refuse(name in values, f"command line: {name}: is given twice: {', '.join(repeated)}")
        try:
            values[name] = _value(text, knob)
        except (yaml.YAMLError, ValueError, RecursionError):
            why = f"{text!r} is not understood; allowed: {knob.allowed}"
            raise ConfigError(f"command line: {name}: {why}") from None
    return values


def _value(text: str, knob: Knob) -> Any:
    """Return the value of a `knob=value` word. Raises `yaml.YAMLError` and `ValueError`.

    A string knob takes the text as it is: YAML would read `2024` as a number and `a #1` as `a`.
    """
    if knob.kind == "str" and text not in NULLS and not text.startswith(QUOTES):
        return text
    value, choices = yaml.load(text, _UniqueKeyLoader), knob.choices or ()
    if value not in choices and text in choices:
        return text  # off and on, which YAML 1.1 reads as false and true
    if knob.kind == "float":
        return _as_float(value)
    if knob.items == "float" and isinstance(value, list):
        return [_as_float(item) for item in value]
    return value


def _as_float(value: Any) -> Any:
    """Return text such as 1e-3 as a number; what is none is refused later."""
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def as_word(value: str) -> str:
    """Return what `parse_overrides` reads as this string, where the knob takes one."""
    plain = value not in NULLS and not value.startswith(QUOTES)
    return value if plain else json.dumps(value, ensure_ascii=False)
