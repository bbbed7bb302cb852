"""What a profile holds, as in `profile.json`; a CPU lacks the keys that only a GPU has."""

from __future__ import annotations

import dataclasses
from typing import Literal, NotRequired, TypedDict

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


class StepTimes(TypedDict):
    """The mean step of a short training."""

    batch_size: int
    steps: int
    samples_per_s: float
    samples_per_s_sd: float | None  # over equal segments; None for one segment
    step_s: float
    parts_s: dict[str, float]  # by the names that the training gives them, and `other`
    first_step_s: float
    compile_s: float  # with the first step
    peak_memory_mib: float
    peak_reserved_mib: NotRequired[float]  # held by the allocator of a GPU, used or not
    peak_host_memory_mib: float
    disturbed: bool  # others used the machine meanwhile
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
    share: float  # of all operations' self time


class Operations(TypedDict):
    kind: str  # operations, kernels
    longest: list[Operation]
    convolution_share: float
    self_s_per_step: float


class Peak(TypedDict):
    """The moment when tensors take the most memory, by the phase that allocated it."""

    phase: str
    total_mib: float
    static_mib: float
    batch_mib: float
    forward_mib: float
    backward_mib: float
    rest_mib: float


class TensorMemory(TypedDict):
    static: dict[str, float]  # MiB that stay from step to step, by what they are
    peak: Peak | None


class Traced(TypedDict):
    operations: Operations
    memory: TensorMemory
    traced_steps: int
    device_busy_s: NotRequired[float]
    device_busy_share: NotRequired[float]


@dataclasses.dataclass
class Advice:
    """Knobs to be set together, and why."""

    change: Values
    reason: str


class Profile(Traced):
    name: str
    command: str
    time: float  # Unix
    wall_s: float
    workers: int  # of the training; one is measured
    unit: str  # what a sample is called
    names: dict[str, str]  # labels of the parts of the step, where the workload has some
    config: Values
    fingerprint: str
    environment: Environment
    device: Device
    format_gains: dict[str, float]
    samples: Samples
    first: dict[str, float]  # step_s, first_step_s, compile_s of the process's first training
    step: StepTimes
    loader_alone: dict[str, float] | None  # samples_per_s, samples, seconds; None: resident
    advice: list[Advice]
    trace: str


def held_mib(step: StepTimes) -> float:
    """Return the peak memory; on a GPU what its allocator held, used or not."""
    return step.get("peak_reserved_mib", step["peak_memory_mib"])
