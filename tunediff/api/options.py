"""Options of searches and comparisons, as commands and as calls from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from tunediff import config as cfg
from tunediff.command.definition import CommandDefinition, CommandSettings, default_mode
from tunediff.command.trial import command_line
from tunediff.config import ConfigError, Systems, of
from tunediff.core import machine, remote
from tunediff.core.options import Options, Section, allow, flag_of, option, words_option
from tunediff.experiment.model import Counted, Drawing, RuleOfPairs, RunLimit
from tunediff.search_space.sections import MOST_FINALISTS, Service

TRACK_HELP = "the service that shows runs: wandb, mlflow, … (docs/how-to/trackers.md)"
UNIT_HELP = str(RunLimit.model_fields["unit"].description)
Command = str | tuple[str, ...]
"""A command line, or its words."""


class JobOptions(machine.MachineOptions, remote.StorageOptions):
    """Options of searches and comparisons that say how they run."""

    track: Service | None = option(None, TRACK_HELP)
    check: bool = option(
        True, "check your workload, or the commands, first: two steps and two evaluations"
    )
    force: bool = option(
        False,
        "start even if it takes over 30 days, 100,000 trials or the whole disk",
    )
    resume: str | None = option(None, "go on with this one, which was interrupted", metavar="NAME")
    dry_run: bool = option(
        False,
        "print the plan and its cost, and start nothing; a search checks your workload first",
    )


class Setup(Section):
    """Options of searches and comparisons that only a new one takes."""

    name: str | None = option(None, "name of its folder (default: what is run, and the time)")
    parallel: bool = option(
        False,
        "runs that are compared use all equal devices of this machine at the same time: a GPU each"
        " (the default where a search confirms), else cores (OMP_NUM_THREADS of each run)",
    )


class SearchSetup(Setup):
    """Options that only a new search takes."""

    words: tuple[str, ...] = words_option(
        "search file (default: digits), or a workload's file, which is searched around its"
        " baseline",
        "SPACE.yaml | mine.py | knob=value",
    )
    seed: int | None = option(None, "seed of the search", ge=0, lt=2**32, allowed="0 to 2^32 - 1")
    warm_start: str | None = option(
        None, "an earlier search, whose best points are tried first", metavar="NAME"
    )


class SearchOptions(SearchSetup, Drawing, RunLimit, JobOptions):
    """What is asked of a search."""

    confirm: int | None = option(
        None,
        "how many of the best to run again on new seeds; 0: none",
        metavar="N",
        ge=0,
        le=MOST_FINALISTS,
        allowed=f"0 to {MOST_FINALISTS} finalists; 0: none",
    )


def _commands(value: Any) -> Any:
    """Return the only command of a call from Python as one of several."""
    return value if isinstance(value, tuple) else (value,)


class CompareSetup(Setup):
    """Options that only a new comparison takes."""

    words: tuple[str, ...] = words_option(
        "what is compared; with --run, values of parameters: of one given twice, A has the first",
        "A [knob=value …] [B [knob=value …]]",
    )
    command: Annotated[tuple[Command, ...], BeforeValidator(_commands)] = option(
        (),
        "a command with {name} for its parameters, {seed}, {folder}, {port}, {gpus}, and"
        " {overrides} or {flags} for all other parameters, instead of a workload; twice: A's"
        " and B's",
        flag="--run",
        metavar="COMMAND",
        repeated=True,
    )
    at: tuple[str, ...] = option(
        (),
        "with --run, twice: a git revision; . is the working copy",
        metavar="REVISION",
        repeated=True,
    )
    seed: int | None = option(
        None,
        "seed of the first pair (default: follows from the code of both sides)",
        metavar="N",
        ge=0,
        lt=2**31 - 1000,
        allowed="0 to 2,147,482,647",
    )
    judge: Path | None = option(
        None,
        "a Python file that gets the folder of a run and prints the metric; fixed for both sides",
        metavar="FILE",
    )
    holdout: Path | None = option(
        None,
        "a second judge; its values are shown with the verdict and decide nothing",
        metavar="FILE",
    )
    ledger: bool = option(
        False,
        "spend from one error budget for all comparisons of this repository"
        " (.tunediff/ledger.jsonl): --level is the share of kept changes that may have no effect",
    )
    confirm: bool = option(
        False, "with --ledger: A is the version that was confirmed last, and B the head"
    )


class CompareOptions(CompareSetup, RuleOfPairs, RunLimit, CommandSettings, JobOptions):
    """What is asked of a comparison of workloads, or of commands (`command`)."""

    out: Path | None = option(
        None,
        "a new folder with everything that others need to check the result by tunediff verify",
        metavar="FOLDER",
    )
    reproduce: Path | None = option(
        None,
        "run the comparison of a folder of --out again on this machine",
        metavar="FOLDER",
    )

    @property
    def settled(self) -> dict[str, Any]:
        """Return what is given of all that a comparison settles before its first run."""
        return self.given(CompareSetup, RuleOfPairs, RunLimit, CommandSettings)

    @property
    def counted(self) -> Counted:
        """Return which seconds of a run count where they decide."""
        if self.better == "value":
            return "end"
        return "end" if self.outcome == "final" else "first"

    @property
    def budget_s(self) -> float | None:
        """Return the seconds of a run; None: it runs to its own end."""
        if self.budget is None and self.outcome == "final":
            return None
        return self.budget or 60.0


# ---- commands
def check_command(options: CompareOptions) -> None:
    """Complete the options of a comparison of commands. Raises `ConfigError`."""
    if options.target is not None and options.outcome == "budget":
        options.outcome = "time"
    if options.outcome == "time":
        options.better = "time"
    fits = options.better == "value" or options.outcome != "budget"
    allowed = "a --target, or --outcome final: every run takes its budget"
    allow(fits, "--better", options.better, allowed)
    given = options.given(RunLimit, machine.MachineOptions)
    compiling = given.get("compile", "cold")
    allow(compiling in ("cold", "shared"), "--compile", compiling, "cold, shared")
    for name in ("unit", "address"):
        allowed = "none: one command at a time runs on this machine, for seconds of wall-clock"
        allow(name not in given, f"--{name}", given.get(name), allowed)


def refuse_settings_of_commands(options: Options) -> None:
    """Refuse settings of commands where there is no command. Raises `ConfigError`."""
    for name, value in options.given(CommandSettings).items():
        allow(
            False,
            flag_of(name, CommandSettings.model_fields[name]),
            value,
            "none without a command (--run, command=)",
        )


def definition(options: CompareOptions, command: Command, where: str) -> CommandDefinition:
    """Return a command that has these settings. Raises `ConfigError`."""
    if options.objective is None:
        raise ConfigError(
            "--objective: is missing; allowed: the name of the metric as the command prints it"
        )
    found = options.part(
        CommandDefinition,
        command=command,
        mode=options.mode or default_mode(options.objective, "--mode"),
        # Where a run goes on to its own end, its target is a matter of the verdict
        target=options.target if options.outcome == "time" else None,
    )
    found.check(where)
    return found


# ---- what trainings share
def trainable(path: Path, words: Sequence[str]) -> Any:
    """Return the configuration that a user names. Raises `ConfigError`, also for a command's."""
    config = cfg.named(path, words)
    if cfg.is_command(config.schema.workload):
        line = command_line(config)
        raise ConfigError(f"{path}: is a configuration of a command, which runs alone: {line}")
    return config


def check_files(config: Systems, evaluates: bool) -> None:
    """Refuse missing files that the workload of a training reads. Raises `ConfigError`."""
    if (check := of(config).get_hook("check_files")) is not None:
        check(config.knobs, evaluates)
