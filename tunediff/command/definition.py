"""What is known of a command: its template, where its metrics are, and how a run is judged."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, Literal

from tunediff.command.clock import CommandClock
from tunediff.command.metrics import MetricPattern, Reduction, expression
from tunediff.command.template import CommandTemplate
from tunediff.config.knobs import ConfigError, validated
from tunediff.core import machine
from tunediff.core.options import Section, allow, option
from tunediff.core.target import TIME_TO_TARGET, Target
from tunediff.core.trial_record import LINE_KEYS
from tunediff.experiment.model import Mode, Seconds

FILE = "tunediff_command.yaml"
OutcomeName = Literal["budget", "final", "time"]
GAINS = re.compile(
    r"acc[15]?|accuracy|auc|auroc|bandwidth|bleu|dice|elo|f1|fps|hits?|m?iou|kappa|map|mcc|mfu|mrr"
    r"|ndcg|pass|precision|psnr|qps|r2|recall|returns?|rewards?|rouge|scores?|speedup|ssim|success"
    r"|throughput|top\d*|tps|wins?"
)
RATE = re.compile(r"(/|_per_)s(ec(ond)?)?$|@\d")
LOSSES = re.compile("err|error|loss|nll")
"""Words in names of metrics of which more is better, or less; `P@1`, `hit@10` are shares."""


def default_mode(objective: str, where: str) -> Mode:
    """Return `min`, where nobody has said which direction is better. Raises `ConfigError` for a
    name that says it of the other one."""
    words = re.findall("[a-z0-9]+", objective.lower())
    is_gain = any(map(GAINS.fullmatch, words)) or RATE.search(objective.lower())
    if is_gain and not any(map(LOSSES.fullmatch, words)):
        raise ConfigError(
            f"{where}: is missing: more of {objective} is better, to go by its name; allowed: max,"
            " or min"
        )
    return "min"


class CommandSettings(Section):
    """How a command is run and judged: what commands and calls have options for."""

    objective: str | None = option(
        None, "the metric that decides, as the command prints it", metavar="NAME"
    )
    mode: Mode | None = option(
        None,
        "which direction is better (default: min; names such as accuracy need it)",
    )
    pattern: str | None = option(
        None, "a regular expression that finds the metric; its one group is the number"
    )
    metrics: str | None = option(
        None,
        "a file with the metric, which the command writes, e.g. {folder}/results.json",
        metavar="FILE",
    )
    reduce: str = option(
        "last",
        "the value of a run: last (default), mean:K, min or max of its values; each: a process"
        " prints the results of several runs, and its value is their mean (each:1: without the"
        " first)",
    )
    outcome: OutcomeName = option(
        "budget",
        "the value at the budget (default), the final value, or the time until --target",
    )
    clock_from: str | None = option(
        None, "the clock begins at a line that matches this", metavar="PATTERN"
    )
    time: str | None = option(
        None,
        "the command's own seconds, e.g. train_time:(\\d+)ms, or a column of --metrics",
        metavar="PATTERN | COLUMN",
    )
    grace: Seconds = option(10.0, "from SIGTERM to SIGKILL (default: 10s)", metavar="SECONDS")
    timeout: Seconds | None = option(
        None,
        "a process that takes longer has failed (default: ten times the longest so far)",
        metavar="SECONDS",
    )
    shell: bool = option(False, "run the command by a shell")
    unseeded: bool = option(
        False, "the command takes no seed, on purpose: pairs are runs that follow each other"
    )


class CommandDefinition(CommandSettings):
    """A command and how it is judged; made once, kept with its results as `FILE`."""

    command: str | tuple[str, ...]
    objective: str
    mode: Mode = "min"
    target: str | None = None
    """What the objective is to reach, where the outcome is the time until then."""
    gpus: int = 0
    """GPUs of a run; 0: it sees all that the machine has."""
    folder: str = "."
    """Where the command runs."""

    def check(self, where: str) -> None:
        """Raise `ConfigError` for what is not allowed, with the name of the key."""
        if (self.outcome == "time") != (self.target is not None):
            raise ConfigError(
                f"{where}: target: {self.target!r} is not allowed with outcome: {self.outcome};"
                " allowed: a target with outcome: time, and no other"
            )
        if self.pattern is not None and self.metrics is not None:
            raise ConfigError(
                f"{where}: pattern: is for printed lines; allowed: pattern or metrics"
            )
        is_free = self.objective not in (*LINE_KEYS, TIME_TO_TARGET)
        other_name = "another name, with a pattern for its value"
        allow(is_free, f"{where}: objective", self.objective, other_name)
        MetricPattern(self.objective, self.pattern, f"{where}: pattern")
        is_block = Reduction(self.reduce, f"{where}: reduce").kind == "each"
        fits = self.outcome == "final" or not is_block
        allow(fits, f"{where}: reduce", self.reduce, "each with outcome: final")
        for key in ("clock_from", "time"):
            if (text := getattr(self, key)) is not None:
                one = key == "time" and self.time_column is None
                expression(text, f"{where}: {key}", groups=1 if one else None)
        if self.target is not None:
            Target.of(self.target, f"{where}: target")
        self.template  # noqa: B018 – refuses what cannot be split

    def check_places(self, budget_s: float | None, where: str) -> None:
        """Raise `ConfigError` for a name in the command for which there is no value here."""
        if "budget_s" in self.template.names and budget_s is None:
            raise ConfigError(f"{where}: {{budget_s}}: needs a budget")
        available = len(machine.gpus())
        if self.gpus > available or ("gpus" in self.template.names and not available):
            needs = self.gpus or "{gpus}"
            raise ConfigError(
                f"{where}: gpus: {needs} is not allowed; allowed: at most {available}, the GPUs"
                " that are there; a command for CPUs needs no {gpus}"
            )

    @property
    def time_column(self) -> str | None:
        """Return the column of the file of metrics with the command's own seconds: a text with a
        group is a pattern of lines."""
        is_column = self.metrics is not None and "(" not in (self.time or "(")
        return self.time if is_column else None

    @property
    def template(self) -> CommandTemplate:
        return CommandTemplate.of(self.command, "command", shell=self.shell)

    @property
    def condition(self) -> Target | None:
        """Return the target at which a run ends; None: it has none."""
        return None if self.target is None else Target.of(self.target, "target")

    @property
    def title(self) -> str:
        """Return the command as a line that messages show."""
        return self.command if isinstance(self.command, str) else shlex.join(self.command)

    @property
    def judged(self) -> str:
        """Return the name of the metric that ranks runs."""
        return self.objective if self.outcome != "time" else TIME_TO_TARGET

    def clock(self, now: float) -> CommandClock:
        """Return the clock of a run that starts now."""
        column = self.time_column
        start, seconds = (
            (text and re.compile(text)) or None
            for text in (self.clock_from, None if column else self.time)
        )
        return CommandClock(now, start, seconds, column)

    @property
    def lines(self) -> dict[str, Any]:
        """Return what differs from the defaults, as its file has it."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def of(cls, lines: Mapping[str, Any], where: str) -> CommandDefinition:
        """Return the definition that `lines` describe. Raises `ConfigError`."""
        definition = validated(cls, lines, where)
        definition.check(where)
        return definition
