"""Declare the sections of all workloads: how a training runs, independent of what it learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from tunediff.config.knobs import (
    Bool,
    ConfigError,
    EvaluationProtocol,
    Fixed,
    Float,
    Int,
    Refusal,
    section,
)
from tunediff.config.schema import Configuration, override

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record CUDA graphs."""


@section
class Loader:
    """How training data reaches the device."""

    batch_size: Annotated[Int, Ge(1), Le(65536)] = 128
    """Images per optimizer step over all workers and accumulation steps."""
    accumulation: Annotated[Int, Ge(1), Le(256)] = 1
    """Forward/backward passes per optimizer step."""
    resident: Bool = False
    """Keep the whole set on the device and draw batches there; `workers` and what follows have no
    effect."""
    workers: Annotated[Int, Ge(0), Le(128)] = 2
    """Loader processes per training worker; 0 loads in the training process."""
    prefetch_factor: Annotated[Int, Ge(1), Le(64)] = 2
    """Batches each loader process prepares ahead."""
    persistent_workers: Bool = True
    """Keep the loader processes from one pass over the data to the next; false starts new ones
    every time."""
    pin_memory: Bool = True
    """Page-locked host memory, from which a GPU can copy by itself; no effect on a CPU."""
    non_blocking: Bool = True
    """Go on while a batch is copied from page-locked memory to the GPU; no effect on a CPU."""
    transfer: Literal["uint8", "float32"] = "uint8"
    """What is copied to the device: bytes, which are converted there, or float32, four times as
    large."""

    def check(self, config: Systems) -> None:
        mode = config.compile.mode
        if self.accumulation > 1 and mode in CUDA_GRAPHS:
            why = f"compile.mode = {mode} uses CUDA graphs, which cannot accumulate"
            raise Refusal("loader.accumulation", why)
        parts, name = config.parallel.parts
        if self.batch_size % (passes := parts * self.accumulation):
            why = f"must be a multiple of {name} × loader.accumulation = {passes}"
            raise Refusal("loader.batch_size", why)

    def not_effective(self, config: Systems, device: str) -> Iterator[tuple[str, str]]:
        of_processes = ("prefetch_factor", "persistent_workers")
        of_copies = ("pin_memory", "non_blocking")
        if self.resident:
            why = "loader.resident keeps all samples on the device"
            for name in ("workers", *of_processes, *of_copies, "transfer"):
                yield f"loader.{name}", why
            return
        if self.workers == 0:
            for name in of_processes:
                yield f"loader.{name}", "there are no loader processes (loader.workers = 0)"
        if self.non_blocking and not self.pin_memory:
            why = "only copies from page-locked memory go on by themselves (loader.pin_memory)"
            yield "loader.non_blocking", why
        for name in of_copies:
            if device != "cuda" and getattr(self, name):
                yield f"loader.{name}", "nothing is copied to a GPU"


@section
class Precision:
    """Number formats."""

    amp: Literal["none", "bf16", "fp16"] = "none"
    """Autocast type of forward and backward; fp16 uses loss scaling."""
    matmul: Literal["highest", "high", "medium"] = "highest"
    """float32 matrix products: `highest` IEEE, `high` TF32, `medium` bfloat16
    (torch.set_float32_matmul_precision)."""
    conv_tf32: Bool = True
    """float32 convolutions of cuDNN in TF32, which is PyTorch's default; independent of
    `precision.matmul`, which is for products; no effect on a CPU."""
    cudnn_benchmark: Bool = False
    """Let cuDNN time its convolution algorithms in the first step and keep the fastest; no effect
    on a CPU."""

    def not_effective(self, config: Systems, device: str) -> Iterator[tuple[str, str]]:
        if device == "cuda":
            return
        if self.matmul == "high":
            yield "precision.matmul", "TF32 is a format of NVIDIA GPUs"
        if self.conv_tf32:
            yield "precision.conv_tf32", "TF32 is a format of NVIDIA GPUs"
        if self.cudnn_benchmark:
            yield "precision.cudnn_benchmark", "cuDNN is for NVIDIA GPUs"


@section
class Memory:
    """How memory is laid out, kept and saved."""

    channels_last: Bool = False
    """Weights and activations of convolutions in NHWC order: faster on tensor cores, and on many
    CPUs; the same result within rounding."""
    checkpoint: Annotated[Float, Ge(0.0), Le(1.0)] = 0.0
    """Activation checkpointing: the share of the model's repeating blocks, from the first on, that
    keep no activations but compute them again in the backward pass. Less memory, more time, the
    same result."""
    keep_freed: Bool = True
    """CPU training: memory that a step frees stays with the process for the next one. Otherwise the
    system takes large blocks back at once and hands them out again page by page. Learns the same,
    faster, with a tenth to a third more memory; glibc only, no effect on a GPU, whose allocator
    always does so."""

    def not_effective(self, config: Systems, device: str) -> Iterator[tuple[str, str]]:
        if self.keep_freed and device == "cuda":
            yield "memory.keep_freed", "a GPU's allocator keeps what is freed anyway"


