"""What a profile holds, as `profile.json` has it. Names end in their units; a GPU's own fields are
missing on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Literal, NotRequired, TypedDict, final

from tunediff.config import Values
from tunediff.core.environment import Environment

Owner = Literal["static_mib", "batch_mib", "forward_mib", "backward_mib", "rest_mib"]


class Device(TypedDict):
    type: str  # cpu, cuda
    name: str
    threads: int
    cores: int
    gpus: int
    memory_mib: float
    memory_limit_mib: float  # what a training may take of it


class Samples(TypedDict):
    name: str
    count: int
    mib: float


class Rates(TypedDict):
    batch_size: int
    samples_per_s: float
    step_s: float
    peak_memory_mib: float
    peak_reserved_mib: NotRequired[float]  # what the allocator of a GPU holds, used or not
    disturbed: bool  # others used the machine meanwhile


def held_mib(row: Rates) -> float:
    """Return the peak memory; on a GPU what its allocator held, used or not, which others cannot
    have."""
    return row.get("peak_reserved_mib", row["peak_memory_mib"])


class Speed(Rates):
    steps: int
    samples_per_s_sd: float | None  # over equal segments; None of one
    parts_s: dict[
        str, float
    ]  # of the mean step, by the names that the training gives them, and `other`
    first_step_s: float
    compile_s: float  # with the first step
    peak_host_memory_mib: float
    flops_per_sample: NotRequired[float]
    peak_flops_per_s: NotRequired[float]
    peak_share: NotRequired[float]
    load_average: NotRequired[float]
    compiled_graphs: NotRequired[int]
    expected_graphs: NotRequired[int]


class Operation(TypedDict):
    operation: str
    calls_per_step: float
    self_s_per_step: float  # without the operations that it calls; on a GPU the device's
    total_s_per_step: float
    share: float  # of all operations' own seconds


class Operations(TypedDict):
    kind: str  # operations, kernels
    longest: list[Operation]
    convolution_share: float
    self_s_per_step: float


class Peak(TypedDict):
    # when tensors take the most memory; that which they take, by the phase that allocated it:
    phase: str
    total_mib: float
    static_mib: float
    batch_mib: float
    forward_mib: float
    backward_mib: float
    rest_mib: float


class Memory(TypedDict):
    static: NotRequired[dict[str, float]]  # MiB that stay from step to step, by what they are
    peak: Peak | None
    timeline: (
        dict[str, list[float]] | None
    )  # `seconds` and the `_mib` of `Peak`, moment by moment; not in profile.json
    phases: list[tuple[float, float, str]]  # begin and end (s), name; not in profile.json


class Traced(TypedDict):
    operations: Operations
    memory: Memory
    traced_steps: int
    device_busy_s: NotRequired[float]
    device_busy_share: NotRequired[float]


@final
class Failed(TypedDict):
    failed: str


@final
class Tried(TypedDict):
    samples_per_s: float
    gain: float
    within_noise: bool
    peak_memory_mib: float


@dataclasses.dataclass
class Advice:
    """One thing to try."""

    change: Values  # knobs and values, to be set together
    reason: str
    bound: float | None = (
        None  # the rate grows by at most this factor; None where that cannot be told
    )
    tried: Tried | Failed | None = None  # what came of it where it was measured as well


class Profile(Traced):
    name: str
    command: str
    time: float  # Unix
    wall_s: float
    workers: int  # of the training; one is measured
    unit: str  # what a sample is called
    names: dict[str, str]  # of the parts of the step, where the workload gives them others
    config: Values
    fingerprint: str
    environment: Environment
    device: Device
    format_gains: dict[str, float]
    samples: Samples
    first: dict[
        str, float
    ]  # step_s, first_step_s and compile_s of a process that has trained nothing yet
    step: Speed
    loader_alone: (
        dict[str, float] | None
    )  # samples_per_s, samples, seconds; None: the samples lie on the device
    model_alone: Speed | None
    feed_ratio: float | None
    advice: list[Advice]
    trace: str
    snapshot: str | None
