"""Remove knobs from a search space that the command line fixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Values
from tunediff.config.knobs import refuse
from tunediff.core import text
from tunediff.search_space.searched_knobs import spread


@dataclasses.dataclass(frozen=True)
class Narrowed:
    """A search file's content without the knobs that the command line fixes."""

    content: Lines
    words: list[str]
    """The `knob=value` words that change the baseline."""
    notices: list[str]
    """Messages for the user: what is no longer searched, and why."""


def narrow(
    content: Lines, source: str, folder: Path = Path(), words: Sequence[str] = ()
) -> Narrowed:
    """Let `knob=value` override a file's `search:` or `grid:`, not points of `trials:` or rungs.

    A fixed knob is not searched, and neither is a knob that applies only to other values of it. A
    knob of a union's member stays a dimension with one choice while the union itself is searched,
    because other members do not have it. Raises `ConfigError` for unknown knobs or values.
    """
    form = next((key for key in ("search", "grid") if isinstance(content.get(key), dict)), None)
    if not words or form is None or ("workload" in content) == ("base" in content):
        return Narrowed(content, list(words), [])
    return _Narrowing(content, source, folder, words, form).narrowed()


class _Narrowing:
    """The state of one call of `narrow`."""

    def __init__(
        self, content: Lines, source: str, folder: Path, words: Sequence[str], form: str
    ) -> None:
        self.content, self.source, self.words, self.form = content, source, words, form
        self.searched: Lines = spread(content[form], f"{source}: {form}")
        self.baseline = cfg.flatten(content.get("baseline") or {}, f"{source}: baseline")
        named = content.get("workload")
        base = (
            cfg.baseline(str(named), source, folder)
            if named
            else cfg.load(folder / str(content["base"]))
        )
        fixed = cfg.flatten(content.get("fixed") or {}, f"{source}: fixed")
        base = cfg.override(base, fixed, f"{source}: fixed", check=False)
        self.base = cfg.override(base, self.baseline, f"{source}: baseline", check=False)
        self.schema = self.base.schema
        values = cfg.parse_overrides(words, self.schema)
        self.single = {
            name: value for name, value in values.items() if self._of_searched_union(name, values)
        }
        self.values = {name: value for name, value in values.items() if name not in self.single}
        self.notices: list[str] = []

    def _of_searched_union(self, name: str, values: Values) -> bool:
        """Return whether it is a searched knob that only some members of a searched union have."""
        knob = self.schema.knobs[name]
        union = knob.member[0] if knob.member is not None else ""
        return name in self.searched and union in self.searched and union not in values

    def narrowed(self) -> Narrowed:
        """Return the content without the fixed knobs, the remaining words, and the messages."""
        # Knobs that are fixed although the file searches them
        fixed = {
            name: value
            for name, value in (self.values | self.single).items()
            if name in self.searched
        }
        config = cfg.override(self.base, self.values, where="command line", check=False)
        for name, value in fixed.items():
            consequence = f"what {Path(self.source).name} says of it is not searched"
            self.notices.append(
                f"{name} is fixed at {text.knob_value(value)} by the command line; {consequence}"
            )
        search = self._search(cfg.flat(config))
        refuse(
            fixed and not search,
            f"command line: fixes every knob that {self.source} searches; leave one out",
        )
        content = {**self.content, self.form: search}
        # The baseline has a value of a union's knob only if it has that member of the union.
        ours = {
            name: self.single.get(name, value)
            for name, value in self.baseline.items()
            if name in search or name not in self.searched
        }
        ours |= {name: value for name, value in self.single.items() if name in cfg.flat(config)}
        if "baseline" in content or ours:
            content["baseline"] = ours
        if isinstance(points := self.content.get("first"), list):
            left = (self._left_of(i, point, search, config) for i, point in enumerate(points))
            content["first"] = [point for point in left if point is not None]
        words = [word for word in self.words if word.partition("=")[0] not in self.single]
        return Narrowed(content, words, self.notices)

    def _search(self, chosen: Mapping[str, Any]) -> Lines:
        """Return what is still searched. `chosen`: the baseline with the fixed knobs."""
        search: Lines = {}
        for name, spec in self.searched.items():
            if name in self.values:
                continue
            knob = self.schema.knob(name, f"{self.source}: {self.form}")
            union = knob.member[0] if knob.member is not None else ""
            left = self._conditions(spec, search)
            if left is None or (union in self.values and name not in chosen):
                fixed = union if union in self.values else "knob that is fixed"
                self.notices.append(f"{name} is not searched: it applies only to another {fixed}")
                continue
            search[name] = left
            if name in self.single:
                search[name] = {"choice": [self._checked(name)]}
                if isinstance(left, dict) and "when" in left:
                    search[name]["when"] = left["when"]
        return search

    def _conditions(self, spec: Any, search: Lines) -> Any:
        """Return a dimension without its conditions on fixed knobs; None if one does not hold."""
        when = spec.get("when") if isinstance(spec, dict) else None
        if not isinstance(when, dict):
            return spec
        left = {}
        for name, allowed in when.items():
            if name in self.values:
                if self.values[name] not in (allowed if isinstance(allowed, list) else [allowed]):
                    return None
            elif name in self.searched and name not in search:
                return None  # not searched any more: its own condition does not hold
            else:
                left[name] = allowed
        rest = {key: value for key, value in spec.items() if key != "when"}
        return {**rest, "when": left} if left else rest

    def _checked(self, name: str) -> Any:
        """Return the fixed value of a union's knob. Raises `ConfigError`."""
        union, member = self.schema.knobs[name].member
        values = {union: member, name: self.single[name]}
        return cfg.flat(cfg.override(self.base, values, where="command line", check=False))[name]

    def _left_of(self, i: int, point: Any, search: Lines, config: Any) -> Any:
        """Return a listed point without the knobs that are not searched any more; None: it
        contradicts a fixed one."""
        if not isinstance(point, dict):
            return point  # reported later
        flat = cfg.flatten(point, f"{self.source}: first[{i}]")
        left = {name: value for name, value in flat.items() if name in search}
        left |= {name: value for name, value in flat.items() if name not in self.searched}
        try:
            members = cfg.flat(cfg.override(config, left, check=False))
            left |= {name: value for name, value in self.single.items() if name in members}
            cfg.override(config, left, where=f"first[{i}]")
        except ConfigError as error:
            if left == flat and not self.values:
                return left  # reported later, with its place in the file
            self.notices.append(f"a point is left out: {error}")
            return None
        return left
