"""Check the `study:` section of a search file: the final table and figure, and quantities.

A quantity's name is its CSV column and includes the unit; its label is used in headings and axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tunediff import config as cfg
from tunediff.config import ConfigError, Quantity, Workload
from tunediff.config.knobs import nearest, refuse
from tunediff.core.point import in_units
from tunediff.search_space.sections import StudySection, checked

DERIVED: dict[str, Quantity] = {
    "compile_s": Quantity("compile", "s", "compilation and warm-up step"),
    "setup_s": Quantity("setup", "s", "reading data, building the model"),
    "running_s": Quantity(
        "running", "s", "all seconds of the training: setup, compilation, waiting for data, steps"
    ),
    "epoch_s": Quantity(
        "epoch", "s", "samples of the set / samples per second, without compilation"
    ),
    "epoch_data_wait_s": Quantity("loading per epoch", "s", "epoch × share of waiting for data"),
    "versus_baseline": Quantity("vs. baseline", "×", "samples/s / the baseline's"),
    "percent_of_base": Quantity("of base", "%", "100 × samples/s / the baseline's"),
    "memory_percent_of_base": Quantity("memory of base", "%", "100 × memory / the baseline's"),
    "versus_previous": Quantity(
        "vs. rung before", "×", "samples/s / those of the rung before (ladder:)"
    ),
    "speedup_over_one_worker": Quantity(
        "vs. one worker", "×", "samples/s / those of one worker, all else equal"
    ),
    "scaling_efficiency": Quantity(
        "efficiency", "%", "speed-up over one worker / number of workers", 100.0
    ),
    "versus_uncompiled": Quantity(
        "vs. uncompiled", "×", "samples/s / those without compilation, all else equal"
    ),
    "samples_to_break_even": Quantity(
        "samples to break even", "", "samples after which compiling has paid for itself"
    ),
    "break_even_s": Quantity(
        "break even after", "s", "training seconds, compilation included, until then"
    ),
}
"""Quantities derived from measurements of one or two configurations, by name."""

WORDS: dict[str, Quantity] = {
    "configuration": Quantity(
        "configuration", "", "what differs from the baseline, or the rung of the ladder"
    ),
    "trial": Quantity("trial", "", "name of the trial, or of the first of several runs"),
    "status": Quantity("status", "", "how it ended"),
    "runs": Quantity(
        "runs", "", "runs that ended ok (seeds:); the others' columns are means over them"
    ),
}
"""Columns without a number of a run."""

OPERATIONS: dict[str, Quantity] = {
    "operation": Quantity("operation", "", "name as torch has it"),
    "calls": Quantity("calls", "", "calls in all profiled steps"),
    "calls_per_step": Quantity("calls/step", "", "calls in one step"),
    "self_s": Quantity(
        "self",
        "ms",
        "time in the operation itself, in all profiled steps; on a GPU the device's",
        1000,
    ),
    "self_s_per_step": Quantity(
        "self/step", "ms", "time in the operation itself in one step; on a GPU the device's", 1000
    ),
    "total_s": Quantity(
        "total", "ms", "time with the operations that it calls, in all profiled steps", 1000.0
    ),
    "share": Quantity("share", "%", "self time / self time of all operations", 100.0),
}
"""Columns of a table of operations: `operations: N` in the search file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(StudySection):
    """A checked `study:` section. Its figure: rungs, operations, lines over `x`, or bars.

    `x`: a knob with numbers, or a measured number; None: bars, one for each configuration. `y`:
    measured numbers, one panel each; empty: no figure, except for operations.
    """

    numbers: Mapping[str, Quantity]
    """Quantities that are a number of a run of this workload: measured, or derived."""

    def quantity(self, name: str) -> Quantity:
        """Return the quantity of that name; a knob is a quantity without a unit."""
        return {**WORDS, **self.numbers, **OPERATIONS}.get(name, Quantity(name))

    @property
    def of_operations(self) -> bool:
        """Return whether a row is an operation instead of a configuration."""
        return any(column in OPERATIONS for column in self.columns)

    @property
    def has_figure(self) -> bool:
        """Return whether it ends with a figure."""
        return bool(self.y) or self.of_operations


def _check_names(study: Study, where: str, workload: Workload) -> None:
    """Raise `ConfigError` for a name that does not exist, is given twice, or means two things."""
    numbers, knobs = study.numbers, workload.schema.knobs
    for key, kind, names, allowed in (
        ("columns", "knob or quantity", study.columns, [*WORDS, *numbers, *OPERATIONS, *knobs]),
        ("x", "knob or measured number", () if study.x is None else (study.x,), [*numbers, *knobs]),
        ("y", "measured number", study.y, [*numbers]),
    ):
        for name in names:
            at = f"{where}: {key}: {name!r}"
            if name not in allowed:
                raise ConfigError(f"{at}: no such {kind}; {nearest(name, allowed)}")
            refuse(names.count(name) > 1, f"{at} is given twice")
            both = name in knobs and name in {**WORDS, **numbers, **OPERATIONS}
            refuse(both, f"{at} is a quantity and a knob of {workload.title}; rename the knob")
    for key, names in (("columns", study.columns), ("y", study.y)):
        for name in names if study.of_operations else ():
            at = f"{where}: {key}: {name!r}"
            refuse(name in numbers, f"{at} is a quantity of a whole step, not of an operation")


def parse(
    content: object, source: str, workload: Workload, ladder: bool = False, operations: int = 0
) -> Study:
    """Check a `study:` section; `ladder`: the search has one; `operations`: profiled steps.

    Raises `ConfigError` that names file, key, value and the allowed values.
    """
    where, knobs = f"{source}: study", workload.schema.knobs
    lines = dataclasses.asdict(checked(StudySection, content, where))
    study = Study(**lines, numbers=cfg.quantities(workload) | in_units(DERIVED, workload.unit))
    _check_names(study, where, workload)
    # The table fits what is measured
    for name in study.columns:
        unmeasured = name in OPERATIONS and not operations
        refuse(unmeasured, f"{where}: columns: {name!r} needs operations: in the search file")
    # The axes fit each other and the form of the search
    words = study.x in knobs and knobs[study.x].kind not in ("int", "float")
    bars = "without x: there is a bar for each configuration"
    refuse(words, f"{where}: x: {study.x!r} holds no numbers; {bars}")
    lonely = study.x is not None and not study.y
    refuse(lonely, f"{where}: x: {study.x!r} needs y: as well, e.g. y: samples_per_s")
    axis = f"y: {', '.join(study.y)}" if study.x is None else f"x: {study.x}"
    more = ladder and (study.x is not None or len(study.y) > 1)
    refuse(more, f"{where}: {axis}: the figure of a ladder needs one name under y:, and no x:")
    return study
