"""Comparisons from Python: `tunediff.run_comparison`, which returns `PairedComparison`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff.analysis import sides as side_files
from tunediff.analysis.comparison import Comparison
from tunediff.api import command_calls, compare_run, notebook
from tunediff.api.calls import (
    ProgressKeywords,
    as_printed,
    called,
    folder,
    keywords,
    options_of,
    words,
)
from tunediff.api.command_calls import CommandKeywords
from tunediff.api.command_options import CommandCompareOptions
from tunediff.api.compare_setup import CompareKeywords, CompareOptions
from tunediff.api.display import lines_of, show_figures
from tunediff.core.options import option
from tunediff.report import pair_summary, pair_words, style
from tunediff.report import pairs as report
from tunediff.report.pair_result import PairVerdict

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Side = Any
"""A side of `run_comparison`: a file, a baseline, a workload, or a tuple of one and knobs."""


class PairedComparison:
    """A comparison in its folder: its result so far, and how to go on with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        """Return the name of the comparison, which is that of its folder."""
        return self.folder.name

    @property
    def verdict(self) -> PairVerdict:
        """Return what the comparison has shown."""
        values = self.json()
        del values["schema"]
        return PairVerdict(**values, sentences=pair_words.sentences(Comparison.read(self.folder)))

    def json(self) -> dict[str, Any]:
        """Return the result as `tunediff compare --json` prints it.

        `tunediff/schemas/compare-output.json` describes its keys.
        """
        return as_printed(pair_summary.as_json(self.folder))

    def pairs(self) -> pd.DataFrame:
        """Return one row per pair, as pairs.csv: seed, value, samples per second, status."""
        return report.frame(Comparison.read(self.folder))

    def figure(self) -> Figure:
        """Return a figure with the curves of all runs."""
        show_figures()
        with style.drawing():
            return report.figure(Comparison.read(self.folder))

    def report(self) -> Path:
        """Write report.html into the folder of the comparison and return its path."""
        with called():
            return report.write_all(Comparison.read(self.folder))

    def resume(
        self, address: str | None = None, cpus: int | None = None, progress: bool = True
    ) -> PairedComparison:
        """Go on with a comparison that was interrupted; see `run_comparison`."""
        kind = CommandCompareOptions if side_files.of_commands(self.folder) else CompareOptions
        options = kind(resume=self.name, storage=self.folder.parent, address=address, cpus=cpus)
        return _run(options, progress)

    def __repr__(self) -> str:
        return f"PairedComparison({str(self.folder)!r})"


@dataclasses.dataclass(kw_only=True)
class CompareCall(ProgressKeywords, CommandKeywords, CompareKeywords):
    """The keywords of `run_comparison`."""

    at: Sequence[str] = option(
        (), "with command=: two git revisions to compare; . is the working copy"
    )


@keywords(CompareCall)
def run_comparison(a: Side = None, b: Side = None, **options: Any) -> PairedComparison:
    """Run pairs of trainings until it is decided whether B is better than A in equal seconds.

    Args:
        a, b: A configuration file, a baseline (`digits`), a workload as `run_search` takes it, or a
            tuple of one of these and knobs: `("digits", {"optimizer.lr": 3e-3})`. B may be a
            mapping alone: A with these changes. With `command=` both are values of its parameters
            by name, and B's are those that change; without B, `command=` is a tuple of two commands
            or `at=` names two revisions. With `equal=True` there is A alone.
        options: See `CompareCall`. Durations are seconds, or text such as `"10m"`.

    Raises:
        TunediffError: Something is not allowed or has failed; the message is the one of the
            command.
        KeyboardInterrupt: It was interrupted. Everything measured stays; `PairedComparison.resume`
            goes on with it.

    Example:
        >>> tunediff.run_comparison("digits", {"optimizer.lr": 3e-3}, budget="10s").verdict.verdict
        'better'
        >>> run = "python train.py --lr {lr} --seed {seed}"
        >>> tunediff.run_comparison({"lr": 3e-4}, {"lr": 1e-3}, command=run, objective="val_loss")
    """
    with called():
        call = CompareCall(**options)
        asked: compare_run.AnyOptions
        if call.reproduce is not None:
            if side_files.of_commands(call.reproduce):
                asked = options_of(call, CommandCompareOptions)
            else:
                asked = options_of(call, CompareOptions)
        elif call.command is not None:
            asked = command_calls.comparison(call, a, b)
        else:
            call.check_unused()
            storage = folder(call.storage)
            alone = call.equal and b is None
            sides = [*_side(a, a, storage), *([] if alone else _side(a, b, storage))]
            asked = options_of(call, CompareOptions, words=sides)
    return _run(asked, call.progress)


def _side(a: Side, side: Side, storage: Path) -> list[str]:
    """Return the words that name a side; a mapping of knobs changes A."""
    if isinstance(side, dict):
        first, *knobs = _parts(a)
        unchanged = [word for word in words(tuple(knobs)) if word.partition("=")[0] not in side]
        return [notebook.named(first, storage), *unchanged, *words((side,))]
    first, *knobs = _parts(side)
    return [notebook.named(first, storage), *words(tuple(knobs))]


def _parts(side: Side) -> Sequence[Any]:
    return side if isinstance(side, tuple) else (side,)


def _run(options: compare_run.AnyOptions, progress: bool) -> PairedComparison:
    with called(cluster=True):
        return PairedComparison(compare_run.run(options, lines_of(progress)))
