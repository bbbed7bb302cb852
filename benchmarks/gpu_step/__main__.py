"""The flagship's step on a GPU, in nine minutes: `python -m benchmarks.gpu_step [OUT] [--minutes 9] [--dry]`.

Prints a row of JSON for each measurement, and keeps them in OUT/rows.jsonl (ray_results/reference/gpu-step). In this
order, each part only while there is time for it:

- `ceilings`: matrix products and a copy, which the shares are of;
- `operation`: `fused_norm` by shape, forward and backward, beside torch's GroupNorm and SiLU, in GB/s;
- `step`: real trainings of the flagship, captured and eager, fused and plain norm, TF32 and bf16, by batch;
- `evaluation`: the forward pass of sampling by number format, eagerly and as a CUDA graph;
- `start`: imports and the CUDA context, each in a process of its own;
- `tests`: those marked `gpu` that are about capture;
- `search`: four trials with a confirmed verdict; `peers`: benchmarks.peers without torch.compile.

--dry runs all of it on a CPU with tiny sizes, steps recorded instead of captured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core.clock import Budget
from tunediff.core.point import Point
from tunediff.distributed import alone
from tunediff.training.capture.graph import RecordedStep, use_side_stream
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.precision import float32_formats
from tunediff.training.training_run import Program, TrainingRun
from tunediff.training.trial import Trial
from tunediff.training.trial import run as run_training
from tunediff.workloads.diffusion import train as workload
from tunediff.workloads.diffusion import unet

TINY = {
    "model.channels": 8, "model.norm_groups": 4, "model.multipliers": [1, 2], "model.attention": [],
    "data.image_size": 16, "optimizer.warmup": 0.0,
}  # fmt: skip
NHWC = {"precision.amp": "bf16", "precision.matmul": "high", "memory.channels_last": True}
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "TF32, NCHW": ({"precision.matmul": "high"}, False),
    "bf16, NCHW": ({"precision.amp": "bf16", "precision.matmul": "high"}, False),
    "bf16, NHWC, plain norm": ({**NHWC, "precision.cudnn_benchmark": True}, False),
    "bf16, NHWC, fused norm": ({**NHWC, "precision.cudnn_benchmark": True}, True),
}
"""Knobs of a kind of step, and whether the norm is fused."""


class Bench:
    """Rows, the time that is left, and the sizes."""

    def __init__(self, out: Path, minutes: float, dry: bool) -> None:
        self.dry, self.device = dry, torch.device("cpu" if dry else "cuda")
        self.end = time.monotonic() + 60 * minutes
        out.mkdir(parents=True, exist_ok=True)
        self.file = open(out / "rows.jsonl", "a")  # noqa: SIM115 – open to the end
        name = "dry run on a CPU" if dry else torch.cuda.get_device_name()
        self.row("device", name=name, torch=torch.__version__, time=time.time())

    def row(self, what: str, **values: Any) -> None:
        line = json.dumps({"what": what, **values})
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    def seconds(self, call: Callable[[], object], times: int = 20) -> float:
        """The median seconds of a call, by the device's clock."""
        if self.dry:
            times = 1
        for _ in range(1 if self.dry else 3):
            call()
        found = []
        for _ in range(1 if self.dry else 3):
            if self.dry:
                begin = time.perf_counter()
                call()
                found.append(time.perf_counter() - begin)
                continue
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            for _ in range(times):
                call()
            events[1].record()
            torch.cuda.synchronize()
            found.append(events[0].elapsed_time(events[1]) / 1000 / times)
        return statistics.median(found)


def config_of(bench: Bench, batch: int, knobs: dict[str, Any]) -> Systems:
    """The flagship with a batch size and knobs; tiny in a dry run."""
    values = {
        "loader.batch_size": batch, "optimizer.implementation": "fused", "evaluation.points": 1,
        "loader.workers": 0, "loader.resident": True, **(TINY if bench.dry else {}), **knobs,
    }  # fmt: skip
    return cfg.override(cfg.baseline("cifar10"), values)


