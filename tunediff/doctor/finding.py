"""What a check says, and how it is shown. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tunediff.config.code import described

State = Literal["ok", "weak", "missing", "wrong", "skipped"]
"""`weak`: it works, with a limit that a search feels; `missing`: it does not work; `wrong`: it gives what it should
not; `skipped`: it cannot be looked at here."""
WIDTH = 118


@dataclasses.dataclass(frozen=True)
class Site:
    """What is looked at."""

    storage: Path
    """Folder of all searches."""
    device: str
    """What trainings run on: `cpu` or `cuda`."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a check returns."""

    state: State
    found: str
    means: str = ""
    """For a search, in plain words."""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What was measured; a name says its unit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding(Answer):
    """One line of the result."""

    name: str
    needed: bool
    """Whether no search can run, or none be relied on, without it."""
    seconds: float

    @property
    def stops(self) -> bool:
        """Return whether this finding stops a search from being started."""
        return self.needed and self.state in ("missing", "wrong")


def check(name: str, needed: bool = False) -> Callable[[Callable[[Site], Answer]], Callable[[Site], Finding]]:
    """Return a decorator that makes a check of a function. What it raises is its finding: a doctor must not die of what
    it finds."""

    def decorate(look: Callable[[Site], Answer]) -> Callable[[Site], Finding]:
        @functools.wraps(look)
        def examine(site: Site) -> Finding:
            begin = time.monotonic()
            try:
                answer = look(site)
            except Exception as error:
                text = " ".join(described(error).split())
                answer = Answer("missing", text[:300], "looking at it ended so; a search that needs it will too")
            return Finding(**vars(answer), name=name, needed=needed, seconds=time.monotonic() - begin)

        return examine

    return decorate


# -------------------------------------------------------------------------------------------------------------- shown
def lines(finding: Finding) -> list[str]:
    """Return lines for the console: state and name, what was found, and below it what that means."""
    head = f"{finding.state:<8}{finding.name:<22}"
    indent = " " * 30
    words, below = _wrapped(finding.found, WIDTH - 30) or [""], _wrapped(finding.means, WIDTH - 32)
    first = f"{head}{words[0]}" if len(head) <= 30 else f"{head}\n{indent}{words[0]}"
    return [first.rstrip(), *(indent + word for word in words[1:]), *(f"{indent}  {word}" for word in below)]


def _wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a wrapped text; addresses and paths stay whole, so that they can be pasted."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def verdict(findings: Sequence[Finding]) -> str:
    """Return a sentence on whether a search can run here."""
    if stops := [finding.name for finding in findings if finding.stops]:
        return f"a search should not be started here: {', '.join(stops)}"
    limits = {
        state: ", ".join(finding.name for finding in findings if finding.state == state)
        for state in ("wrong", "weak", "missing")
    }
    return "; ".join(["a search can run here", *(f"{state}: {names}" for state, names in limits.items() if names)])
