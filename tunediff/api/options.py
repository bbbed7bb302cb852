"""Options that searches and comparisons share, as commands and as calls from Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from tunediff import config as cfg
from tunediff.analysis.sides import HOLDOUT, JUDGE
from tunediff.analysis.statistics import LEVEL
from tunediff.analysis.targets import margin_of, within_of
from tunediff.command.trial import command_line
from tunediff.config import ConfigError, Metric, Systems, of
from tunediff.core.machine_options import MachineOptions
from tunediff.core.options import Options, StorageOptions, option
from tunediff.core.refusals import allow
from tunediff.core.target import Target
from tunediff.experiment.model import Better, Counted, Experiment, Limit, SequentialTest
from tunediff.integrations.services import SERVICES
from tunediff.judge import locked_judge, proof
from tunediff.judge.frozen_code import sha256
from tunediff.judge.ledger import Ledger, own_level
from tunediff.tuning import at_once

MOST_PAIRS = 12
"""Default of the largest number of pairs."""
UNIT_HELP = (
    "what the budget counts: training seconds (wall, the default), or these times devices (device)"
)
TRACK_HELP = "the service that shows runs: wandb, mlflow, … (docs/how-to/trackers.md)"


@dataclasses.dataclass(kw_only=True)
class JobOptions(MachineOptions, StorageOptions):
    """Options of searches and comparisons."""

    name: str | None = option(None, "name of its folder (default: what is run, and the time)")
    unit: str | None = option(None, UNIT_HELP, choices=("wall", "device"))
    track: str | None = option(None, TRACK_HELP, choices=tuple(SERVICES))
    check: bool = option(
        True, "try a workload of your own first, with two steps and two evaluations"
    )
    force: bool = option(
        False,
        "start what would take over 30 days, 100,000 trials or the whole disk",
    )


@dataclasses.dataclass(kw_only=True)
class TargetOptions(Options):
    """A value that a metric is to reach."""

    target: str | None = option(
        None,
        "what a run is to reach in less time, e.g. val_loss<=3.28 (compare: with --better time)",
        metavar="CONDITION",
    )


@dataclasses.dataclass(kw_only=True)
class VerdictOptions(TargetOptions):
    """How a comparison comes to its verdict; fixed before its first run."""

    better: Better = option(
        "value",
        "what B must be better in: the metric's value (default), or time, with values that are"
        " shown to meet --target, to be no worse by --margin, or equal --within",
        choices=get_args(Better),
    )
    margin: str | None = option(
        None, "for --better time: how much worse than A's the metric may be", metavar="X"
    )
    pairs: int | None = option(None, f"pairs of runs at most, 3 to 100 (default: {MOST_PAIRS})")
    within: str | None = option(
        None, "a difference that does not matter, e.g. 2% of A's value, or 0.01 of an accuracy"
    )
    level: float = option(
        LEVEL, "probability of a wrong verdict if nothing differs (default: 0.05)", metavar="P"
    )
    one_sided: bool = option(
        False, "all of it for «better»: B is never called worse, and found sooner"
    )
    parallel: bool = option(
        False,
        "run both sides of a pair at the same time, on all equal devices: a GPU each, else cores"
        " (OMP_NUM_THREADS of each run)",
    )
    fixed: bool = option(False, "one look, after all --pairs: Student's t-test")
    equal: bool = option(
        False, "A against itself, B on other seeds: a trial of the comparison, to find nothing"
    )
    judge: Path | None = option(
        None,
        "a Python file that gets the folder of a run and prints the metric, locked for both sides",
        metavar="FILE",
        convert=lambda value, _: Path(value),
    )
    holdout: Path | None = option(
        None,
        "a second one, whose values are shown with the verdict and decide nothing",
        metavar="FILE",
        convert=lambda value, _: Path(value),
    )
    ledger: bool = option(
        False,
        "spend from one error budget for all comparisons of this repository"
        " (.tunediff/ledger.jsonl): --level is the share of kept changes that may be none",
    )
    confirm: bool = option(
        False, "with --ledger: A is the version that was confirmed last, and B the head"
    )

    def experiment(self, metric: Metric, counted: Counted) -> Experiment:
        """Return what the file of a comparison says of its verdict. Raises `ConfigError`.

        counted: which seconds of a run count, if they decide.
        """
        most = MOST_PAIRS if self.pairs is None else self.pairs
        allowed = "a whole number from 3 to 100: two say nothing of their own noise"
        allow(3 <= most <= 100, "--pairs", most, allowed)
        allow(0.001 <= self.level <= 0.5, "--level", self.level, "0.001 to 0.5")
        allow(self.ledger or not self.confirm, "--confirm", self.confirm, "with --ledger")
        self._check_time(metric)
        return Experiment(
            kind="comparison",
            objective=metric.name,
            mode=metric.mode,
            limit=Limit(target=self.target),
            test=SequentialTest(
                pairs=most,
                within=within_of(self.within, metric),
                level=self._level(),
                one_sided=self.one_sided,
                fixed=self.fixed,
                equal=self.equal,
                better=self.better,
                margin=margin_of(self.margin),
                counted=counted if self.better == "time" else "end",
            ),
            devices=len(at_once.run_devices()) if self.parallel else 1,
            **self._judge_content(),
        )

    def _judge_content(self) -> dict[str, Any]:
        """Return the digests of both judges, where there are any."""
        content = {}
        for name in ("judge", "holdout"):
            if (file := getattr(self, name)) is not None:
                allow(file.is_file(), f"--{name}", file, "a Python file")
                content[name] = sha256(file)
        return content

    def lock_judges(self, folder: Path) -> None:
        """Copy both judges into the folder of a new comparison."""
        locked_judge.lock(self.judge, JUDGE, folder)
        locked_judge.lock(self.holdout, HOLDOUT, folder)

    def _level(self) -> float:
        """Return the level of this comparison."""
        if not self.ledger:
            return self.level
        return own_level(Ledger.read().level(self.level), self)

    def _check_time(self, metric: Metric) -> None:
        by_time = self.better == "time"
        for name in ("target", "margin"):
            value = getattr(self, name)
            allow(value is None or by_time, f"--{name}", value, "none without --better time")
        if not by_time:
            return
        given = any(value is not None for value in (self.target, self.margin, self.within))
        allowed = "a --target, a --margin or --within: what is fast need not be good"
        allow(given, "--better", "time", allowed)
        if self.target is not None:
            Target.of_objective(self.target, metric.name, metric.mode, "--target")


@dataclasses.dataclass(kw_only=True)
class ProofOptions(Options):
    """How a comparison becomes a result that others can check."""

    seed: int | None = option(
        None, "seed of the first pair (default: it follows from the code of both)", metavar="N"
    )
    out: Path | None = option(
        None,
        "a new folder with all that others need to check the result, by tunediff verify",
        metavar="FOLDER",
        convert=lambda value, _: Path(value),
    )
    reproduce: Path | None = option(
        None,
        "run the comparison of such a folder on this machine",
        metavar="FOLDER",
        convert=lambda value, _: Path(value),
    )

    def check_proof(self) -> None:
        """Raise `ConfigError` for values that are not allowed."""
        if self.seed is not None:
            allow(0 <= self.seed < 2**31 - 1000, "--seed", self.seed, "0 to 2,147,482,647")
        if self.out is not None:
            proof.check(self.out)


def settings_given(options: ProofOptions) -> list[str]:
    """Return which options are given that a comparison in a folder has settled."""
    new, rules = type(options)(), [field.name for field in dataclasses.fields(VerdictOptions)]
    sides = ("words", "run", "at", "objective", "budget", "seed", "compile")
    values = {name: getattr(options, name, None) for name in (*sides, *rules)}
    return [name for name, value in values.items() if value not in ([], getattr(new, name, None))]


def check_only_reproduces(options: ProofOptions) -> None:
    """Refuse options that would make another comparison than that of the folder. Raises
    `ConfigError`."""
    for name in settings_given(options):
        flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
        allow(False, flag, value, "what --reproduce finds in its folder")


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
