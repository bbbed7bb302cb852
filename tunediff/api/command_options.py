"""Options of comparisons and searches of commands, for the command line and calls from Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

from tunediff.api.options import JobOptions, ProofOptions, TargetOptions, VerdictOptions
from tunediff.command.definition import CommandDefinition, Mode, OutcomeName, default_mode
from tunediff.config import ConfigError
from tunediff.core.options import option, words_option
from tunediff.core.refusals import allow
from tunediff.experiment.model import Counted
from tunediff.search_space import duration_s


@dataclasses.dataclass(kw_only=True)
class CommandSettings(TargetOptions):
    """How a command is run and judged: fields of `CommandDefinition`."""

    objective: str | None = option(
        None, "the metric that decides, as the command prints it", metavar="NAME"
    )
    mode: str | None = option(
        None,
        "which direction is better (default: min; to be said of names such as accuracy)",
        choices=get_args(Mode),
    )
    pattern: str | None = option(None, "a regular expression for it, with one group: the number")
    metrics: str | None = option(
        None, "a file with it that the command writes, e.g. {folder}/results.json", metavar="FILE"
    )
    reduce: str = option("last", "last (default), mean:K, min or max of its values")
    outcome: str = option(
        "budget",
        "the value at the budget (default), the final one, or the time until --target (with it)",
        choices=get_args(OutcomeName),
    )
    clock_from: str | None = option(
        None, "the clock begins at a line that matches", metavar="PATTERN"
    )
    time: str | None = option(
        None, "the command's own seconds, e.g. train_time:(\\d+)ms", metavar="PATTERN"
    )
    grace: str | float = option(10.0, "from SIGTERM to SIGKILL (default: 10s)", convert=duration_s)
    timeout: str | float | None = option(
        None,
        "seconds of a process after which it has failed (default: ten times the longest so far)",
        convert=duration_s,
    )
    shell: bool = option(False, "run the command by a shell")
    same_seed: bool = option(False, "the command takes no seed, and that is meant")

    @property
    def settings(self) -> dict[str, Any]:
        """Return the fields of `CommandDefinition` that they set. Raises `ConfigError`."""
        if self.objective is None:
            raise ConfigError(
                "--objective: is missing; allowed: the name of the metric as the command prints it"
            )
        names = [field.name for field in dataclasses.fields(CommandSettings)]
        settings = {name: getattr(self, name) for name in names}
        settings["grace_s"] = float(settings.pop("grace"))
        timeout = settings.pop("timeout")
        settings["timeout_s"] = None if timeout is None else float(timeout)
        settings["mode"] = self.mode or default_mode(self.objective, "--mode")
        # Where a run goes on to its own end, its target is a matter of the verdict
        return settings if self.outcome == "time" else {**settings, "target": None}

    def definition(self, command: str | Sequence[str], where: str) -> CommandDefinition:
        """Return a command that has these settings. Raises `ConfigError`."""
        words = command if isinstance(command, str) else tuple(map(str, command))
        definition = CommandDefinition(command=words, **self.settings)
        definition.check(where)
        return definition


@dataclasses.dataclass(kw_only=True)
class CommandCompareOptions(CommandSettings, VerdictOptions, ProofOptions, JobOptions):
    """What is asked of a comparison of commands."""

    words: Sequence[str] = words_option(
        "values of parameters; one given twice is A's and B's", "name=value"
    )
    run: Sequence[str | Sequence[str]] = option(
        (),
        "a command with {name} for its parameters, {seed}, {folder}, {port}, {gpus}, and"
        " {overrides} or {flags} for all other parameters",
        metavar="COMMAND",
        repeated=True,
    )
    at: Sequence[str] = option(
        (), "a git revision; . is the working copy", metavar="REVISION", repeated=True
    )
    budget: str | float | None = option(
        None,
        "seconds of a run, e.g. 90s, 10m (default: 60s; none with --outcome final)",
        convert=duration_s,
    )
    check: bool = option(True, "try the commands first")
    resume: str | None = option(
        None, "go on with a comparison that was interrupted", metavar="NAME"
    )
    dry_run: bool = option(False, "print what would run, and start nothing")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is not None and self.outcome == "budget":
            self.outcome = "time"
        if self.outcome == "time":
            self.better = "time"
        fits = self.better == "value" or self.outcome != "budget"
        allowed = "a --target, or --outcome final: every run takes its budget"
        allow(fits, "--better", self.better, allowed)
        for name in ("unit", "address"):
            allowed = "none: one command at a time runs on this machine, for seconds of wall-clock"
            allow(getattr(self, name) is None, f"--{name}", getattr(self, name), allowed)

    @property
    def counted(self) -> Counted:
        """Return which seconds of a run count."""
        return "end" if self.outcome == "final" else "first"

    @property
    def budget_s(self) -> float | None:
        """Return the seconds of a run; None: it runs to its own end."""
        if self.budget is None:
            return None if self.outcome == "final" else 60.0
        return float(self.budget)
