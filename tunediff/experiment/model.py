"""An experiment as its folder has it, in `experiment.yaml`: a search, the runs that confirm one, or
a comparison.

NAME/experiment.yaml   trials/tNNNN/journal.jsonl …
     baseline.yaml + workload/ (search) | A/config.yaml, B/config.yaml (comparison)
     confirm/, confirm-2/: experiments too
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator

from tunediff import config as cfg
from tunediff.config import Lines
from tunediff.config.knobs import validated
from tunediff.core import text
from tunediff.core.clock import UnitName
from tunediff.core.files import write_text
from tunediff.core.options import Section, option

FILE = "experiment.yaml"
CONFIG = "config.yaml"
CODE = "code.json"
"""File with the code of both sides and the first seed, or of the command of a search; see
`proof.frozen_code`."""
SIDES = ("A", "B")
"""Folders inside that of a comparison, each with a configuration."""
Kind = Literal["search", "confirmation", "comparison", "finished"]
Mode = Literal["min", "max"]
EarlyStoppingName = Literal["none", "asha"]
Better = Literal["value", "time"]
LEAST_PAIRS, MOST_PAIRS = 3, 1_000
"""Of a comparison: two pairs say nothing of their own noise. Confirming runs are first tested after
as many."""
Counted = Literal["first", "end"]
"""Which seconds count: those until the target is first met, or those of the whole run."""
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def seconds_of(value: Any) -> float:
    """Return the seconds of a duration above 0: a number, or in words 90s, 10m, 1h30m. Raises
    `ValueError`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        total = float(value)
    else:
        match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None or not any(match.groups()):
            raise ValueError(
                "is not a duration; allowed: a number with its unit, e.g. 90s, 10m, 1h30m"
            )
        hours, minutes, seconds = (float(part or 0) for part in match.groups())
        total = 3600 * hours + 60 * minutes + seconds
    if not 0 < total < math.inf:
        raise ValueError("is not allowed; allowed: a duration above 0, e.g. 90s")
    return total


Seconds = Annotated[
    float, BeforeValidator(seconds_of), PlainSerializer(text.format_exact, when_used="json")
]
"""Seconds; in a file and on a command line a number with its unit."""


class Share(float):
    """A share of a value, as its words `2%` have said it."""

    def __str__(self) -> str:
        return f"{100 * self:.15g}%"


def _share(value: Any) -> float:
    if isinstance(value, Share):
        return value
    words = value if isinstance(value, str) else str(float(value))
    try:
        number = Share(float(words[:-1]) / 100) if words.endswith("%") else float(words)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ValueError("is not allowed; allowed: a number above 0, or a share such as 2%")
    return number


class RunLimit(Section):
    """What ends a run, as far as commands and calls have options for it."""

    budget: Seconds | None = option(
        None,
        "training seconds of a run, e.g. 90s, 10m (default: that of the search file; in comparisons"
        " 60s, or the command's own end with --outcome final)",
        metavar="SECONDS",
    )
    """None: it goes on to its own end."""
    unit: UnitName = option(
        "wall",
        "what the budget counts: training seconds (wall, the default), or these times devices"
        " (device)",
    )
    compile: Literal["charged", "free", "cold", "shared"] = option(
        "charged",
        "whether compiling counts as training: charged (default) or free; the cache of compiled"
        " kernels of commands: cold in every run (default), or shared after one run of each side"
        " that does not count",
    )
    target: str | None = option(
        None,
        "decide by the time to reach this, e.g. val_loss<=3.28 (compare: with --better time)",
        metavar="CONDITION",
    )


class Limit(RunLimit):
    """What ends a run."""

    setup: Literal["charged", "free"] = "free"
    """Whether what a workload does before its first batch counts as training seconds."""
    deadline: Seconds | None = None
    """Wall-clock until `timeout`, evaluations included."""
    price_per_device_hour: float | None = None


class Drawing(Section):
    """The rule that ends a search."""

    trials: int | None = option(
        None, "trials in all, the baseline included", ge=1, allowed="a whole number of at least 1"
    )
    total: Seconds | None = option(
        None,
        "wall-clock of the whole search, confirming runs included, e.g. 8h",
        metavar="SECONDS",
    )
    early_stopping: EarlyStoppingName = option("none", "the rule that stops trials early")


