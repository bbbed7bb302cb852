"""Define what an evaluation of a training measures: label, unit and meaning of each value."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A measured or derived quantity, with its texts for tables and axes."""

    label: str
    unit: str = ""
    """Unit in which it is shown; the unit of the stored value is in its name."""
    meaning: str = ""
    scale: float = 1.0
    """Factor from the stored to the shown value."""

    @property
    def heading(self) -> str:
        """Return the heading of a column: `step (ms)`."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


def _required(label: str, unit: str, meaning: str, scale: float = 1.0, **default: Any) -> Any:
    """Declare a field with its quantity, without a default unless one is given."""
    return dataclasses.field(
        metadata={"quantity": Quantity(label, unit, meaning, scale)}, **default
    )


_measured = functools.partial(_required, default=None)
"""Declare a field that every new point has, unless its type includes None; a damaged or foreign
journal may lack it."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One evaluation: progress of the training, its speed since the one before, quality of the
    model.

    `point[name]`, `point.get(name)` and `name in point` look up a value by the flat name under
    which the journal and all tables have it: a field, `step_<phase>_s`, or a value that the
    workload's evaluation returned.
    """

    index: int
    """Position on the curve: 1, 2, …"""
    train_s: float = _required("training", "s", "training seconds of the run")
    samples: int = _required("samples", "", "samples that the run trained")
    steps: int = _required("steps", "", "optimizer steps of the run")
    fraction: float = _measured(
        "of the budget", "%", "fraction of the budget at which it lies", 100.0
    )
    device_s: float = _measured("device-seconds", "s", "training seconds × devices")
    samples_per_s: float = _measured(
        "samples/s",
        "",
        "samples trained per second since the evaluation before, without compilation",
    )
    samples_per_s_sd: float = _measured(
        "± samples/s", "", "standard deviation of it within the run"
    )
    data_wait_share: float = _measured("waiting for data", "%", "share of the training time", 100.0)
    first_step_s: float = _measured(
        "first step", "s", "the first step of the run, which compiles and loads kernels"
    )
    before_first_batch_s: float | None = _measured(
        "setup", "s", "what the run did before its first batch"
    )
    peak_flops_per_s: float = _measured(
        "peak TFLOP/s", "", "of a square matrix product, measured, all workers", 1e-12
    )
    cpu_share: float = _measured(
        "CPU cores used", "", "CPU seconds of the training process per second"
    )
    other_load_share: float = _measured(
        "others' load", "%", "share of the machine's cores that others used", 100.0
    )
    disturbed: bool = False
    """Whether other processes used cores that this training needed: its seconds are theirs too."""
    weights_digest: str | None = None
    """Digest of the weights that were judged; those of the last point are exported."""
    loss: float = _measured("loss", "", "mean training loss since the evaluation before")
    peak_memory_mib: float = _measured(
        "memory", "MiB", "most memory allocated on the device; on a CPU by the process"
    )
    peak_host_memory_mib: float = _measured(
        "host memory", "MiB", "most memory of the training process on the host"
    )
    peak_reserved_mib: float | None = _measured(
        "memory reserved",
        "MiB",
        "most memory that torch's allocator held on the device before the first evaluation",
    )
    step_s: float | None = _measured("step", "ms", "one optimizer step", 1000.0)
    flops_per_sample: float | None = _measured(
        "GFLOP/sample", "", "arithmetic of a training step per sample", 1e-9
    )
    peak_share: float | None = _measured(
        "MFU",
        "%",
        "FLOP/s of the model, as a share of those that a matrix product reaches here",
        100.0,
    )
    price: float | None = _measured("price", "", "of the device-seconds, by that of a device-hour")
    compiled_graphs: int | None = _measured("compiled graphs", "", "graphs that torch.compile made")
    graph_breaks: int | None = _measured(
        "graph breaks", "", "how often torch.compile ended a graph within a call"
    )
    capture: str | None = _measured(
        "captured", "", "`captured` where steps were replayed, or `refused: why`: compile.capture"
    )
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the mean step by phase; flat name: `step_<phase>_s`."""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the clock so far, by part."""
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Values that the workload's evaluation returned or that it noted, by name."""

    @functools.cached_property
    def flat(self) -> dict[str, Any]:
        """Return all known values by flat name. The result is cached; do not change it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        known = {name: v for name, v in fields.items() if name not in _NESTED and v is not None}
        steps = {f"step_{name}_s": seconds for name, seconds in self.phases_s.items()}
        return {**known, **steps, "seconds": self.seconds, **self.metrics}

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Point:
        """Return the point of flat values, as a journal has them.

        Numbers that are NaN or infinite are left out: whoever reads a point gets finite numbers or
        none. Raises `TypeError` without index, training seconds, samples or steps.
        """
        fields: dict[str, Any] = {}
        phases, metrics = dict[str, float](), dict[str, Any]()
        for name, value in flat.items():
            if isinstance(value, float) and not math.isfinite(value):
                continue
            if name in cls.__dataclass_fields__ and name not in ("phases_s", "metrics"):
                fields[name] = value
            elif phase := _PHASE.fullmatch(name):
                phases[phase[1]] = value
            else:
                metrics[name] = value
        return cls(**fields, phases_s=phases, metrics=metrics)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value by its flat name."""
        return self.flat.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.flat[name]

    def __contains__(self, name: str) -> bool:
        return name in self.flat


_NESTED = ("phases_s", "seconds", "metrics")
_PHASE = re.compile(r"step_(\w+)_s")
_STEP = {
    "data_wait": ("waiting for data", "waiting for its samples"),
    "host_to_device": ("copy to device", "copying its samples to the device and scaling them"),
    "forward": ("forward", "the forward pass"),
    "backward": ("backward", "the backward pass, averaging over workers included"),
    "optimizer": ("optimizer", "unscaling, clipping and the update"),
    "other": ("other", "the rest"),
}
QUANTITIES: dict[str, Quantity] = {
    **{
        field.name: field.metadata["quantity"]
        for field in dataclasses.fields(Point)
        if "quantity" in field.metadata
    },
    **{
        f"step_{part}_s": Quantity(label, "ms", f"of a step: {of}", 1000.0)
        for part, (label, of) in _STEP.items()
    },
}
"""Quantities of every point, by name; a workload adds its own."""


def one_of(unit: str) -> str:
    """Return the singular of what samples are called: `image`, `query`."""
    return f"{unit[:-3]}y" if unit.endswith("ies") else unit.removesuffix("s")


def in_units(quantities: Mapping[str, Quantity], unit: str) -> dict[str, Quantity]:
    """Return the same quantities in the words of a workload: `images/s` instead of `samples/s`."""
    words = {"samples": unit, "sample": one_of(unit)}

    def translate(text: str) -> str:
        return re.sub(r"\bsamples?\b", lambda match: words[match[0]], text)

    return {
        name: dataclasses.replace(
            quantity, label=translate(quantity.label), meaning=translate(quantity.meaning)
        )
        for name, quantity in quantities.items()
    }