# ---- parts
def ceilings(bench: Bench) -> None:
    size = 64 if bench.dry else 8192
    for name, dtype, matmul in (("bf16", torch.bfloat16, "high"), ("TF32", torch.float32, "high")):
        with float32_formats(matmul, True):
            a = torch.randn(size, size, device=bench.device, dtype=dtype)
            taken = bench.seconds(lambda a=a: a @ a, 10)
        bench.row("product", format=name, tflops=2 * size**3 / taken / 1e12)
    source = torch.empty(2**12 if bench.dry else 2**30, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    taken = bench.seconds(lambda: target.copy_(source), 10)
    bench.row("copy", gb_per_s=2 * source.numel() / taken / 1e9)


def operation(bench: Bench) -> None:
    """Of a batch of 128: bytes that must be read and written, over the time taken."""
    from tunediff.workloads.diffusion import fused_norm

    shapes = [(128, 32), (256, 16), (384, 16), (256, 8), (512, 8), (512, 4), (384, 32), (256, 32)]
    for channels, side in [(8, 4)] if bench.dry else shapes:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            shape = (2 if bench.dry else 128, channels, side, side)
            x = torch.randn(shape, device=bench.device).to(dtype, memory_format=torch.channels_last)
            x.requires_grad_()
            weight, bias = torch.ones(2, channels, device=bench.device, requires_grad=True).unbind()
            groups = 4 if bench.dry else 32

            def fused(
                x: Tensor = x, w: Tensor = weight, b: Tensor = bias, g: int = groups
            ) -> Tensor:
                return fused_norm.norm_silu(x, None, w, b, g, 1e-6)

            def plain(
                x: Tensor = x, w: Tensor = weight, b: Tensor = bias, g: int = groups
            ) -> Tensor:
                return F.silu(F.group_norm(x, g, w.to(x.dtype), b.to(x.dtype), 1e-6))

            gb = x.numel() * x.element_size() / 1e9
            for name, call in (("fused", fused), ("torch", plain)):
                with torch.no_grad():
                    forward = bench.seconds(call)
                y, dy = call(), torch.randn_like(x)

                def backward(y: Tensor = y, x: Tensor = x, dy: Tensor = dy) -> Any:
                    return torch.autograd.grad(y, x, dy, retain_graph=True)

                bench.row(
                    "operation", by=name, shape=list(shape), format=str(dtype).removeprefix("torch."),
                    forward_gb_per_s=2 * gb / forward, backward_gb_per_s=3 * gb / bench.seconds(backward),
                )  # fmt: skip


class Facts(Observer):
    """Keeps the points and what is said of capture."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.facts = list[Point](), dict[str, Any]()

    def point(self, point: Point) -> bool:
        self.points.append(point)
        return True

    def about(self, facts: Any) -> None:
        self.facts |= facts


class OnRecorder(Program):
    """Steps are recorded on a CPU in place of a CUDA graph."""

    def step_graph(self, run: TrainingRun) -> Any:
        return RecordedStep if run.config.compile.capture == "step" else None


@contextlib.contextmanager
def random_images(config: Systems) -> Iterator[None]:
    """Learn from random pixels, on which no speed depends."""
    side, channels = config.knobs.data.image_size, config.knobs.data.channels
    pixels = torch.randint(0, 256, (2048, channels, side, side), dtype=torch.uint8)
    images = mock.Mock(pixels=pixels, digest="", summary=[])
    images.name, images.__len__ = "random", lambda self: len(pixels)
    with (
        mock.patch.object(workload.data, "load", return_value=images),
        mock.patch.object(Trial, "about"),
    ):
        yield


def step(bench: Bench) -> None:
    for batch in (4,) if bench.dry else (128, 1024, 32, 512):
        for name, (knobs, fused) in KINDS.items():
            for capture in ("none", "step"):
                if bench.left_s < 150:
                    return
                with guarded(bench, f"{name} {batch} {capture}"):
                    train(bench, batch, name, {**knobs, "compile.capture": capture}, fused)


def train(bench: Bench, batch: int, name: str, knobs: dict[str, Any], fused: bool) -> None:
    config, observer = config_of(bench, batch, knobs), Facts()
    budget = Budget(steps=8) if bench.dry else Budget(seconds=3.0, compile_charged=False)
    program = OnRecorder() if bench.dry else Program()
    plain = (
        contextlib.nullcontext()
        if fused
        else mock.patch.object(unet, "fused_norm", return_value=None)
    )
    with random_images(config), plain:
        run_training(Engine(config, budget, alone(), observer, program, evaluates=False))
    point = observer.points[-1]
    bench.row(
        "step", kind=name, batch=batch, capture=observer.facts.get("capture", "none"),
        images_per_s=point.samples_per_s, step_ms=1000 * (point.step_s or 0.0), peak_share=point.peak_share,
        memory_mib=point.peak_memory_mib, compile_s=point.seconds["compile"], steps=point.steps,
        phases_ms={part: 1000 * taken for part, taken in point.phases_s.items()},
    )  # fmt: skip


@torch.no_grad()
def evaluation(bench: Bench) -> None:
    """One denoising step of 500 images."""
    config = config_of(bench, 4, {})
    net = unet.network(config.knobs).to(bench.device).eval()
    torch.nn.init.normal_(net.output.weight, std=0.02)
    count, side = (2, 16) if bench.dry else (500, 32)
    exact: Tensor | None = None
    for name, matmul, amp in (
        ("float32", "highest", None),
        ("TF32", "high", None),
        ("bf16", "high", torch.bfloat16),
    ):
        layout = torch.channels_last if amp else torch.contiguous_format
        net.to(memory_format=layout)
        generator = torch.Generator(bench.device).manual_seed(0)
        x = torch.randn(count, 3, side, side, device=bench.device, generator=generator)
        x, t = x.contiguous(memory_format=layout), torch.arange(count, device=bench.device)

        def predict(x: Tensor = x, t: Tensor = t, amp: Any = amp) -> Tensor:
            with torch.autocast(bench.device.type, amp or torch.bfloat16, enabled=amp is not None):
                return net(x, t)  # type: ignore[no-any-return]

        with float32_formats(matmul, matmul == "high"):
            found = predict().float()
            exact = found if exact is None else exact
            times = {"eager_ms": 1000 * bench.seconds(predict, 5)}
            if not bench.dry:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                    predict()
                times["graph_ms"] = 1000 * bench.seconds(graph.replay, 5)
        error = float((found - exact).norm() / exact.norm())
        bench.row("evaluation", format=name, images=count, relative_error=error, **times)


def start(bench: Bench) -> None:
    for name, code in {
        "torch": "import torch", "CUDA context": "import torch; torch.zeros(1, device=DEVICE)",
        "ray.train": "import ray.train", "worker": "import tunediff.tuning.worker",
        "workload": "import tunediff.workloads.diffusion.train",
    }.items():  # fmt: skip
        begin = time.monotonic()
        subprocess.run(
            [sys.executable, "-c", code.replace("DEVICE", repr(bench.device.type))],
            check=True,
            timeout=120,
        )
        bench.row("start", imports=name, wall_s=time.monotonic() - begin)


def command(bench: Bench, what: str, words: list[str], at_most_s: float, in_dry: list[str]) -> None:
    """Run a command of the project and keep the end of what it prints."""
    limit = min(at_most_s, bench.left_s - 5)
    if limit < 20:
        bench.row(what, skipped="no time is left")
        return
    words, begin = [sys.executable, "-m", *(in_dry if bench.dry else words)], time.monotonic()
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=limit,
            env={**os.environ, "NO_COLOR": "1"},
        )
        code, lines = done.returncode, (done.stdout + done.stderr).splitlines()
    except subprocess.TimeoutExpired:
        code, lines = -1, [f"stopped after {limit:.0f} s"]
    bench.row(
        what,
        command=" ".join(words[2:]),
        code=code,
        wall_s=time.monotonic() - begin,
        end=lines[-25:],
    )


def tests(bench: Bench) -> None:
    words = ["pytest", "-q", "-m", "gpu", "tests/training/test_gpu.py", "-k", "capture or fused"]
    command(bench, "tests", words, 120, [*words[:-1], "distance", "--co"])


def search(bench: Bench) -> None:
    words = [
        "tunediff.search",
        "digits",
        "--trials",
        "4",
        "--budget",
        "5s",
        "--confirm",
        "1",
        "--name",
        "gpu-step",
    ]
    changes = [
        "model.channels=128",
        "model.multipliers=[1,2,2]",
        "memory.channels_last=true",
        "compile.capture=step",
    ]
    command(bench, "search", [*words, *changes], 150, ["tunediff.search", "--help"])


def peers(bench: Bench) -> None:
    words = [
        "benchmarks.peers",
        "--config",
        "cifar10",
        "--batch",
        "128",
        "--rounds",
        "2",
        "--steps",
        "20",
        "--no-tuned",
    ]
    knobs = [f"{name}={value}" for name, value in NHWC.items()]
    command(
        bench,
        "peers",
        [*words, *knobs, "compile.capture=step"],
        150,
        ["benchmarks.peers", "--help"],
    )


@contextlib.contextmanager
def guarded(bench: Bench, what: str) -> Iterator[None]:
    """Keep an error as a row: the other parts go on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        bench.row("FAILED", of=what, error=repr(error)[:400])


PARTS = (ceilings, operation, step, evaluation, start, tests, search, peers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=Path("ray_results/reference/gpu-step"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", nargs="*", default=[part.__name__ for part in PARTS])
    options = parser.parse_args()
    bench = Bench(options.out, options.minutes, options.dry)
    if not options.dry:
        use_side_stream(bench.device)
    for part in PARTS:
        if part.__name__ in options.only and bench.left_s > 10:
            with guarded(bench, part.__name__):
                part(bench)
    bench.row("end", left_s=bench.left_s)


if __name__ == "__main__":
    main()
