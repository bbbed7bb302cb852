"""Fix searched knobs from the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines
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
    """Messages for the user: what is no longer searched."""


def narrow(
    content: Lines, source: str, folder: Path = Path(), words: Sequence[str] = ()
) -> Narrowed:
    """Let `knob=value` override a file's `search:` or `grid:`, not points of `trials:` or rungs.

    A fixed knob is not searched, and neither is one that applies only beside other values of it. A
    knob of a union's member keeps its line with one choice while the union itself is searched,
    because other members do not have it. Raises `ConfigError` for unknown knobs or values.
    """
    form = next((key for key in ("search", "grid") if isinstance(content.get(key), dict)), None)
    if not words or form is None or ("workload" in content) == ("base" in content):
        return Narrowed(content, list(words), [])
    searched = spread(content[form], f"{source}: {form}")
    base, of_file = _start(content, source, folder)

    # ---- what the command line fixes: of all configurations, or of those of a union's member
    values, members = cfg.parse_overrides(words, base.schema), base.schema.members
    fixed = {name: value for name, value in values.items() if name in searched}
    union_of = {name: (base.schema.knob(name, source).member or ("",))[0] for name in searched}
    of_members = {
        name: value
        for name, value in fixed.items()
        if union_of[name] in searched and union_of[name] not in values
    }
    everywhere = {name: value for name, value in values.items() if name not in of_members}
    chosen = cfg.flat(cfg.override(base, everywhere, "command line", check=False))
    notices = list[str]()
    for name, value in fixed.items():
        if name in of_members:  # the member that has it knows what is allowed
            union, member = base.schema.knobs[name].member
            cfg.override(base, {union: member, name: value}, "command line", check=False)
        shown, consequence = text.knob_value(value), f"what {Path(source).name} says of it"
        notices.append(
            f"{name} is fixed at {shown} by the command line; {consequence} is not searched"
        )
    lines = _remaining(searched, fixed, of_members, union_of, members)
    refuse(
        fixed and not lines,
        f"command line: fixes every knob that {source} searches; leave one out",
    )
    of_baseline = {**of_file, **of_members}
    baseline = {name: v for name, v in of_baseline.items() if name in lines and name in chosen}
    content = {**content, form: lines, "baseline": baseline}

    # ---- points are taken without what is not searched any more, or left out
    points, left = content.get("first"), list[Any]()
    for index, point in enumerate(points if isinstance(points, list) else ()):
        flat = cfg.flatten(point, f"{source}: first[{index}]") if isinstance(point, dict) else {}
        kept = (lines.keys() | flat.keys() - searched.keys()) - fixed.keys()
        flat = {name: value for name, value in flat.items() if name in kept}
        try:
            config = cfg.flat(cfg.override(base, {**everywhere, **flat}, f"first[{index}]"))
            left.append(flat | {name: v for name, v in of_members.items() if name in config})
        except ConfigError as error:
            notices.append(f"a point is left out: {error}")
    content |= {"first": left} if isinstance(points, list) else {}
    return Narrowed(content, [w for w in words if w.partition("=")[0] not in of_members], notices)


def _start(content: Lines, source: str, folder: Path) -> tuple[Any, Lines]:
    """Return the configuration from which the file starts, and its values of searched knobs."""
    base: Any = (
        cfg.baseline(str(content["workload"]), source, folder)
        if "workload" in content
        else cfg.load(folder / str(content["base"]))
    )
    given: Lines = {}
    for place in ("fixed", "baseline"):
        given = cfg.flatten(content.get(place) or {}, f"{source}: {place}")
        base = cfg.override(base, given, f"{source}: {place}", check=False)
    return base, given


def _remaining(
    searched: Lines,
    fixed: Lines,
    of_members: Lines,
    union_of: Mapping[str, str],
    members: Mapping[str, Mapping[str, set[str]]],
) -> Lines:
    """Return the lines of knobs that are still searched; conditions on fixed knobs hold or drop
    the knob. `of_members`: the fixed knobs that keep a line with one choice."""
    lines: Lines = {}
    for name, space in searched.items():
        when = space.get("when", {}) if isinstance(space, dict) else {}
        union = union_of[name]
        holds = (union not in fixed or name in members[union][fixed[union]]) and all(
            (on in lines or on in fixed or on not in searched)
            and (on not in fixed or fixed[on] in (of if isinstance(of, list) else [of]))
            for on, of in when.items()
        )
        if not holds or name in fixed.keys() - of_members.keys():
            continue
        conditions = {on: of for on, of in when.items() if on not in fixed}
        without = {k: v for k, v in space.items() if k != "when"} if when else space
        line = {"choice": [of_members[name]]} if name in of_members else without
        lines[name] = {**line, "when": conditions} if conditions else line
    return lines
