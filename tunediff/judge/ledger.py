"""Keep the ledger of a repository: which comparisons were made, at which level, and what came out.

`.tunediff/ledger.jsonl` has a line when a comparison begins, which spends from the error budget,
and one when it is over. It is to be committed with the changes that it judged.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunediff.analysis import online_fdr, pairs
from tunediff.analysis.statistics import BETTER
from tunediff.core.errors import ConfigError
from tunediff.core.files import write_text
from tunediff.core.git import git

FILE = Path(".tunediff") / "ledger.jsonl"
RECHECK = 5
"""Changes that may be kept until the head is compared again with the last confirmed version."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One comparison of the chain."""

    number: int
    """From 1."""
    name: str
    level: float
    head: str | None
    """The commit of the repository when it began."""
    confirms: bool = False
    """Whether it compares the head with the last confirmed version."""
    verdict: str | None = None
    """None: not over."""

    @property
    def kept(self) -> bool:
        return self.verdict == BETTER


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The comparisons of a repository so far, in the order in which they began."""

    file: Path
    entries: list[Entry]
    head: str | None

    @classmethod
    def read(cls, folder: Path | None = None) -> Ledger:
        """Return the ledger of the repository around a folder. Raises `ConfigError`."""
        folder = Path() if folder is None else folder
        try:
            top = Path(
                git(folder, "rev-parse", "--show-toplevel", where="--ledger").decode().strip()
            )
        except ConfigError:
            top = folder.absolute()
        head = git(top, "rev-parse", "HEAD", where="--ledger", check=False).decode().strip()
        file, entries = top / FILE, dict[int, Entry]()
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            try:
                content = json.loads(line)
                number = content["number"]
                if content["event"] == "begin":
                    names = [field.name for field in dataclasses.fields(Entry)]
                    known = {name: content[name] for name in names if name in content}
                    entries[number] = Entry(**known)
                else:
                    entries[number] = dataclasses.replace(
                        entries[number], verdict=content["verdict"]
                    )
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{file}: is damaged: {error}: {line[:60]}") from None
        return cls(file, [*entries.values()], head if len(head) == 40 else None)

    def level(self, budget: float) -> float:
        """Return the level of the next comparison."""
        return online_fdr.level_of([entry.kept for entry in self.entries], budget)

    @property
    def confirmed(self) -> str | None:
        """Return the last confirmed commit, at first that of the beginning."""
        heads = [entry.head for entry in self.entries if entry.confirms and entry.kept]
        return heads[-1] if heads else self.entries[0].head if self.entries else self.head

    @property
    def kept_since_confirmed(self) -> int:
        """Return how many changes were kept since a comparison has last confirmed the head."""
        kept = 0
        for entry in self.entries:
            if entry.confirms and entry.kept:
                kept = 0
            elif entry.kept:
                kept += 1
        return kept

    @property
    def is_due(self) -> bool:
        """Return whether the head is to be compared again with the last confirmed version."""
        return self.kept_since_confirmed >= RECHECK

    def begin(self, name: str, level: float, confirms: bool) -> int:
        """Write that a comparison begins; return its number."""
        number = len(self.entries) + 1
        line = {"name": name, "level": level, "head": self.head, "confirms": confirms}
        self._append({"event": "begin", "number": number, **line})
        return number

    def end(self, number: int, verdict: str) -> None:
        """Write how a comparison ended, once."""
        if all(entry.number != number or entry.verdict is None for entry in self.entries):
            self._append({"event": "end", "number": number, "verdict": verdict})

    def _append(self, content: Mapping[str, Any]) -> None:
        self.file.parent.mkdir(exist_ok=True)
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps({**content, "time": round(time.time())}) + "\n")

    def state(self, number: int, budget: float) -> dict[str, Any]:
        """Return what the result of one of its comparisons says of it."""
        return {
            "number": number,
            "budget": budget,
            "rule": online_fdr.RULE,
            "level": self.entries[number - 1].level,
            "kept": sum(entry.kept for entry in self.entries),
            "kept_since_confirmed": self.kept_since_confirmed,
            "confirmed": self.confirmed,
            "recheck_due": self.is_due,
        }


def begin(folder: Path, options: Any) -> None:
    """Let the comparison in a new folder spend its level, if it is one of the ledger."""
    if options.ledger:
        ledger = Ledger.read()
        number = ledger.begin(folder.name, ledger.level(options.level), options.confirm)
        state = {**Ledger.read().state(number, options.level), "file": str(ledger.file)}
        write_text(folder / pairs.LEDGER, json.dumps(state) + "\n")


def end(folder: Path) -> None:
    """Write the verdict of a comparison that is over into its ledger, if it has one."""
    found = pairs.read(folder)
    if found.ledger and found.verdict is not None:
        top = Path(found.ledger["file"]).parents[1]
        if not top.is_dir():  # the folder was brought from another machine
            return
        number, budget = found.ledger["number"], found.ledger["budget"]
        Ledger.read(top).end(number, found.verdict)
        state = {**Ledger.read(top).state(number, budget), "file": found.ledger["file"]}
        write_text(folder / pairs.LEDGER, json.dumps(state) + "\n")
