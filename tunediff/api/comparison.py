"""Comparisons from Python: `tunediff.run_comparison`, and the `PairedComparison` that it
returns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff.analysis import pairs
from tunediff.api import compare_run, notebook
from tunediff.api.calls import as_printed, called, duration, folder, with_plain_numbers, words
from tunediff.api.compare_setup import CompareOptions
from tunediff.api.display import lines_of, show_figures
from tunediff.core import text
from tunediff.report import pairs as report
from tunediff.report import style
from tunediff.report.html import el, join
from tunediff.report.pair_result import PairVerdict

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Side = Any
"""What `run_comparison` compares: a configuration file, a baseline or a workload, or a tuple of one
and knobs."""


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
        return PairVerdict(**values, sentences=report.sentences(pairs.read(self.folder)))

    def json(self) -> dict[str, Any]:
        """Return the result as `tunediff compare --json` prints it.

        `tunediff knobs --schema compare-output` describes its keys.
        """
        return as_printed(compare_run.as_json(self.folder))

    def pairs(self) -> pd.DataFrame:
        """Return one row per pair: seed, value, samples per second and status of both runs; as in
        pairs.csv."""
        return report.frame(pairs.read(self.folder))

    def figure(self) -> Figure:
        """Return a figure with the curves of all runs."""
        show_figures()
        with style.drawing():
            return report.figure(pairs.read(self.folder))

    def report(self) -> Path:
        """Write report.html into the folder of the comparison and return its path."""
        with called():
            return report.write_all(pairs.read(self.folder))

    def resume(
        self, address: str | None = None, cpus: int | None = None, progress: bool = True
    ) -> PairedComparison:
        """Go on with a comparison that was interrupted; see `run_comparison`."""
        folder = self.folder.parent
        options = CompareOptions(resume=self.name, storage=folder, address=address, cpus=cpus)
        return _run(options, progress)

    def _repr_html_(self) -> str:
        verdict = self.verdict
        head = el("p", el("b", f"{self.name}: {verdict.verdict or 'not decided yet'}"))
        return str(join(head, *(el("p", line) for line in verdict.sentences)))

    def __repr__(self) -> str:
        return f"PairedComparison({str(self.folder)!r})"


def run_comparison(
    a: Side, b: Side, *, budget: str | float | None = None, unit: str | None = None, pairs: int | None = None,
    resolution: str | None = None, compile: str | None = None, setup: str | None = None, name: str | None = None,
    storage: str | Path = text.STORAGE, track: str | None = None, address: str | None = None, cpus: int | None = None,
    gpus: int | None = None, check: bool = True, force: bool = False, progress: bool = True,
) -> PairedComparison:  # fmt: skip
    """Run pairs of trainings until it is decided whether B is better than A at equal training
    seconds.

    Args:
        a, b: A configuration file, a baseline (`digits`), a workload as `run_search` takes it, or a
            tuple of one of these and knobs: `("digits", {"optimizer.lr": 3e-3})`. B may be a
            mapping alone: A with these changes.
        budget: Training seconds of a run. Default: 60.
        unit: `wall`, or `device`: the budget counts training seconds times devices.
        pairs: Pairs of runs at most, 3 to 100.
        resolution: A difference that does not matter: `"2%"` of A's value, or `"0.01"` of an
            accuracy.
        compile: `charged` or `free`: whether compiling counts as training.
        setup: `charged` or `free`: whether what comes before the first batch does. Default: `free`.
        name: Name of the comparison and its folder in `storage`.
        track, address, cpus, gpus, check, force, progress: As `run_search` takes them.

    Raises:
        TunediffError: Something is not allowed or has failed; the message is the one of the
            command.
        KeyboardInterrupt: It was interrupted. Everything measured stays; `PairedComparison.resume`
            goes on with it.

    Example:
        >>> tunediff.run_comparison("digits", {"optimizer.lr": 3e-3}, budget="10s").verdict.verdict
        'better'
    """
    place = folder(storage)
    with called():
        sides = [*_side(a, a, place), *_side(a, b, place)]
    options = CompareOptions(
        words=sides, budget=duration(budget), unit=unit, pairs=pairs, resolution=resolution, compile=compile,
        setup=setup, name=name, storage=place, track=track, address=address, cpus=cpus, gpus=gpus,
        no_check=not check, force=force,
    )  # fmt: skip
    return _run(options, progress)


def _side(a: Side, side: Side, storage: Path) -> list[str]:
    """Return the words of a command line that name a side; a mapping of knobs changes A, also knobs
    that A sets."""
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
        return PairedComparison(compare_run.run(with_plain_numbers(options), lines_of(progress)))
