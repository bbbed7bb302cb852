"""The `study:` section of a search file, checked: which table and figure a search ends with, of which quantities.

A quantity's name is the CSV column, with its unit; its label is what headings and axes say.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError

FILES = ("study.csv", "study.md", "study.png")
"""What a study leaves in the folder of its search."""

TOP = 10
"""Operations of each configuration that a table of operations shows."""


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
    "compile_s": Quantity("compile", "s", "compilation and warm-up step"),
    "setup_s": Quantity("setup", "s", "reading data, building the model"),
}
"""What the last point of a trial holds, by name."""

DERIVED: dict[str, Quantity] = {
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
"""What follows from the measurements of one or two configurations, by name."""

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

QUANTITIES = WORDS | MEASURED | DERIVED
KINDS = ("lines", "bars", "stacked", "ladder", "operations")


@dataclasses.dataclass(frozen=True)
class Figure:
    """What is drawn."""

    kind: str
    """`lines`, `bars`: a panel for each `y`; `stacked`: bars of all `y`, end to end; `ladder`: a rung with all before
    it beside the rung alone; `operations`: the longest ones of each configuration."""
    y: tuple[str, ...] = ()
    x: str = "configuration"
    lines: tuple[str, ...] = ()
    """Knobs with a line (colour) for each of their values."""
    labels: str | None = None
    """Knob whose value is written beside every point of a line."""
    log: tuple[str, ...] = ()
    """Axes with a logarithmic scale: x, y."""


@dataclasses.dataclass(frozen=True)
class Study:
    """A checked `study:` section."""

    title: str
    columns: tuple[str, ...]
    """Knobs and quantities."""
    figure: Figure | None = None

    @property
    def of_operations(self) -> bool:
        """Whether a row is an operation, not a configuration."""
        return any(column in OPERATIONS for column in self.columns)


def quantity(name: str) -> Quantity:
    """The quantity of that name; a knob is a quantity without a unit."""
    return QUANTITIES.get(name) or OPERATIONS.get(name) or Quantity(name, "", "")


def parse(content: Any, source: str, ladder: bool = False, operations: int = 0) -> Study:
    """Check a `study:` section. `ladder`: whether the search is one; `operations`: steps that are profiled.

    Raises `ConfigError` naming file, key, value and what is allowed.
    """
    where = f"{source}: study"
    content = _mapping(content, where, ("title", "columns", "figure"))
    title = content.get("title", "")
    if not isinstance(title, str):
        raise ConfigError(f"{where}: title: {title!r} is not allowed; allowed: words")
    columns = content.get("columns")
    if not isinstance(columns, list) or not columns:
        raise ConfigError(f"{where}: columns: needs a list of knobs and quantities, found {columns!r}")
    for i, column in enumerate(columns):
        _known(column, f"{where}: columns[{i}]", operations)
    if len(set(columns)) < len(columns):
        twice = next(column for column in columns if columns.count(column) > 1)
        raise ConfigError(f"{where}: columns: {twice!r} is given twice")
    study = Study(title, tuple(columns))
    if study.of_operations and (odd := [c for c in columns if c in MEASURED | DERIVED]):
        raise ConfigError(f"{where}: columns: {odd[0]!r} is a quantity of a whole step, not of an operation")
    if "figure" not in content:
        return study
    return dataclasses.replace(study, figure=_figure(content["figure"], f"{where}: figure", ladder, operations))


def _figure(content: Any, where: str, ladder: bool, operations: int) -> Figure:
    content = _mapping(content, where, ("kind", "x", "y", "lines", "labels", "log"))
    kind = content.get("kind", "lines")
    if kind not in KINDS:
        raise ConfigError(f"{where}: kind: {kind!r} is not allowed; allowed: {', '.join(KINDS)}")
    for needed, given, words in (("ladder", ladder, "ladder:"), ("operations", operations, "operations:")):
        if kind == needed and not given:
            raise ConfigError(f"{where}: kind: {kind!r} needs {words} in the search file")
    belongs = {"lines": ("x", "y", "lines", "labels", "log"), "bars": ("x", "y", "lines"), "stacked": ("x", "y"),
               "ladder": ("y",), "operations": ()}[kind]  # fmt: skip
    if odd := [key for key in content if key not in ("kind", *belongs)]:
        raise ConfigError(f"{where}: {odd[0]}: does not belong to a figure of kind {kind}")
    if "y" in belongs and "y" not in content:
        raise ConfigError(f"{where}: y: is missing; e.g. y: images_per_s")
    if kind == "lines" and "x" not in content:
        raise ConfigError(f"{where}: x: is missing; e.g. x: loader.batch_size")
    y, lines, log = (_listed(content.get(key, [])) for key in ("y", "lines", "log"))
    for name in y:
        _known(name, f"{where}: y", 0)
        if name in WORDS or name in cfg.knobs():
            raise ConfigError(f"{where}: y: {name!r} is not measured; allowed: {', '.join(MEASURED | DERIVED)}")
    if "y" in belongs and not y:
        raise ConfigError(f"{where}: y: names no quantity; e.g. y: images_per_s")
    if kind == "ladder" and len(y) > 1:
        raise ConfigError(f"{where}: y: a ladder has one quantity, found {', '.join(y)}")
    x = content.get("x", "configuration")
    _known(x, f"{where}: x", 0)
    for key, names in (("lines", lines), ("labels", _listed(content.get("labels", [])))):
        for name in names:
            if name not in cfg.knobs():
                raise ConfigError(cfg.unknown_knob(str(name), f"{where}: {key}"))
    labels = content.get("labels")
    if isinstance(labels, list):
        raise ConfigError(f"{where}: labels: {labels!r} is not allowed; allowed: one knob")
    if wrong := [axis for axis in log if axis not in ("x", "y")]:
        raise ConfigError(f"{where}: log: {wrong[0]!r} is not an axis; allowed: x, y")
    return Figure(kind, y, x, lines, labels, log)


def _known(name: Any, where: str, operations: int) -> None:
    """Refuse what is neither a knob nor a quantity."""
    if name in OPERATIONS and name not in QUANTITIES:
        if operations:
            return
        raise ConfigError(f"{where}: {name!r} needs operations: in the search file, and belongs into columns: only")
    if name in cfg.knobs() or name in QUANTITIES:
        return
    near = difflib.get_close_matches(str(name), [*QUANTITIES, *OPERATIONS, *cfg.knobs()], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"allowed: a knob, or {', '.join(QUANTITIES)}"
    raise ConfigError(f"{where}: {name!r}: no such knob or quantity; {hint}")


def _mapping(value: Any, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: needs `key: value` lines, found {value!r}")
    for key in value:
        if key not in keys:
            raise ConfigError(f"{where}: {key}: no such key; allowed: {', '.join(keys)}")
    return value


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)