class RuleOfPairs(Section):
    """The sequential test, as far as commands and calls have options for it."""

    better: Better = option(
        "value",
        "what B must be better in: the metric's value (default), or time, with values that are"
        " shown to meet --target, or to be no worse by --margin",
    )
    margin: float | None = option(
        None,
        "for --better time: how much worse than A's the metric may be",
        metavar="X",
        gt=0,
        allowed="a number above 0 in units of the metric, such as 0.01",
    )
    pairs: int = option(12, f"pairs of runs at most, 3 to {MOST_PAIRS:,} (default: 12)")
    within: (
        Annotated[float, PlainValidator(_share), PlainSerializer(str, when_used="json")] | None
    ) = option(
        None, "a difference that does not matter, e.g. 2% of A's value, or 0.01 of an accuracy"
    )
    level: float = option(
        0.05, "probability of a wrong verdict if nothing differs (default: 0.05)", metavar="P"
    )
    one_sided: bool = option(
        False, "one-sided test: B is never called worse, and gains are found sooner"
    )
    fixed: bool = option(False, "one analysis, after all --pairs: Student's t-test")
    equal: bool = option(False, "compare A with itself on other seeds, to test the comparison")


class SequentialTest(RuleOfPairs):
    """The sequential test that ends a comparison, or the runs that confirm a search."""

    counted: Counted = "end"


class FinishedRuns(Section):
    """How runs are judged that have ended elsewhere."""

    until_target: bool = False
    """Whether seconds are those until the target."""
    sd: float | None = option(
        None, "standard deviation of a run, if it is known: a z-test against --target", gt=0
    )
    paired_by: str | None = option(
        None, "a regular expression with one group that names the pair of a run", metavar="PATTERN"
    )


class Experiment(Section):
    """Candidates × seeds, run under one limit, until a rule is satisfied."""

    kind: Kind
    runner: Literal["workload", "command"] = "workload"
    """What makes a run: our engine with a workload, or a command."""
    objective: str
    """The deciding metric, as runs and judges name it."""
    mode: Mode
    cost: str | None = None
    """The second objective of a search."""
    candidates: dict[str, str] = Field(default_factory=dict)
    """The sides of a comparison, as the user named them; configurations are in their folders."""
    space: Lines = Field(default_factory=dict)
    """What the candidates of a search are drawn from, by keys of a search file."""
    limit: Limit = Limit()
    search: Drawing | None = None
    test: SequentialTest = SequentialTest()
    """Of comparisons and of what confirms a search."""
    devices: int = 1
    """Runs at the same time, each on a device of its own."""
    unseeded: bool = False
    """Whether the command takes no seed: its runs may be one, repeated."""
    judge: str | None = None
    """SHA-256 of what judges the runs; None: they judge themselves."""
    holdout: str | None = None
    """SHA-256 of what judges them again at the end."""
    track: str | None = None
    """The service that shows runs."""
    finished: FinishedRuns | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any], where: str) -> Experiment:
        """Return the experiment of a file's content. Raises `ConfigError`."""
        return validated(cls, content, where)

    @classmethod
    def read(cls, folder: Path) -> Experiment:
        """Return the experiment in a folder. Raises `ConfigError`."""
        return cls.of(cfg.read_yaml(folder / FILE), str(folder / FILE))

    def write(self, folder: Path) -> None:
        """Write it into its folder. Raises `OSError`."""
        write_text(folder / FILE, cfg.to_yaml(self.lines))

    @property
    def lines(self) -> Lines:
        """Return the content of its file: what is not empty."""
        lines = self.model_dump(
            mode="json", exclude_none=True, exclude={"test"} if self.search else None
        )
        return {key: value for key, value in lines.items() if value not in ({}, False)}

    @property
    def search_file(self) -> Lines:
        """Return a search, or what confirms one, as a search file has it."""
        limit = self.limit.model_dump(mode="json", exclude_none=True)
        target = limit.pop("target", None)
        budget = {"per_trial": limit.pop("budget"), **limit}
        objective = {"metric": self.objective, "cost": self.cost, "target": target}
        lines = {**self.space, "budget": budget, "track": self.track}
        lines["objective"] = {key: value for key, value in objective.items() if value is not None}
        if self.search is not None:
            rule = self.search.model_dump(mode="json", exclude_none=True)
            lines["early_stopping"] = rule.pop("early_stopping")
            budget |= rule
        if self.kind == "confirmation":
            lines["seeds"] = self.test.pairs
        if self.devices > 1:
            lines["at_once"] = self.devices
        return {key: value for key, value in lines.items() if value is not None}


def kind_of(folder: Path) -> str | None:
    """Return the kind of the experiment in a folder; None: there is none; "": it is damaged."""
    try:
        content = (folder / FILE).read_bytes()
    except OSError:
        return None
    found = re.search(rb"^kind: *(\w+)", content, re.MULTILINE)
    return found[1].decode() if found else ""


def is_search(folder: Path) -> bool:
    """Return whether a folder holds a search, or what confirms one."""
    return kind_of(folder) not in (None, "comparison")


def is_comparison(folder: Path) -> bool:
    """Return whether a folder holds a comparison."""
    return kind_of(folder) == "comparison"
