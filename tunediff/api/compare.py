"""Comparisons from Python: `tunediff.run_comparison`, which returns `PairedComparison`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff.analysis.comparison import Comparison
from tunediff.api import notebook, run
from tunediff.api.calls import ProgressKeywords, as_printed, called, folder, keywords, words
from tunediff.api.display import lines_of, show_figures
from tunediff.api.options import CompareOptions, refuse_settings_of_commands
from tunediff.command.template import shown
from tunediff.config import ConfigError
from tunediff.report import charts, page, reading, style, tables
from tunediff.report.result import Result

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
    def verdict(self) -> Result:
        """Return what the comparison has shown."""
        return reading.of_sides(Comparison.read(self.folder))

    def json(self) -> dict[str, Any]:
        """Return the result as `tunediff compare --json` prints it.

        `tunediff/schemas/result-output.json` describes its keys.
        """
        return as_printed(reading.as_json(self.verdict))

    def pairs(self) -> pd.DataFrame:
        """Return one row per pair, as pairs.csv: seed, value, samples per second, status."""
        return tables.pairs_frame(Comparison.read(self.folder))

    def figure(self) -> Figure:
        """Return a figure with the curves of all runs."""
        show_figures()
        with style.drawing():
            return charts.of_sides(Comparison.read(self.folder))

    def report(self) -> Path:
        """Write report.html into the folder of the comparison and return its path."""
        with called():
            return page.write_sides(Comparison.read(self.folder), self.folder)

    def resume(
        self, address: str | None = None, cpus: int | None = None, progress: bool = True
    ) -> PairedComparison:
        """Go on with a comparison that was interrupted; see `run_comparison`."""
        options = CompareOptions(
            resume=self.name, storage=self.folder.parent, address=address, cpus=cpus
        )
        return _run(options, progress)

    def __repr__(self) -> str:
        return f"PairedComparison({str(self.folder)!r})"


class CompareCall(ProgressKeywords, CompareOptions):
    """The keywords of `run_comparison`."""


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
        call.storage = storage = folder(call.storage)
        if call.command:
            call.words = (*_parameters("a", a), *_parameters("b", b))
        elif call.reproduce is None:
            refuse_settings_of_commands(call)
            alone = call.equal and b is None
            call.words = (*_side(a, a, storage), *([] if alone else _side(a, b, storage)))
    return _run(call, call.progress)


def _parameters(side: str, values: Any) -> list[str]:
    """Return the words that give parameters of a command their values."""
    if values is not None and not isinstance(values, Mapping):
        allowed = "values of the command's parameters by name, e.g. {'lr': 1e-3}"
        raise ConfigError(f"{side}: {values!r} is not allowed with command=; allowed: {allowed}")
    return [f"{name}={shown(value)}" for name, value in (values or {}).items()]


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


def _run(options: CompareOptions, progress: bool) -> PairedComparison:
    with called(cluster=True):
        return PairedComparison(run.compare(options, lines_of(progress)))
