"""Keep the ledger of a repository: which comparisons were made, at which level, and what came out.

`.tunediff/ledger.jsonl` has a line when a comparison begins, which spends from the error budget,
and one when it is over. It is to be committed with the changes that it judged; lines that two
branches have added may follow each other in any order.

Who tries a hundred changes at a level of 5 % keeps two or three that change nothing. Here each
comparison gets a level of its own, so that at any time at most a share of `budget` of all changes
that were kept is expected to be none. The rule is LORD++: A. Ramdas, F. Yang, M. J. Wainwright,
M. I. Jordan, Online control of the false discovery rate with decaying memory, NeurIPS 2017. Every
kept change earns level for the next ones; a long series without any makes them stricter.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunediff.analysis import sides
from tunediff.analysis.comparison import Comparison
from tunediff.command.worktrees import PROGRAM
from tunediff.core.errors import ConfigError
from tunediff.core.files import write_text
from tunediff.core.git import git
from tunediff.core.outcomes import Verdict
from tunediff.core.text import truncate
from tunediff.experiment.model import FILE as EXPERIMENT
from tunediff.experiment.model import Experiment

HERE, FILE = Path(), Path(".tunediff") / "ledger.jsonl"
"""The working folder, and the ledger in a repository."""
RULE = "LORD++"
POWER = 1.6
"""The share of the budget that is spent j comparisons later falls as j^−1.6, the sequence that A.
Ramdas et al. use for SAFFRON (ICML 2018): most of it is spent soon."""
ZETA = 2.2857656886
"""Riemann's zeta function of `POWER`: the shares sum to 1."""
FIRST_SHARE = 0.5
"""Share of the budget that is there before anything was kept."""
RECHECK = 5
"""Changes that may be kept until the head is compared again with the last confirmed version."""


def level_of(kept: Sequence[bool], budget: float) -> float:
    """Return the level of the next comparison; `kept`: whether each earlier one was better."""
    now, wealth = len(kept) + 1, FIRST_SHARE * budget
    discoveries = [number for number, better in enumerate(kept, 1) if better]
    level = wealth * _share(now)
    for order, number in enumerate(discoveries):
        # The first one earns what was not there from the beginning
        level += (budget - wealth * (order == 0)) * _share(now - number)
    return level


def _share(distance: int) -> float:
    return float(float(distance) ** -POWER) / ZETA


