"""The `study:` section of a search file, checked: which table and figure a search ends with, of which quantities.

A quantity's name is the CSV column, with its unit; its label is what headings and axes say.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Annotated

import pydantic
from annotated_types import MinLen
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from tunediff import config as cfg
from tunediff.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Quantity:
    """Something that a study measures or derives."""

    label: str
    unit: str
    """As shown; the name says the unit of the stored value."""
    meaning: str
    scale: float = 1.0
    """Shown = stored × scale."""

    @property
    def heading(self) -> str:
        """`step (ms)`."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


def _ms(label: str, meaning: str) -> Quantity:
    return Quantity(label, "ms", meaning, 1000.0)


MEASURED: dict[str, Quantity] = {
    "images_per_s": Quantity("images/s", "", "images trained per second, without compilation"),
    "images_per_s_sd": Quantity("± images/s", "", "standard deviation of it within the run"),
    "train_s": Quantity("training", "s", "training seconds of the run"),
    "images": Quantity("images", "", "images that the run trained"),
    "steps": Quantity("steps", "", "optimizer steps of the run"),
    "loss": Quantity("loss", "", "mean training loss since the evaluation before"),
    "frechet": Quantity("Fréchet distance", "", "FID or FD at the end"),
    "validation_loss": Quantity("validation loss", "", "ε-error on fixed images, timesteps and noise"),
    "step_s": _ms("step", "one optimizer step"),
    "step_data_wait_s": _ms("waiting for data", "of a step: waiting for its images"),
    "step_host_to_device_s": _ms("copy to device", "of a step: copying its images to the device and scaling them"),
    "step_sampler_s": _ms("noise and sampler", "of a step: timesteps, noise, noisy images, the sampler's own work"),
    "step_forward_s": _ms("forward", "of a step: the forward pass"),
    "step_backward_s": _ms("backward", "of a step: the backward pass, averaging over workers included"),
    "step_optimizer_s": _ms("optimizer", "of a step: unscaling, clipping and the update"),
    "step_ema_s": _ms("EMA", "of a step: the averaged weights"),
    "step_other_s": _ms("other", "of a step: the rest"),
    "first_step_s": Quantity("first step", "s", "the first step of the run, which compiles and loads kernels"),
    "data_wait_share": Quantity("waiting for data", "%", "share of the training time", 100.0),
    "compiled_graphs": Quantity("compiled graphs", "", "graphs that torch.compile made"),
    "peak_memory_mib": Quantity("memory", "MiB", "most memory allocated on the device; on a CPU by the process"),
    "peak_reserved_mib": Quantity("memory reserved", "MiB", "most memory that torch's allocator held on the device"),
    "peak_host_memory_mib": Quantity("host memory", "MiB", "most memory of the training process on the host"),
    "flops_per_image": Quantity("GFLOP/image", "", "arithmetic of a training step per image", 1e-9),
    "peak_flops_per_s": Quantity("peak TFLOP/s", "", "of a square matrix product, measured, all workers", 1e-12),
    "peak_share": Quantity("of peak", "%", "share of the FLOP/s that a matrix product reaches here", 100.0),
    "energy_j": Quantity("energy", "J", "energy of the GPU since the evaluation before"),
    "images_per_j": Quantity("images/J", "", "images trained per joule"),
    "cpu_share": Quantity("CPU cores used", "", "CPU seconds of the training process per second"),
    "load_average": Quantity("load average", "", "of the machine, over the last minute"),
    "other_load_share": Quantity("others' load", "%", "share of the machine's cores that others used", 100.0),
    "core_wait_share": Quantity("waiting for a core", "%", "share of its running time", 100.0),
}
"""What the last point of a trial holds, by name."""

DERIVED: dict[str, Quantity] = {
    "compile_s": Quantity("compile", "s", "compilation and warm-up step"),
    "setup_s": Quantity("setup", "s", "reading data, building the model"),
    "epoch_s": Quantity("epoch", "s", "images of the set / images per second, without compilation"),
    "epoch_data_wait_s": Quantity("loading per epoch", "s", "epoch × share of waiting for data"),
    "versus_baseline": Quantity("vs. baseline", "×", "images/s / the baseline's"),
    "percent_of_base": Quantity("of base", "%", "100 × images/s / the baseline's"),
    "memory_percent_of_base": Quantity("memory of base", "%", "100 × memory / the baseline's"),
    "versus_previous": Quantity("vs. rung before", "×", "images/s / those of the rung before (ladder:)"),
    "speedup_over_one_worker": Quantity("vs. one worker", "×", "images/s / those of one worker, all else equal"),
    "scaling_efficiency": Quantity("efficiency", "%", "speed-up over one worker / number of workers", 100.0),
    "versus_uncompiled": Quantity("vs. uncompiled", "×", "images/s / those without compilation, all else equal"),
    "images_to_break_even": Quantity("images to break even", "", "images after which compiling has paid for itself"),
    "break_even_s": Quantity("break even after", "s", "training seconds, compilation included, until then"),
}
"""What follows from the seconds of a run, or from the measurements of one or two configurations, by name."""

