"""Fill the parameters of one run into a command line."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tunediff.config.knobs import ConfigError

PLACES = ("seed", "folder", "gpus", "port", "budget_s")
"""Names that the judge fills in; no parameter may have one of them."""
LISTS = {"overrides": "{name}={value}", "flags": "--{name} {value}"}
"""Words that stand for all parameters which the command does not name, and how they look."""
_NAME = re.compile(r"(?<!\{)\{(?P<name>[A-Za-z_][\w.\-]*)\}(?!\})")


@dataclasses.dataclass(frozen=True)
class CommandTemplate:
    """A command line in which `{name}` stands for the value of a parameter.

    `{{name}}` is the text `{name}`, and braces around anything that is no name stay as they are
    (JSON, a shell's `${VAR}` is not: write `$VAR`).
    """

    words: tuple[str, ...]
    shell: bool = False
    """Whether the text goes to `sh -c`; otherwise it is split as a shell would split it."""

    @classmethod
    def of(
        cls, command: str | Sequence[str], where: str, *, shell: bool = False
    ) -> CommandTemplate:
        """Return the template of a command line or of its words. Raises `ConfigError`."""
        if not isinstance(command, str):
            words = [str(word) for word in command]
        elif shell:
            words = [command]
        else:
            try:
                words = shlex.split(command)
            except ValueError as error:
                raise ConfigError(f"{where}: {command!r}: {error}") from None
        if not words or not words[0].strip():
            raise ConfigError(f"{where}: {command!r} is not allowed; allowed: a command line")
        if shell and len(words) > 1:
            raise ConfigError(
                f"{where}: a list of words is not allowed with a shell; allowed: a text"
            )
        for name in () if shell else LISTS:
            inside = [w for w in words if f"{{{name}}}" in w and w != f"{{{name}}}"]
            if inside:
                raise ConfigError(
                    f"{where}: {inside[0]!r} is not allowed; {{{name}}} is a word alone"
                )
        return cls(tuple(words), shell)

    @property
    def names(self) -> list[str]:
        """Return all names between braces, in order."""
        return list(dict.fromkeys(name for word in self.words for name in _NAME.findall(word)))

    @property
    def parameters(self) -> list[str]:
        """Return the parameters that the command names, in order."""
        return [name for name in self.names if name not in PLACES and name not in LISTS]

    @property
    def takes_all(self) -> bool:
        """Return whether parameters that are not named reach the command too."""
        return any(name in LISTS for name in self.names)

    def check(self, parameters: Sequence[str], where: str, *, unseeded: bool = False) -> None:
        """Raise `ConfigError` for a parameter that the command never gets, or one without a value.

        Without `{seed}` runs differ by chance or not at all, which has to be meant: `unseeded`.
        """
        for name in parameters:
            if name in PLACES or name in LISTS:
                raise ConfigError(
                    f"{where}: {name}: is filled in by tunediff; allowed: another name"
                )
            if name not in self.parameters and not self.takes_all:
                raise ConfigError(
                    f"{where}: {name}: the command does not name it; allowed: {{{name}}} in the"
                    " command, or {overrides} or {flags} for all parameters"
                )
        for name in self.parameters:
            if name not in parameters:
                has = ", ".join(parameters) or "none"
                raise ConfigError(f"{where}: {{{name}}} has no value; parameters with one: {has}")
        if ("seed" in self.names) == unseeded:
            raise ConfigError(
                f"{where}: the command {'gets a seed, with' if unseeded else 'never gets a seed, without'}"
                " --unseeded; allowed: {seed} in the command, or --unseeded for a training without"
                " one"
            )

    def render(self, values: Mapping[str, Any], places: Mapping[str, Any]) -> list[str]:
        """Return the words of one run. `values`: of its parameters; `places`: see `PLACES`."""
        rest = {name: value for name, value in values.items() if name not in self.parameters}
        known = {**places, **values}
        if self.shell:
            lists = {name: shlex.join(_listed(name, rest)) for name in LISTS}
            texts = {name: shown(value) for name, value in known.items()}
            return ["/bin/sh", "-c", _unescaped(_quoted(self.words[0], texts, lists))]
        words: list[str] = []
        for word in self.words:
            if word in ("{overrides}", "{flags}"):
                words += _listed(word[1:-1], rest)
            else:
                words.append(_filled(word, {name: shown(value) for name, value in known.items()}))
        return words


def _listed(form: str, values: Mapping[str, Any]) -> list[str]:
    if form == "overrides":
        return [f"{name}={shown(value)}" for name, value in values.items()]
    pairs = ([f"--{name.replace('_', '-')}", shown(value)] for name, value in values.items())
    return [word for pair in pairs for word in pair]


def _quoted(line: str, texts: Mapping[str, str], lists: Mapping[str, str]) -> str:
    """Fill values into a shell's line, each as a part of one word, also inside of quotes."""
    quote = ""  # that stands open

    def filled(match: re.Match[str]) -> str:
        nonlocal quote
        if (name := match["name"]) is None:
            if match[0] == quote:
                quote = ""
            elif match[0] in ("'", '"') and not quote:
                quote = match[0]
            return match[0]
        if name in lists or name not in texts:
            return lists.get(name, match[0])
        if quote == "'":
            return texts[name].replace("'", "'\\''")
        if quote:
            return re.sub(r'[\\"$`]', r"\\\g<0>", texts[name])
        return shlex.quote(texts[name])

    return re.sub(rf"\\.|['\"]|{_NAME.pattern}", filled, line)


def _filled(word: str, texts: Mapping[str, str]) -> str:
    return _unescaped(_NAME.sub(lambda match: texts.get(match[1], match[0]), word))


def _unescaped(word: str) -> str:
    """Return a text in which `{{name}}` is `{name}`."""
    return re.sub(r"\{\{([A-Za-z_][\w.\-]*)\}\}", r"{\1}", word)


def shown(value: Any) -> str:
    """Return a value as a command line has it: `true`, `null`, `0.001`, `[1,2]`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    return repr(value) if isinstance(value, float) else str(value)