@dataclasses.dataclass(frozen=True)
class Entry:
    """One comparison of the chain."""

    id: str
    """Random: comparisons may begin at once, and on two branches."""
    name: str
    level: float
    head: str | None
    """The commit of the repository when it began."""
    confirms: bool = False
    """Whether it compares the head with the last confirmed version."""
    runs: str = ""
    """See `_runs`; '': it was written before that was known."""
    verdict: Verdict = Verdict.OPEN
    time: int = 0
    """Unix time at which it began."""

    @property
    def kept(self) -> bool:
        return self.verdict == Verdict.BETTER


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The comparisons of a repository so far, in the order of their lines."""

    file: Path
    entries: list[Entry]
    head: str | None

    @classmethod
    def read(cls, folder: Path = HERE) -> Ledger:
        """Return the ledger of the repository around a folder. Raises `ConfigError`."""
        where = "--ledger"
        top = git(folder, "rev-parse", "--show-toplevel", where=where, check=False).decode().strip()
        head = git(folder, "rev-parse", "HEAD", where=where, check=False).decode().strip()
        file, entries = Path(top or folder.absolute()) / FILE, dict[str, Entry]()
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            try:
                content = json.loads(line)
                event, key = content.pop("event"), content["id"]
                if event != "begin":
                    verdict = Verdict(content["verdict"])
                    entries[key] = dataclasses.replace(entries[key], verdict=verdict)
                elif key in entries:
                    raise ValueError(f"{key} is there twice")
                else:
                    entries[key] = Entry(**content)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{file}: is damaged: {error}: {line[:60]}") from None
        return cls(file, [*entries.values()], head if len(head) == 40 else None)

    def level(self, budget: float) -> float:
        """Return the level of the next comparison."""
        return level_of([entry.kept for entry in self.entries], budget)

    @property
    def confirmed(self) -> str | None:
        """Return the commit that was confirmed last; at first it is that of the first line."""
        confirming = [entry for entry in self.entries if entry.confirms and entry.kept]
        return next((entry.head for entry in [*reversed(confirming), *self.entries]), None)

    def append(self, event: str, **content: Any) -> None:
        """Write one line, whole: others may write theirs at the same time."""
        line = json.dumps({"event": event, **content, "time": round(time.time())})
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def state(self, key: str, budget: float) -> dict[str, Any]:
        """Return what the result of one of its comparisons says of it.

        A kept comparison that confirms makes its head the confirmed one; at first it is the first.
        """
        number = [entry.id for entry in self.entries].index(key) + 1
        rechecks = (  # unless one finds the head better, its changes are taken back
            number
            for number, entry in enumerate(self.entries, 1)
            if entry.confirms and entry.verdict not in (Verdict.OPEN, Verdict.FAILED)
        )
        since = sum(entry.kept for entry in self.entries[max(rechecks, default=0) :])
        return {
            "number": number,
            "budget": budget,
            "rule": RULE,
            "level": self.entries[number - 1].level,
            "kept": sum(entry.kept and not entry.confirms for entry in self.entries),
            "kept_since_confirmed": since,
            "confirmed": self.confirmed,
            "recheck_due": since >= RECHECK,
            "file": str(self.file),
            "id": key,
        }


@contextmanager
def _locked(folder: Path = HERE) -> Iterator[Ledger]:
    """Read the ledger while nobody else writes to it. Raises `ConfigError`."""
    file = Ledger.read(folder).file
    file.parent.mkdir(exist_ok=True)
    with open(file, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Ledger.read(folder)


def _runs(folder: Path) -> str:
    """Return what comparisons have in common whose runs have the same noise: both versions and
    their seeds. '': none are, there is no seed."""
    code, asked = sides.content(folder, sides.CODE), Experiment.read(folder)
    digests = [code[side]["digest"] for side in sides.SIDES]
    same = [code["first_seed"], *digests]
    return "" if asked.unseeded else hashlib.sha256(json.dumps(same).encode()).hexdigest()[:16]


def check(folder: Path, confirms: bool) -> None:
    """Refuse a comparison that the ledger has decided: its runs would be the same, so that it says
    nothing new and must not earn level once more; and one that `confirms` another version than that
    of the ledger. Raises `ConfigError`."""
    ledger, runs = Ledger.read(), _runs(folder)
    name = Experiment.read(folder).candidates["A"]  # such as mine.py@main, or main lr=1
    parse = ("rev-parse", "--verify", "--quiet", "--end-of-options")
    commits = [
        git(Path(), *parse, f"{word}^{{commit}}", where="git", check=False)
        for word in re.split(r"[@\s]", name)
    ]
    status = git(Path(), "status", "--porcelain", "-z", "-uall", where="git", check=False)
    top, storage = ledger.file.parents[1], folder.parent
    edited = [  # new files may be imported, but for results with their copies of code
        name
        for name in status.decode().split("\0")
        if name and not (top / name[3:]).is_relative_to(ledger.file.parent) and (
            name[:2] != "??" or (name.endswith(PROGRAM) and not any(
                parent == storage != top or (parent / EXPERIMENT).is_file()
                for parent in (top / name[3:]).parents
            ))
        )
    ]  # fmt: skip
    if confirms and edited:
        raise ConfigError(
            f"--confirm: not committed: {truncate(', '.join(edited), 200)}; allowed: the head as B,"
            " or git ignores it"
        )
    if confirms and ledger.confirmed not in [commit.decode().strip() for commit in commits]:
        raise ConfigError(
            f"--confirm: A is {name}; allowed: the version that was confirmed last,"
            f" {ledger.confirmed or 'none yet'}"
        )
    for entry in ledger.entries:
        is_open = entry.verdict == Verdict.OPEN and (folder.parent / entry.name).is_dir()
        if runs and entry.runs == runs and (
            is_open or entry.verdict not in (Verdict.OPEN, Verdict.FAILED)
        ):  # fmt: skip
            raise ConfigError(
                f"--ledger: {entry.name} compares these versions on the same seeds:"
                f" {entry.verdict}; allowed: {f'--resume {entry.name}, or ' * is_open}a changed version"
            )


def begin(folder: Path, options: Any) -> None:
    """Let the comparison in a new folder spend its level, if it is one of the ledger.

    Its rules get the level that the ledger has for it now: others may have begun meanwhile.
    """
    if not options.ledger:
        return
    with _locked() as ledger:
        key, level = uuid.uuid4().hex, ledger.level(options.level)
        experiment = Experiment.read(folder)
        experiment.test.level = own_level(level, options)
        experiment.write(folder)
        ledger.append(
            "begin",
            id=key,
            name=folder.name,
            level=level,
            head=ledger.head,
            runs=_runs(folder),
            confirms=options.confirm,
        )
        state = json.dumps(Ledger.read().state(key, options.level))
    write_text(folder / sides.LEDGER, f"{state}\n")


def own_level(spent: float, options: Any) -> float:
    """Return the level of a test that spends so much: «better» alone has what a ledger counts."""
    return spent if options.one_sided else 2 * spent


def end(folder: Path) -> None:
    """Write the verdict of a comparison that is over into its ledger, once, if it has one."""
    begun, verdict = sides.content(folder, sides.LEDGER), Comparison.read(folder).verdict
    key, top = begun.get("id"), Path(begun.get("file", "/")).parent.parent
    is_elsewhere = not top.is_dir()  # it may be of another machine
    if key is None or verdict == Verdict.OPEN or is_elsewhere:
        return
    with _locked(top) as ledger:
        if all(entry.id != key for entry in ledger.entries):
            return  # its line is gone, as after a checkout of another branch; the verdict stays
        if any(entry.id == key and entry.verdict == Verdict.OPEN for entry in ledger.entries):
            ledger.append("end", id=key, verdict=verdict)
        state = Ledger.read(top).state(key, begun["budget"])
    write_text(folder / sides.LEDGER, json.dumps(state) + "\n")