@section
class Compile:
    """torch.compile."""

    mode: Literal[
        "none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = "none"
    """`none` runs eagerly; the others are torch.compile's modes."""
    dynamic: Bool = False
    """Compile once for every batch size instead of once for each; only with a mode other than
    `none`."""
    scope: Literal["model", "blocks"] = "model"
    """What is compiled: the whole network, or each residual block for itself, which compiles faster
    since equal blocks share the result; only with a mode other than `none`."""

    capture: Literal["none", "step", "auto"] = "none"
    """`step` captures one whole optimizer step as a CUDA graph, after two steps and a check that
    replays learn the same, and replays it from then on: small batches no longer wait for the host.
    Without and with torch.compile. A loop that reads values on the host in every step trains
    without capture, and the line is named. One GPU; no effect on a CPU. `auto`: the same, and with
    knobs that exclude `step` it trains without capture."""

    @property
    def active(self) -> bool:
        """Return whether anything is compiled."""
        return self.mode != "none"

    def check(self, config: Systems) -> None:
        for name, changed in (("dynamic", self.dynamic), ("scope", self.scope != "model")):
            if changed and not self.active:
                raise Refusal(f"compile.{name}", "it needs a compile.mode other than none")
        by_itself = f"compile.mode = {self.mode} captures CUDA graphs by itself; use default"
        self.refuse_capture(self.mode in CUDA_GRAPHS, by_itself)
        workers = config.parallel.workers
        alone = f"a step of one GPU is captured, and parallel.workers = {workers}"
        self.refuse_capture(workers > 1, alone)
        recomputed = "memory.checkpoint puts generators back in every step"
        self.refuse_capture(config.memory.checkpoint > 0, recomputed)

    def refuse_capture(self, broken: object, why: str) -> None:
        """Raise `Refusal` if steps are to be captured and `broken` is true."""
        if broken and self.capture == "step":
            raise Refusal("compile.capture", why)

    def not_effective(self, config: Systems, device: str) -> Iterator[tuple[str, str]]:
        if device != "cuda" and self.capture != "none":
            yield "compile.capture", "a step is captured on a GPU"
        if device != "cuda" and self.mode == "reduce-overhead":
            yield "compile.mode", "CUDA graphs need a GPU; it compiles as default does"


@section
class Parallel:
    """How several processes train one model (gloo on CPU, NCCL on GPU)."""

    workers: Annotated[Int, Ge(1), Le(1024)] = 1
    """World size: training processes, one per GPU, or sharing the CPU cores; with `dp` the GPUs of
    the one process."""
    strategy: Literal["ddp", "dp", "fsdp", "pipeline", "single"] = "ddp"
    """What the workers share: with `ddp` each has the model and a part of the batch, and gradients
    are averaged; with `fsdp` (FSDP2) each also keeps only its share of the weights, gradients and
    optimizer state, and gets the rest of a block while that runs; with `pipeline` each has the
    whole batch and learns a part of the model, by `trial.forward_backward`; `single` is one
    process. `dp` is one process for several GPUs (torch.nn.DataParallel): the slow one, as it
    copies the model to each of them in every step; to compare with, as `ddp` learns the same. One
    worker trains alone, with any strategy."""
    gradients: Literal["float32", "bf16"] = "float32"
    """Number format in which gradients travel between workers; bf16 halves what is sent, and rounds
    it."""
    bucket_mib: Annotated[Float, Gt(0.0), Le(10000.0)] = 25.0
    """ddp: gradients are averaged over workers in buckets of this size (MiB), while the backward
    pass goes on."""
    static_graph: Bool = False
    """ddp: tell DistributedDataParallel that every step computes the same graph, which lets it
    order the buckets by the first step, and allows parameters that no step uses; without it each
    step has to use all of them."""
    reshard: Bool = True
    """fsdp: give the weights of a block back after its forward pass, and gather them again for the
    backward pass: less memory, half as much again to send."""
    microbatches: Annotated[Int, Ge(1), Le(1024)] = 4
    """pipeline: parts into which each pass's batch is cut, so that the stages work at the same
    time. Of S stages and M parts each waits for (S − 1) / (M + S − 1) of a pass at least."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """pipeline: `gpipe` takes all parts forward, then all backward; `1f1b` goes back as soon as it
    can, and keeps the activations of no more parts than there are stages."""

    @property
    def together(self) -> bool:
        """Return whether one process uses all devices."""
        return self.strategy == "dp" and self.workers > 1

    @property
    def processes(self) -> int:
        """Return the number of processes that train together."""
        return 1 if self.together else self.workers

    @property
    def parts(self) -> tuple[int, str]:
        """Return into how many equal parts each pass's batch is divided, and which knob sets it."""
        if self.strategy == "pipeline" and self.workers > 1:
            return self.microbatches, "parallel.microbatches"
        return self.workers, "parallel.workers"

    def check(self, config: Systems) -> None:
        compiled_whole = config.compile.active and config.compile.scope == "model"
        if self.workers > 1:
            if self.strategy == "single":
                why = f"single is one process, and parallel.workers = {self.workers}"
                raise Refusal("parallel.strategy", why)
            if self.strategy == "fsdp" and config.memory.channels_last:
                why = "parallel.strategy = fsdp divides weights in their usual order only"
                raise Refusal("memory.channels_last", why)
            if self.strategy == "pipeline":
                self._check_pipeline(config, compiled_whole)
        if self.strategy == "ddp" and self.static_graph and config.loader.accumulation > 1:
            why = "passes of an accumulation that average nothing are another graph"
            raise Refusal("parallel.static_graph", why)
        if self.together and config.memory.checkpoint > 0:
            why = (
                "parallel.strategy = dp copies the model in every step, whose blocks would run"
                " those of one GPU; use 0, or ddp"
            )
            raise Refusal("memory.checkpoint", why)

    def _check_pipeline(self, config: Systems, compiled_whole: bool) -> None:
        piped = "parallel.strategy = pipeline"
        if self.schedule == "1f1b" and self.microbatches < self.workers:
            needs = f"one for each of parallel.workers = {self.workers} at least"
            raise Refusal("parallel.microbatches", f"parallel.schedule = 1f1b needs {needs}")
        if config.precision.amp == "fp16":
            why = f"stages of {piped} would find loss scales of their own; use bf16"
            raise Refusal("precision.amp", why)
        if compiled_whole:
            raise Refusal("compile.scope", f"{piped} never runs the model as a whole; use blocks")
        if config.compile.mode in CUDA_GRAPHS:
            why = f"{piped} has several passes under way, which CUDA graphs cannot; use default"
            raise Refusal("compile.mode", why)

    def not_effective(self, config: Systems, device: str) -> Iterator[tuple[str, str]]:
        changed = [name for name, value in vars(Parallel()).items() if getattr(self, name) != value]
        for name in changed:
            if name != "workers" and self.workers == 1:
                yield f"parallel.{name}", "one worker trains alone"
            elif self.strategy not in (strategies := _ONLY_OF.get(name, (self.strategy,))):
                yield (
                    f"parallel.{name}",
                    f"it belongs to parallel.strategy = {' and '.join(strategies)}",
                )


_ONLY_OF = {
    "gradients": ("ddp", "fsdp"),
    "bucket_mib": ("ddp",),
    "static_graph": ("ddp",),
    "reshard": ("fsdp",),
    "microbatches": ("pipeline",),
    "schedule": ("pipeline",),
}
"""Knobs of `Parallel` that only some strategies have, with these strategies."""


@section
class EvaluationSection:
    """How a model is judged. Never searched: all trials of a study must be measured by the same
    protocol.

    A workload's own section `evaluation` is a subclass.
    """

    points: Annotated[Int, Ge(1), Le(100), EvaluationProtocol()] = 4
    """Evaluations per training, at equal fractions of the budget; the last is the result."""


@section
class Systems(Configuration):
    """All knobs of a training; the budget belongs to the search or the command."""

    loader: Loader = dataclasses.field(default_factory=Loader)
    precision: Precision = dataclasses.field(default_factory=Precision)
    memory: Memory = dataclasses.field(default_factory=Memory)
    compile: Compile = dataclasses.field(default_factory=Compile)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    evaluation: Annotated[EvaluationSection, Fixed()] = dataclasses.field(
        default_factory=EvaluationSection
    )
    seed: Annotated[Int, Ge(0), Lt(2**31), Fixed()] = 0
    """Seed of initial weights, data order and everything that is drawn."""

    @property
    def devices(self) -> int:
        """Return how many GPUs, or on a CPU worker processes, the training uses; device-seconds
        count them."""
        return self.parallel.workers


def eager(config: Systems) -> Systems:
    """Return the configuration without torch.compile."""
    return dataclasses.replace(config, compile=Compile())


def why_not_captured(config: Systems) -> str:
    """Return why no step of this configuration can be captured; "": one may be."""
    try:
        override(config, {"compile.capture": "step"})
    except ConfigError as error:
        return str(error)
    return ""
