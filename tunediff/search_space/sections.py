"""Declare the sections of a search file: their keys and the values that these take.

Of `study:`, the final table and figure, also the quantities that it may name: a quantity's name is
its CSV column and includes the unit; its label is used in headings and axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BeforeValidator

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Quantity, Values, Workload
from tunediff.config.knobs import Bool, Float, Int, Str, nearest, refuse, section, validated
from tunediff.core.point import in_units
from tunediff.experiment.model import EarlyStoppingName, seconds_of

MAX_SEEDS = 100
MOST_FINALISTS = 20
Service = Literal["wandb", "mlflow", "trackio", "tensorboard"]
Sampler = Literal[
    "TPESampler",
    "GPSampler",
    "RandomSampler",
    "QMCSampler",
    "CmaEsSampler",
    "NSGAIISampler",
    "BruteForceSampler",
]
"""Samplers of Optuna that a search can draw with."""
Cost = Literal["peak_memory_mib", "device_s", "price"]
COSTS: tuple[str, ...] = get_args(Cost)
"""Allowed second objectives, which are minimized: device memory, seconds × devices and
price."""


def _seconds(value: Any) -> float:
    """Return the seconds of a duration in a file, which has its unit. Raises `ValueError`."""
    if not isinstance(value, str):
        raise ValueError("is not a duration; allowed: a number with its unit, e.g. 90s, 10m, 1h30m")
    return seconds_of(value)


Duration = Annotated[float, BeforeValidator(_seconds)]


@section
class Confirm:
    """`confirm:`: how the finalists of a search run again."""

    of: Annotated[Int, Ge(1), Le(MOST_FINALISTS)] = 3  # the best so many
    # at most: runs of each and of the baseline, on seeds new to it
    seeds: Annotated[Int, Ge(2), Le(MAX_SEEDS)] = 12
    # as in `RunOptions`, of every finished run
    final: Values = dataclasses.field(default_factory=dict)
    parallel: Bool | None = None
    # whether all equal devices of this machine have a run at a time; absent: if they are GPUs


@section
class RunOptions:
    """Keys of a search file that set directly how trials run."""

    early_stopping: EarlyStoppingName = "none"
    sampler: Sampler = "TPESampler"  # of Optuna, which draws the points of search:
    seed: Annotated[Int, Ge(0), Lt(2**32)] = 0  # of the search; a training's own is the knob `seed`
    trials_per_gpu: Annotated[Int, Ge(1), Le(16)] = 1  # trials of one worker that share each GPU
    at_once: Annotated[Int, Ge(1), Le(1024)] = 1  # confirming runs, on equal devices of one machine
    operations: Annotated[Int, Ge(0), Le(1000)] = 0  # steps that are profiled after a training
    track: Service | None = None  # the service that shows every trial as a run
    final: Values = dataclasses.field(default_factory=dict)
    # knobs of `evaluation.` for one more evaluation of every finished trial; empty: none


@section
class SearchFile(RunOptions):
    """A search file; None: the key is absent."""

    workload: Str = dataclasses.field(
        kw_only=True
    )  # a baseline, a user's file, or a configuration such as best.yaml
    warm_start: Str | None = None  # an earlier search, whose best points are tried first
    objective: Any = None
    budget: Lines = dataclasses.field(default_factory=dict)
    seeds: Annotated[Int, Ge(2), Le(MAX_SEEDS)] | None = None
    noise: Annotated[Int, Ge(1), Le(MAX_SEEDS)] | None = None
    fixed: Lines = dataclasses.field(default_factory=dict)
    baseline: Lines = dataclasses.field(default_factory=dict)
    search: Lines | None = None
    grid: Lines | None = None
    trials: list[Lines] | None = None  # points, e.g. - {precision.amp: bf16}
    ladder: dict[str, Lines] | None = None
    first: list[Lines] | None = None
    study: Any = None
    confirm: Lines | None = None


@section
class BudgetSection:
    """`budget:`"""

    per_trial: Duration  # training seconds of one trial
    unit: Literal["wall", "device"] = "wall"
    price_per_device_hour: Annotated[Float, Gt(0.0)] | None = None  # in any currency
    trials: Annotated[Int, Ge(1)] | None = None
    total: Duration | None = None
    compile: Literal["charged", "free"] | None = None
    setup: Literal["charged", "free"] = "free"
    # whether what a workload does before its first batch counts as training
    deadline: Duration | None = None


@section
class ObjectiveSection:
    """`objective:`"""

    metric: Str | None = None
    mode: Literal["min", "max"] | None = None
    cost: Cost | None = None
    target: Str | None = None  # what the metric is to reach in the least time, e.g. val_loss<=3.28


def objective_section(content: Any) -> Any:
    """Return `objective:` as a section: `frechet` and `[frechet, device_s]` stand for one."""
    if isinstance(content, str):
        return {"metric": content}
    if isinstance(content, list):
        return dict(zip(("metric", "cost"), content, strict=False))
    return {} if content is None else content


@section
class DimensionSection:
    """The space of a searched knob: a choice of values, or a range of numbers."""

    choice: list[Any] | None = None
    low: Any = None
    high: Any = None
    step: Annotated[Float, Gt(0.0)] | None = None
    log: Bool = False
    when: Lines = dataclasses.field(default_factory=dict)


@section
class StudySection:
    """`study:`"""

    columns: Annotated[tuple[Str, ...], MinLen(1)]
    title: Str = ""
    x: Str | None = None
    y: Annotated[tuple[Str, ...], BeforeValidator(lambda y: (y,) if isinstance(y, str) else y)] = ()


# ---- the section study:
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
            both = name in knobs and name in {**WORDS, **numbers, **OPERATIONS}
            refuse(both, f"{at} is a quantity and a knob of {workload.title}; rename the knob")
    for key, names in (("columns", study.columns), ("y", study.y)):
        for name in names if study.of_operations else ():
            at = f"{where}: {key}: {name!r}"
            refuse(name in numbers, f"{at} is a quantity of a whole step, not of an operation")


def parse_study(
    content: Mapping[str, Any],
    source: str,
    workload: Workload,
    operations: int = 0,
) -> Study:
    """Check a `study:` section; `operations`: profiled steps.

    Raises `ConfigError` that names file, key, value and the allowed values.
    """
    where = f"{source}: study"
    lines = dataclasses.asdict(validated(StudySection, content, where))
    study = Study(**lines, numbers=cfg.quantities(workload) | in_units(DERIVED, workload.unit))
    _check_names(study, where, workload)
    # The table fits what is measured
    for name in study.columns:
        unmeasured = name in OPERATIONS and not operations
        refuse(unmeasured, f"{where}: columns: {name!r} needs operations: in the search file")
    return study
