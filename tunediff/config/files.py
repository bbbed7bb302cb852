"""Configurations as YAML files and as `knob=value` words on a command line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tunediff.config import workload
from tunediff.config.knobs import ConfigError, Lines, Values, nearest, refuse
from tunediff.config.schema import C, Configuration, Schema, flatten, override, to_dict, with_absolute_paths

MOST_BYTES, MOST_VALUES, DEEPEST = 2**22, 300_000, 50
"""What a file may hold: more is a mistake, and would take minutes to say so."""
TOO_DEEP = f"is nested deeper than {DEEPEST} levels"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml


class _UniqueKeyLoader(_Loader):  # type: ignore[misc, valid-type]
    """SafeLoader that refuses a key written twice: YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _parsed(text: str) -> Any:
    """The content of YAML. Raises `yaml.YAMLError`, and `ValueError` for more than anybody would write by hand."""
    values, names, anchors = [0], list[str | None](), dict[str | None, int]()
    for event in yaml.parse(text, _Loader):  # what would end in a stack overflow is seen before it is built
        if isinstance(event, yaml.CollectionStartEvent):
            values.append(1)
            names.append(event.anchor)
            if len(values) > DEEPEST:
                raise ValueError(TOO_DEEP)
        elif isinstance(event, yaml.CollectionEndEvent):
            inside = anchors[names.pop()] = values.pop()
            values[-1] += inside
        elif isinstance(event, yaml.AliasEvent):  # it stands for all that its anchor holds
            if event.anchor not in anchors:
                raise ValueError(f"*{event.anchor} stands for nothing that ends before it")
            values[-1] += anchors[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            anchors[event.anchor] = 1
            values[-1] += 1
        if values[-1] > MOST_VALUES:
            raise ValueError(f"holds more than {MOST_VALUES:,} values")
    return yaml.load(text, _UniqueKeyLoader)


def read_text(path: Path, most: int) -> str:
    """A text file of at most so many bytes, of which no more are read: /dev/zero has no end. Raises `ConfigError`."""
    refuse(path.is_dir(), f"{path}: is a folder, not a file")
    try:
        with open(path, "rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    refuse(b"\0" in content[:1000], f"{path}: is a binary file, not a text file")
    refuse(len(content) > most, f"{path}: holds more than {most // 2**20} MiB, which is no configuration")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8") from None


def read_yaml(path: Path) -> Lines:
    """The mapping in a YAML file; `ConfigError` for anything that is not one."""
    text = read_text(path, MOST_BYTES)
    try:
        content = _parsed(text)
    except yaml.YAMLError as error:
        said = " ".join(str(error).replace(' in "<unicode string>"', "").split())
        # PyYAML from 6.0.4 on has a limit of its own, a thousand levels, and reads that far ahead of its events.
        deep = "maximum nesting depth" in said
        raise ConfigError(f"{path}: {TOO_DEEP if deep else f'is not valid YAML: {said}'}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    refuse(content is None, f"{path}: is empty; it needs `key: value` lines")
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, found {type(content).__name__}")
    return content


def load(path: Path, words: Sequence[str] = ()) -> Any:
    """A configuration file, sections or dotted names; what is missing takes its default. `words` go on top.

    Raises `ConfigError`.
    """
    content = read_yaml(path)
    kind = f"{path}: is a search file, not a configuration; its best one is what python -m tunediff.export NAME writes"
    refuse("budget" in content and {"search", "grid", "trials", "ladder"} & content.keys(), kind)
    schema = workload.named_in(content, str(path), path.absolute().parent).schema
    config = override(schema.default(), flatten(content), where=str(path), check=not words)
    return with_words(config, words)


def named(path: Path, words: Sequence[str], where: str = "--config") -> Any:
    """The configuration a user means: a file, such as an exported best.yaml; or a baseline by its name, `mine.py` too.

    `where`: what a refusal names. Raises `ConfigError`.
    """
    name = str(path)
    ours = name in workload.baseline_names() and not path.is_file()
    if ours or workload.is_users(name.partition(":")[0]):
        return with_words(workload.baseline(name, where), words)
    if not path.exists():
        near = nearest(name, workload.baseline_names())
        raise ConfigError(f"{name}: no such file, and no baseline of that name; {near}{apart([name, *words])}")
    return load(path, words)


def with_words(config: C, words: Sequence[str]) -> C:
    """The configuration with `knob=value` words on top, its files by absolute paths. Raises `ConfigError`."""
    return with_absolute_paths(override(config, parse_overrides(words, config.schema), where="command line"))


def dump(config: Configuration, comments: list[str] | None = None, folder: Path | None = None) -> str:
    """YAML text of the full configuration, `comments` as `#` lines above it.

    A user's workload inside `folder`, where the text is to lie, is named relative to it.
    """
    head, content = "".join(f"# {line}\n" for line in comments or []), to_dict(config)
    if folder is not None and Path(content["workload"]).is_relative_to(folder.absolute()):
        content["workload"] = str(Path(content["workload"]).relative_to(folder.absolute()))
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None)


def apart(words: Sequence[str]) -> str:
    """`; did you mean optimizer.lr=3e-3?` where a knob and its value are words of their own; '' otherwise."""
    for i, word in enumerate(words[:-1]):
        name, value = word.removesuffix("="), "".join(words[i + 1 : i + 2 + (words[i + 1] == "=")]).removeprefix("=")
        named = re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) and not name.endswith((".yaml", ".yml", ".py"))
        valued = value and "=" not in value and (word != name or words[i + 1][0] in "=-[0123456789" or "." in name)
        if named and valued:
            return f"; did you mean {name}={value}?"
    return ""


def parse_overrides(words: Sequence[str], schema: Schema) -> Values:
    """`knob=value` words from a command line; values are YAML, and numbers may be written 1e-3."""
    values: Values = {}
    for word in words:
        name, equals, text = word.partition("=")
        refuse(not (name and equals), f"command line: {word!r} is not understood; write knob=value{apart(words)}")
        knob = schema.knob(name, "command line")
        twice = [other for other in words if other.partition("=")[0] == name]
        refuse(name in values, f"command line: {name}: is given twice: {', '.join(twice)}")
        try:
            value = _parsed(text)
        except (yaml.YAMLError, ValueError):
            raise ConfigError(f"command line: {name}: {text!r} is not understood; allowed: {knob.allowed}") from None
        if isinstance(value, str) and knob.kind == "float":
            with contextlib.suppress(ValueError):  # what is no number is refused with the allowed range
                value = float(value)
        values[name] = value
    return values
