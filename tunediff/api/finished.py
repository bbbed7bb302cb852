"""Judge runs that have finished elsewhere: `tunediff judge`, and `tunediff.judge` in Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from tunediff.api.calls import called, keywords
from tunediff.command.definition import default_mode
from tunediff.core import text
from tunediff.core.options import Options, allow, option, words_option
from tunediff.core.target import Target
from tunediff.experiment.model import Better, Experiment, FinishedRuns, Limit, SequentialTest
from tunediff.finished.comparison import FinishedComparison
from tunediff.finished.runs import LogFormat, RunReader
from tunediff.proof import proof
from tunediff.report.result import PAGE, Result


class JudgeKeywords(LogFormat, FinishedRuns, Options):
    """How finished runs are read and judged."""

    mode: Literal["min", "max"] | None = option(
        None, "which direction is better (default: min; names such as accuracy need it)"
    )
    outcome: Literal["final", "time"] = option(
        "final", "seconds of the whole run (default), or those until --target is met"
    )
    target: str | None = option(
        None, "what the mean is to meet, or each run, e.g. val_loss<=3.28", metavar="CONDITION"
    )
    better: Better = option("value", "what is compared: the values (default), or seconds")
    margin: float | None = option(
        None, "how much worse than the first set's the values may be", metavar="X", gt=0
    )
    level: float = option(0.05, "probability of a wrong verdict if nothing differs", gt=0, lt=1)
    one_sided: bool = option(False, "one-sided tests: gains are found sooner")
    out: Path | None = option(
        None, "a new folder with parsed numbers, result and page, for tunediff verify",
        metavar="FOLDER",
    )  # fmt: skip


class JudgeOptions(JudgeKeywords):
    """What is judged."""

    words: tuple[str, ...] = words_option("sets of runs; each is compared with the first", "A B …")


def judged(options: JudgeOptions) -> Result:
    """Read and judge the runs; write --out; return the result. Raises `ConfigError`."""
    if options.out is not None:
        proof.check_out(options.out)
    mode = options.mode or default_mode(options.objective, "--mode")
    target = options.target and Target.of_objective(
        options.target, options.objective, mode, "--target"
    )
    by_time = options.outcome == "time"
    sets, is_value = len(options.words), options.better == "value"
    for flag, value, fits, allowed in (
        ("command line", text.pluralize(sets, "set of runs", "sets of runs"),
         sets > 1 or (sets and target), "two sets of runs or more, or one with --target"),
        ("--outcome", "time", not by_time or target, "with --target"),
        ("--outcome", "time", not by_time or options.time, "with --time"),
        ("--better", "time", is_value or options.time, "with --time"),
        ("--better", "time", is_value or target or options.margin, "with --target or --margin"),
        ("--sd", options.sd, options.sd is None or target, "with --target"),
    ):  # fmt: skip
        allow(bool(fits), flag, value, allowed)
    experiment = Experiment(
        kind="finished", objective=options.objective, mode=mode,
        candidates={str(index): name for index, name in enumerate(_names(options.words))},
        limit=Limit(target=str(target) if target else None),
        test=options.part(SequentialTest, fixed=True),
        finished=options.part(FinishedRuns, until_target=by_time),
    )  # fmt: skip
    reader = options.part(RunReader, until=target or None if by_time else None)
    finished = FinishedComparison(experiment, [reader.read(word) for word in options.words])
    found = finished.result(options.out.name if options.out is not None else "judge")
    if options.out is None:
        return found
    finished.write(found, options.out)
    return found.model_copy(
        update={"files": {"results": str(options.out), "report": str(options.out / PAGE)}}
    )


def _names(words: tuple[str, ...]) -> list[str]:
    """Return what tells sets apart: their paths without the folders and the ends that all share."""
    parts = [Path(word).parts for word in words]
    first = len(os.path.commonprefix(parts))  # noqa: RUF071  of parts, not of characters
    last = len(os.path.commonprefix([of[::-1] for of in parts]))  # noqa: RUF071
    return ["/".join(of[first : len(of) - last] or of[-1:]) for of in parts]


@keywords(JudgeKeywords)
def judge(*sets: str | Path, **options: Any) -> Result:
    """Judge sets of finished runs, each against the first, as `tunediff judge` does.

    Args:
        sets: Folders, patterns of file names, or files.
        options: See `JudgeKeywords`.

    Raises:
        ConfigError: Something is not allowed, or a log is not understood.

    Example:
        >>> tunediff.judge("base/*.log", "new/*.log", objective="val_loss").verdict
        <Verdict.BETTER: 'better'>
    """
    with called():
        return judged(JudgeOptions(words=tuple(map(str, sets)), **options))
