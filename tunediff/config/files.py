"""Read configurations from YAML files and from `knob=value` words of a command line, and write
them."""

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

FORMAT, FORMAT_KEY = 1, "tunediff_format"
"""Format of all that is written to be read again (docs/reference/formats.md), and its key in a YAML
file. It rises when an older version would misread a file."""
NULLS, QUOTES = ("", "~", "null", "Null", "NULL"), ("'", '"')
"""Words that YAML reads as null, and what a quoted string begins with."""
_Loader = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # ten times as fast, where PyYAML was built with libyaml


class _UniqueKeyLoader(_Loader):  # type: ignore[misc, valid-type]
    """SafeLoader that raises an error for a key that is given twice: YAML would silently keep the
    last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a plain word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _number(loader: Any, node: yaml.ScalarNode) -> Any:
    """Return a number. Raises an error for those that YAML 1.1, and hardly anybody else, reads in
    base 8 or 60."""
    kind = node.tag.rpartition(":")[2]
    base = (
        60
        if ":" in node.value
        else 8
        if kind == "int" and re.fullmatch(r"[-+]?0[0-7_]+", node.value)
        else 10
    )
    if base != 10:
        why = f"{node.value} is read as a number in base {base}; write it in base 10, or quote it"
        raise yaml.constructor.ConstructorError(None, None, why, node.start_mark)
    return getattr(loader, f"construct_yaml_{kind}")(node)


for _kind in ("int", "float"):
    _UniqueKeyLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)


def read_yaml(path: Path) -> Lines:
    """Return the mapping in a YAML file. Raises `ConfigError` for anything else."""
    refuse(path.is_dir(), f"{path}: is a folder, not a file")
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


def check_format(value: Any, where: str) -> None:
    """Refuse a file of a newer format, or whose format is no number. Raises `ConfigError`."""
    allowed = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= FORMAT
    newer = (
        "; a newer version of tunediff has written it"
        if isinstance(value, int) and value > FORMAT
        else ""
    )
    refuse(not allowed, f"{where}: {value!r} is not allowed; allowed: 1 to {FORMAT}{newer}")


def to_yaml(content: Lines, flow: bool | None = False) -> str:
    """Return `key: value` lines as YAML text that begins with its format; `flow`: None puts lists
    on one line."""
    return yaml.safe_dump(
        {FORMAT_KEY: FORMAT, **content},
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
    )


def load(path: Path, words: Sequence[str] = ()) -> Any:
    """Read a configuration file with sections or dotted names; missing knobs take their defaults,
    `words` override.

    Raises `ConfigError`.
    """
    content = read_yaml(path)
    kind = (
        f"{path}: is a search file, not a configuration; its best one is what python -m"
        " tunediff.export NAME writes"
    )
    refuse("budget" in content and {"search", "grid", "trials", "ladder"} & content.keys(), kind)
    schema = workload.named_in(content, str(path), path.absolute().parent).schema
    config = override(
        schema.default(), flatten(content, str(path)), where=str(path), check=not words
    )
    return with_words(config, words)


def named(path: Path, words: Sequence[str], where: str = "--config") -> Any:
    """Return the configuration that a user names: a file such as an exported best.yaml, a baseline,
    or `mine.py`.

    `where`: the place that error messages name. Raises `ConfigError`.
    """
    name = str(path)
    ours = name in workload.baseline_names() and not path.is_file()
    if ours or workload.is_users(name.partition(":")[0]):
        return with_words(workload.baseline(name, where), words)
    if not path.exists():
        hint = nearest(name, workload.baseline_names())
        raise ConfigError(
            f"{name}: no such file, and no baseline of that name;"
            f" {hint}{missing_equals_hint([name, *words])}"
        )
    return load(path, words)


def with_words(config: C, words: Sequence[str]) -> C:
    """Apply `knob=value` words and return the configuration with absolute paths. Raises
    `ConfigError`."""
    return with_absolute_paths(
        override(config, parse_overrides(words, config.schema), where="command line")
    )


def dump(
    config: Configuration, comments: list[str] | None = None, folder: Path | None = None
) -> str:
    """Return the full configuration as YAML text, with `comments` as `#` lines above it.

    A user's workload inside `folder`, the future location of the text, is named relative to it.
    """
    head, content = "".join(f"# {line}\n" for line in comments or []), to_dict(config)
    if folder is not None and Path(content["workload"]).is_relative_to(folder.absolute()):
        content["workload"] = str(Path(content["workload"]).relative_to(folder.absolute()))
    return head + to_yaml(content, flow=None)


def missing_equals_hint(words: Sequence[str]) -> str:
    """Return `; did you mean optimizer.lr=3e-3?` if a knob and its value are separate words; ''
    otherwise."""
    for i, word in enumerate(words[:-1]):
        name, value = (
            word.removesuffix("="),
            "".join(words[i + 1 : i + 2 + (words[i + 1] == "=")]).removeprefix("="),
        )
        is_name = re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) and not name.endswith(
            (".yaml", ".yml", ".py")
        )
        is_value = (
            value
            and "=" not in value
            and (word != name or words[i + 1][0] in "=-[0123456789" or "." in name)
        )
        if is_name and is_value:
            return f"; did you mean {name}={value}?"
    return ""


def parse_overrides(words: Sequence[str], schema: Schema) -> Values:
    """Return the knobs of `knob=value` words; values are YAML, or plain text; numbers may be
    written as 1e-3."""
    values: Values = {}
    for word in words:
        name, equals, text = word.partition("=")
        refuse(
            not (name and equals),
            f"command line: {word!r} is not understood; write"
            f" knob=value{missing_equals_hint(words)}",
        )
        knob = schema.knob(name, "command line")
        repeated = [other for other in words if other.partition("=")[0] == name]
        refuse(name in values, f"command line: {name}: is given twice: {', '.join(repeated)}")
        try:
            values[name] = _value(text, knob)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ConfigError(
                f"command line: {name}: {text!r} is not understood; allowed: {knob.allowed}"
            ) from None
    return values


def _value(text: str, knob: Knob) -> Any:
    """Return the value of a `knob=value` word. Raises `yaml.YAMLError` and `ValueError`.

    A knob that is a string takes the text as it stands: YAML would read `2024` as a number and `a
    #1` as `a`.
    """
    if knob.kind == "str" and text not in NULLS and not text.startswith(QUOTES):
        return text
    value = yaml.load(text, _UniqueKeyLoader)
    choices = knob.choices or ()
    if (
        value not in choices and text in choices
    ):  # off and on, which YAML 1.1 reads as false and true
        return text
    if knob.kind == "float":
        return _as_float(value)
    if knob.items == "float" and isinstance(value, list):
        return [_as_float(item) for item in value]
    return value


def _as_float(value: Any) -> Any:
    """Return text such as 1e-3 as a number; what is none is refused later, with the allowed
    range."""
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def as_word(value: str) -> str:
    """Return what `parse_overrides` reads as this string, where the knob takes one."""
    return (
        json.dumps(value, ensure_ascii=False)
        if value in NULLS or value.startswith(QUOTES)
        else value
    )
