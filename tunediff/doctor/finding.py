"""What a check says, and how it is shown. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tunediff.config.code import described

State = Literal["ok", "weak", "missing", "wrong", "skipped"]
"""`weak`: it works, with a limit that a search feels; `missing`: it does not work; `wrong`: it
gives what it should not; `skipped`: it cannot be looked at here."""


@dataclasses.dataclass(frozen=True)
class Site:
    """What is looked at: the folder of all searches, and what trainings run on, `cpu` or `cuda`."""

    storage: Path
    device: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a check returns; `numbers` that were measured have their units in their names."""

    state: State
    found: str
    means: str = ""
    """For a search, in plain words."""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding(Answer):
    """One line of the result; `needed`: no search can run, or be relied on, without it."""

    name: str
    needed: bool
    seconds: float

    @property
    def stops(self) -> bool:
        """Return whether this finding stops a search from being started."""
        return self.needed and self.state in ("missing", "wrong")


def check(
    name: str, needed: bool = False
) -> Callable[[Callable[[Site], Answer]], Callable[[Site], Finding]]:
    """Return a decorator that makes a check of a function. What it raises is its finding."""

    def decorate(look: Callable[[Site], Answer]) -> Callable[[Site], Finding]:
        @functools.wraps(look)
        def examine(site: Site) -> Finding:
            begin = time.monotonic()
            try:
                answer = look(site)
            except Exception as error:
                text = " ".join(described(error).split())
                answer = Answer("missing", text[:300], "a search that needs it will end so too")
            seconds = time.monotonic() - begin
            return Finding(**vars(answer), name=name, needed=needed, seconds=seconds)

        return examine

    return decorate


def lines(finding: Finding) -> list[str]:
    """Return lines for the console: state, name and what was found, and below what that means."""
    head = f"{finding.state:<8}{finding.name:<18}{finding.found}"
    return [head, *([f"{'':<28}{finding.means}"] if finding.means else [])]


def verdict(findings: Sequence[Finding]) -> str:
    """Return a sentence on whether a search can run here."""
    if stops := [finding.name for finding in findings if finding.stops]:
        return f"a search should not be started here: {', '.join(stops)}"
    limits = {
        state: ", ".join(finding.name for finding in findings if finding.state == state)
        for state in ("wrong", "weak", "missing")
    }
    named = (f"{state}: {names}" for state, names in limits.items() if names)
    return "; ".join(["a search can run here", *named])
