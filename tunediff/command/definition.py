"""What is known of a command: its template, where its metrics are, and how a run is judged."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from tunediff.command.clock import CommandClock
from tunediff.command.metrics import MetricPattern, Reduction
from tunediff.command.template import CommandTemplate
from tunediff.config.knobs import ConfigError, nearest
from tunediff.core import machine
from tunediff.core.refusals import allow
from tunediff.core.target import TIME_TO_TARGET, Target
from tunediff.core.trial_record import LINE_KEYS

FILE = "tunediff_command.yaml"
Mode = Literal["min", "max"]
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


@dataclasses.dataclass(frozen=True)
class CommandDefinition:
    """A command and how it is judged; made once, kept with its results as `FILE`."""

    command: str | tuple[str, ...]
    objective: str
    """Name of the metric, as the command prints it."""
    mode: Mode = "min"
    pattern: str | None = None
    """A regular expression for the objective, with one group around the number."""
    metrics: str | None = None
    """A file that the command writes, with `{folder}`: JSON, JSON lines or CSV."""
    reduce: str = "last"
    outcome: OutcomeName = "budget"
    """`budget`: the value when the budget is spent; `final`: when the command ends by itself;
    `time`: the seconds until the target is met."""
    target: str | None = None
    clock_from: str | None = None
    """A regular expression for the line at which the clock begins."""
    time: str | None = None
    """A regular expression for the seconds that the command prints itself; `ms` may follow."""
    grace_s: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    timeout_s: float | None = None
    """Seconds of a process after which it has failed; None: ten times the longest one so far."""
    gpus: int = 0
    """GPUs of a run; 0: it sees all that the machine has."""
    shell: bool = False
    same_seed: bool = False
    """Whether the command needs no seed: its runs are then expected to vary by themselves."""
    folder: str = "."
    """Where the command runs."""

    def check(self, where: str) -> None:
        """Raise `ConfigError` for what is not allowed, with the name of the key."""
        for key, allowed in (("mode", get_args(Mode)), ("outcome", get_args(OutcomeName))):
            value = getattr(self, key)
            allow(value in allowed, f"{where}: {key}", value, ", ".join(allowed))
        grace_fits = math.isfinite(self.grace_s) and self.grace_s >= 0
        allow(grace_fits, f"{where}: grace", self.grace_s, "seconds")
        timeout_fits = self.timeout_s is None or 0 < self.timeout_s < math.inf
        allow(timeout_fits, f"{where}: timeout", self.timeout_s, "seconds")
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
        Reduction(self.reduce, f"{where}: reduce")
        for key in ("clock_from", "time"):
            if (text := getattr(self, key)) is not None:
                _expression(text, f"{where}: {key}", groups=1 if key == "time" else None)
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

    @property
    def judged_mode(self) -> Mode:
        return self.mode if self.outcome != "time" else "min"

    def clock(self, now: float) -> CommandClock:
        """Return the clock of a run that starts now."""
        start, seconds = (
            None if text is None else _expression(text, key, groups=None)
            for key, text in (("clock_from", self.clock_from), ("time", self.time))
        )
        return CommandClock(now, start, seconds)

    @property
    def lines(self) -> dict[str, Any]:
        """Return what differs from the defaults, as its file has it."""
        names = [field.name for field in dataclasses.fields(self)]
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        lines = {name: getattr(self, name) for name in names}
        lines = {name: value for name, value in lines.items() if value != defaults[name]}
        if not isinstance(self.command, str):
            lines["command"] = list(self.command)
        return lines

    @classmethod
    def of(cls, lines: Mapping[str, Any], where: str) -> CommandDefinition:
        """Return the definition that `lines` describe. Raises `ConfigError`."""
        names = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(lines.keys() - names):
            hint = nearest(unknown[0], sorted(names))
            raise ConfigError(f"{where}: {unknown[0]}: no such key; {hint}")
        for key in ("command", "objective"):
            if not lines.get(key):
                raise ConfigError(f"{where}: {key}: is missing")
        command = lines["command"]
        words = command if isinstance(command, str) else tuple(map(str, command))
        definition = cls(**{**lines, "command": words})
        definition.check(where)
        return definition


def _expression(text: str, where: str, groups: int | None) -> re.Pattern[str]:
    try:
        expression = re.compile(text)
    except re.error as error:
        raise ConfigError(f"{where}: {text!r}: {error}") from None
    if groups is not None and expression.groups != groups:
        raise ConfigError(
            f"{where}: {text!r} has {expression.groups} groups; allowed: {groups}, around the"
            " number"
        )
    return expression


CLIENTS = ("docker", "podman", "ssh", "kubectl")
"""Programs whose work is done by processes that are none of their children."""


def honesty(definitions: Iterable[CommandDefinition]) -> list[str]:
    """Return a sentence for whatever a result of these commands lacks that one of workloads has."""
    commands = list(definitions)
    lines = []
    first_words = [command.template.words[0].split()[0] for command in commands]
    if client := next((word for word in first_words if Path(word).name in CLIENTS), None):
        lines.append(
            f"WARNING: {client}: what it starts elsewhere goes on when its client is ended at the"
            " budget, beside the next run: let it end by itself (outcome: final)."
        )
    if any(command.outcome == "budget" for command in commands):
        lines.append(
            "The value at the budget counts. Start-up, evaluations and checkpoints are inside it,"
            " unless the command prints TUNEDIFF start, pause and go, or its own seconds (time). A"
            " schedule by a number of steps is cut where it is still high: compare such commands by"
            " their final values (outcome: final)."
        )
    return lines