WORDS: dict[str, Quantity] = {
    "configuration": Quantity("configuration", "", "what differs from the baseline, or the rung of the ladder"),
    "trial": Quantity("trial", "", "name of the trial, or of the first of several runs"),
    "status": Quantity("status", "", "how it ended"),
    "runs": Quantity("runs", "", "runs that ended ok (seeds:); the others' columns are means over them"),
}
"""Columns that hold no number of a run."""

OPERATIONS: dict[str, Quantity] = {
    "operation": Quantity("operation", "", "name as torch has it"),
    "calls": Quantity("calls", "", "calls in all profiled steps"),
    "calls_per_step": Quantity("calls/step", "", "calls in one step"),
    "self_s": _ms("self", "time in the operation itself, in all profiled steps; on a GPU the device's"),
    "self_s_per_step": _ms("self/step", "time in the operation itself in one step; on a GPU the device's"),
    "total_s": _ms("total", "time with the operations that it calls, in all profiled steps"),
    "share": Quantity("share", "%", "self time / self time of all operations", 100.0),
}
"""Columns of a table of operations: `operations: N` in the search file."""

NUMBERS = MEASURED | DERIVED
QUANTITIES = WORDS | NUMBERS


def quantity(name: str) -> Quantity:
    """The quantity of that name; a knob is a quantity without a unit."""
    return QUANTITIES.get(name) or OPERATIONS.get(name) or Quantity(name, "", "")


@dataclass(frozen=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class Study:
    """A `study:` section. A ladder draws its rungs, operations themselves, anything else lines over `x`, or bars."""

    title: str = ""
    columns: Annotated[tuple[str, ...], MinLen(1)] = Field(default=(), validate_default=True)
    """Of the table: knobs and quantities."""
    x: str | None = None
    """A knob with numbers, or a measured number; None: bars, one for each configuration."""
    y: Annotated[tuple[str, ...], BeforeValidator(lambda y: (y,) if isinstance(y, str) else y)] = ()
    """Measured numbers, with a panel each; none: no figure, but for that of operations."""

    @property
    def of_operations(self) -> bool:
        """Whether a row is an operation, not a configuration."""
        return any(column in OPERATIONS for column in self.columns)

    @property
    def has_figure(self) -> bool:
        """Whether it ends with a figure."""
        return bool(self.y) or self.of_operations


_ADAPTER = TypeAdapter(Study)
_ALLOWED = {"title": "words", "columns": "a list of knobs and quantities", "x": "one name", "y": "a name, or several"}


def parse(content: object, source: str, ladder: bool = False, operations: int = 0) -> Study:
    """Check a `study:` section. `ladder`: whether the search is one; `operations`: steps that are profiled.

    Raises `ConfigError` naming file, key, value and what is allowed.
    """
    where, knobs = f"{source}: study", cfg.knobs()
    study = _shaped(content, where)
    for key, kind, names, allowed in (
        ("columns", "knob or quantity", study.columns, [*QUANTITIES, *OPERATIONS, *knobs]),
        ("x", "knob or measured number", () if study.x is None else (study.x,), [*NUMBERS, *knobs]),
        ("y", "measured number", study.y, [*NUMBERS]),
    ):
        for name in names:
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=3, cutoff=0.5)
                hint = f"did you mean {' or '.join(near)}?" if near else f"allowed: {', '.join(allowed)}"
                raise ConfigError(f"{where}: {key}: {name!r}: no such {kind}; {hint}")
            if names.count(name) > 1:
                raise ConfigError(f"{where}: {key}: {name!r} is given twice")
    for key, names in (("columns", study.columns), ("y", study.y)):
        if study.of_operations and (odd := [name for name in names if name in NUMBERS]):
            raise ConfigError(f"{where}: {key}: {odd[0]!r} is a quantity of a whole step, not of an operation")
    if study.of_operations and not operations:
        name = next(column for column in study.columns if column in OPERATIONS)
        raise ConfigError(f"{where}: columns: {name!r} needs operations: in the search file")
    if study.x in knobs and knobs[study.x].kind not in ("int", "float"):
        raise ConfigError(f"{where}: x: {study.x!r} holds no numbers; without x: there is a bar for each configuration")
    if study.x is not None and not study.y:
        raise ConfigError(f"{where}: x: {study.x!r} needs y: as well, e.g. y: images_per_s")
    if ladder and (study.x is not None or len(study.y) > 1):
        found = f"y: {', '.join(study.y)}" if study.x is None else f"x: {study.x}"
        raise ConfigError(f"{where}: {found}: the figure of a ladder needs one name under y:, and no x:")
    return study


def _shaped(content: object, where: str) -> Study:
    """The section with its names as they stand there."""
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: needs `key: value` lines, found {content!r}")
    try:
        return _ADAPTER.validate_python(content)
    except pydantic.ValidationError as error:
        keys = [str(detail["loc"][0]) for detail in error.errors()]
    key = next((key for key in keys if key not in _ALLOWED), keys[0])
    if key not in _ALLOWED:
        raise ConfigError(f"{where}: {key}: no such key; allowed: {', '.join(_ALLOWED)}")
    raise ConfigError(f"{where}: {key}: {content.get(key)!r} is not allowed; allowed: {_ALLOWED[key]}")
