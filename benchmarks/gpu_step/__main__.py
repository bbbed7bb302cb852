"""The flagship's step on a GPU, in nine minutes: `python -m benchmarks.gpu_step [OUT] [--data ZIP] [--dry]`.

Prints a row of JSON for each measurement as it comes, and keeps them in OUT/rows.jsonl
(ray_results/reference/gpu-step). Each part is a process of its own with a limit of seconds, in this order and only
while there is time for it; what fails or has no time is a row too. `--only PART …` takes some of them, to go on later.

- `ceilings`: matrix products and a copy, which the shares are of;
- `evaluation`: 1,000 images in 20 steps as a trial pays them, by number format, with and without capture (1.5 s), and
  one forward pass of it;
- `search`: three trials of 10 s of the flagship on the CIFAR-10 of --data, or of digits, to a confirmed verdict,
  and the seconds from the command to the first trained step (20);
- `peers`: benchmarks.peers with diffusers, as it comes, with our switches and compiled (3 times as fast as compiled);
- `compiled`: the captured step of torch.compile;
- `examples`: examples/classifier.py and a small GPT, captured and eager (1.5 times as fast at least);
- `step-128`, `step-1024`, `step-32`, `step-512`: real trainings of the flagship, captured and eager, fused and plain
  norm, TF32 and bf16 (goals on an H200: 5,000 images/s and at most 4 GiB at 128, 7,000 with the best batch);
- `operation`: `fused_norm` by shape, forward and backward, beside torch's GroupNorm and SiLU, in GB/s;
- `tests`: those marked `gpu` that are about capture and the norm; `start`: imports and the CUDA context.

--dry runs all of it on a CPU with tiny sizes, steps recorded instead of captured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
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

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from tests.recorded_step import RecordedStep
from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget
from tunediff.core.point import Point
from tunediff.data.images import Images
from tunediff.distributed import alone
from tunediff.training.capture import captured
from tunediff.training.capture.steps import CudaStepGraph, MakeGraph, use_side_stream
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.precision import evaluation_precision, float32_formats
from tunediff.training.trial import Trial
from tunediff.training.trial import run as run_training
from tunediff.workloads.diffusion import train as workload
from tunediff.workloads.diffusion import unet
from tunediff.workloads.diffusion.evaluator import Evaluator
from tunediff.workloads.diffusion.process import Diffusion

FOLDER = Path(__file__).parent
AGAIN = 64
"""Exit code of a part whose device is of no more use: AGAIN + the number of the cell to go on with."""
TINY = {
    "model.channels": 8, "model.norm_groups": 4, "model.multipliers": [1, 2], "model.attention": [],
    "data.image_size": 16, "optimizer.warmup": 0.0,
}  # fmt: skip
NHWC = {"precision.amp": "bf16", "precision.matmul": "high", "memory.channels_last": True}
TUNED = {**NHWC, "precision.cudnn_benchmark": True}
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "bf16, NHWC, fused norm": (TUNED, True),
    "bf16, NHWC, plain norm": (TUNED, False),
    "bf16, NCHW": ({"precision.amp": "bf16", "precision.matmul": "high"}, False),
    "TF32, NCHW": ({"precision.matmul": "high"}, False),
}
"""Knobs of a kind of step, and whether the norm is fused; what matters most first."""


class Bench:
    """Rows, the time that is left, and the sizes."""

    def __init__(self, out: Path, end: float, dry: bool, first: int = 0, data: str = "") -> None:
        self.out, self.dry, self.first, self.data = out, dry, first, data
        self.device = torch.device("cpu" if dry else "cuda")
        self.end = end  # by the clock of all processes
        out.mkdir(parents=True, exist_ok=True)
        self.file = open(out / "rows.jsonl", "a")  # noqa: SIM115 – open to the end

    @property
    def make_graph(self) -> MakeGraph:
        return RecordedStep if self.dry else CudaStepGraph

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
    name = "dry run on a CPU" if bench.dry else torch.cuda.get_device_name()
    bench.row("device", name=name, torch=torch.__version__, time=time.time())
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
    formats = (torch.bfloat16, torch.float16, torch.float32)
    for (channels, side), dtype in itertools.product([(8, 4)] if bench.dry else shapes, formats):
        shape = (2 if bench.dry else 128, channels, side, side)
        x = torch.randn(shape, device=bench.device).to(dtype, memory_format=torch.channels_last)
        x.requires_grad_()
        w, b = torch.ones(2, channels, device=bench.device, requires_grad=True).unbind()
        groups, gb = 4 if bench.dry else 32, x.numel() * x.element_size() / 1e9
        ways: dict[str, Callable[..., Tensor]] = {
            "fused": lambda x, w, b, g: fused_norm.norm_silu(x, None, w, b, g, 1e-6),
            "torch": lambda x, w, b, g: F.silu(F.group_norm(x, g, w.to(x.dtype), b.to(x.dtype))),
        }
        if bench.dry:
            del ways["fused"]  # its kernels need a GPU
        for name, way in ways.items():
            with guarded(bench, f"operation {name} {shape} {dtype}"):
                call = functools.partial(way, x, w, b, groups)
                with torch.no_grad():
                    forward = bench.seconds(call)
                y, dy = call(), torch.randn_like(x)
                backward = functools.partial(torch.autograd.grad, y, x, dy, retain_graph=True)
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

    def captured(self, outcome: Any, reason: str) -> None:
        self.facts["capture"] = f"{outcome}: {reason}" if reason else str(outcome)


def random_images(bench: Bench, config: Systems) -> Images:
    """Return random pixels, on which no speed depends."""
    data = config.knobs.data
    shape = (64 if bench.dry else 2048, data.channels, data.image_size, data.image_size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    return Images("random", pixels, labels=None, class_names=(), skipped=(), digest="random")


def step(bench: Bench, batch: int) -> None:
    cells = [(name, capture) for name in KINDS for capture in ("step", "none")][
        : 2 if bench.dry else None
    ]
    for number, (name, capture) in enumerate(cells[bench.first :], bench.first):
        if bench.left_s < 12 and not bench.dry:
            bench.row("FAILED", of=f"step {batch}", error=f"no time for {cells[number:]}")
            return
        knobs, fused = KINDS[name]
        size = 4 if bench.dry else batch
        config = config_of(bench, size, {**knobs, "compile.capture": capture})
        with guarded(bench, f"step {batch} {name} {capture}"):
            train(bench, "step", config, fused, kind=name, batch=size)
            continue
        if not usable(bench):
            sys.exit(AGAIN + number + 1)


def usable(bench: Bench) -> bool:
    """Return whether the device still computes and draws: a failed capture may have ended that."""
    try:
        return bool(torch.randn(8, device=bench.device).isfinite().all())
    except RuntimeError:
        return False


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., object]) -> Iterator[None]:
    """Put a plain function in the place of another: a mock would keep the tensors of every call."""
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


def train(bench: Bench, what: str, config: Systems, fused: bool = True, **about: Any) -> float:
    """Train for three seconds and write a row; return samples per second."""
    observer, images = Facts(), None
    budget = Budget(steps=8) if bench.dry else Budget(seconds=3.0, compile_charged=False)
    make_graph = RecordedStep if bench.dry and config.compile.capture == "step" else None
    with contextlib.ExitStack() as stack:
        if what != "example":
            images = random_images(bench, config)
            stack.enter_context(replaced(workload.data, "load", lambda *_: images))
            stack.enter_context(replaced(Trial, "about", lambda *_, **facts: None))
        if not fused:
            stack.enter_context(replaced(unet, "fused_norm", lambda feature_map: None))
        run_training(
            Engine(config, budget, alone(), observer, make_graph=make_graph, evaluates=False)
        )
    point = observer.points[-1]
    bench.row(
        what, **about, capture=observer.facts.get("capture", "none"),
        images_per_s=point.samples_per_s, step_ms=1000 * (point.step_s or 0.0), peak_share=point.peak_share,
        memory_mib=point.peak_memory_mib, compile_s=point.seconds["compile"], steps=point.steps,
        phases_ms={part: 1000 * taken for part, taken in point.phases_s.items()},
    )  # fmt: skip
    return point.samples_per_s


def compiled(bench: Bench) -> None:
    """The captured step of torch.compile, by inductor's norm."""
    if not bench.dry:
        knobs = {**TUNED, "compile.mode": "default", "compile.capture": "step"}
        train(bench, "step", config_of(bench, 128, knobs), False, kind="compiled", batch=128)


def examples(bench: Bench) -> None:
    for path, sizes in (
        (FOLDER.parents[1] / "examples/classifier.py", (64, 512)),
        (FOLDER / "gpt.py", (4, 16)),
    ):
        for size in sizes:
            values = {"loader.batch_size": size, "loader.resident": True}
            if path.stem == "gpt":
                values |= {"precision.amp": "bf16"} | (
                    {"width": 64, "layers": 1} if bench.dry else {}
                )
            with guarded(bench, f"{path.stem} {size}"):
                eager, replayed = (
                    train(
                        bench,
                        "example",
                        cfg.override(
                            cfg.baseline(str(path)), {**values, "compile.capture": capture}
                        ),
                        file=path.name,
                        batch=size,
                    )
                    for capture in ("none", "step")
                )
                bench.row("gain", file=path.name, batch=size, captured_over_eager=replayed / eager)


@torch.no_grad()
def evaluation(bench: Bench) -> None:
    """Evaluations of 1,000 images in 20 steps: a trial's first, one between, and the last."""
    images = random_images(
        bench, config_of(bench, 4, {})
    )  # one set: its features are computed once
    for precision, capture in itertools.product(("bf16", "tf32", "fp32"), (True, False)):
        if bench.dry and precision == "tf32":
            continue
        config = config_of(
            bench, 4,
            {
                "evaluation.precision": precision, "evaluation.extractor": "cifar10-resnet", "data.split": "test",
                "evaluation.images": 8 if bench.dry else 1000, "evaluation.steps": 2 if bench.dry else 20,
                "evaluation.batch_size": 8 if bench.dry else 500,
                "evaluation.validation_images": 4 if bench.dry else 256,
            },
        )  # fmt: skip
        with guarded(bench, f"evaluation {precision} {capture}"):
            net, size = network(bench, config), config.knobs.evaluation.batch_size
            knobs, process = config.knobs, Diffusion(config.knobs.process, bench.device)
            evaluator = Evaluator(knobs.data, knobs.evaluation, images, alone())
            predict, taken = captured(net, bench.make_graph if capture else None), []
            for _ in range(3):
                begun = time.monotonic()
                evaluator(predict, process)
                taken.append(time.monotonic() - begun)
            shape = (size, knobs.data.channels, knobs.data.image_size, knobs.data.image_size)
            x, t = torch.randn(shape, device=bench.device), torch.arange(size, device=bench.device)
            with evaluation_precision(bench.device, precision):
                forward = bench.seconds(functools.partial(predict, x, t % process.steps), 5)
            bench.row(
                "evaluation", format=precision, captured=capture, refusal=getattr(predict, "refusal", ""),
                first_s=taken[0], between_s=taken[1], last_s=taken[2], forward_ms=1000 * forward,
            )  # fmt: skip


def network(bench: Bench, config: Systems) -> torch.nn.Module:
    """Return a network that predicts little but not nothing, in NHWC order as the fastest training has it."""
    net = unet.network(config.knobs).to(bench.device, memory_format=torch.channels_last).eval()
    torch.nn.init.normal_(net.output.weight, std=0.02)
    return net


def start(bench: Bench) -> None:
    for name, code in {
        "torch": "import torch", "CUDA context": "import torch; torch.zeros(1, device=DEVICE)",
        "ray.train": "import ray.train", "worker": "import tunediff.tuning.worker",
        "workload": "import tunediff.workloads.diffusion.train",
    }.items():  # fmt: skip
        words, begin = (
            [sys.executable, "-c", code.replace("DEVICE", repr(bench.device.type))],
            time.monotonic(),
        )
        with guarded(bench, f"start {name}"):
            subprocess.run(words, check=True, timeout=60)
            bench.row("start", imports=name, wall_s=time.monotonic() - begin)


def command(bench: Bench, what: str, words: list[str], in_dry: list[str]) -> None:
    """Run a command of the project and keep the end of what it prints. `in_dry`: more words then."""
    limit = bench.left_s - 3
    words, begin = (
        [sys.executable, "-m", *words, *(in_dry if bench.dry else [])],
        time.monotonic(),
    )
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=limit,
            env={**os.environ, "NO_COLOR": "1"},
        )
        code, said, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:  # its output is bytes, whatever was asked for
        said, errors = ((one or b"").decode(errors="replace") for one in (late.stdout, late.stderr))  # type: ignore[union-attr]
        code, errors = -1, f"{errors}\nstopped after {limit:.0f} s"
    bench.row(
        what,
        command=" ".join(words[2:]),
        code=code,
        wall_s=time.monotonic() - begin,
        end=said.splitlines()[-25:],
        errors=errors.splitlines()[:10] + errors.splitlines()[-5:],
    )


def words_of(bench: Bench) -> dict[str, list[str]]:
    """Return the commands that are parts, as `python -m` takes them."""
    knobs = [f"{name}={value}" for name, value in TUNED.items()]
    named = ["--name", "gpu-step", "--storage", str(bench.out.absolute() / "searches")]
    short = [*named, "--trials", "3", "--budget", "10s", "--confirm", "1"]
    space = bench.out / "flagship.yaml"
    if bench.data:
        flagship = yaml.safe_load((FOLDER.parents[1] / "search_spaces/cifar10.yaml").read_text())
        space.write_text(
            yaml.safe_dump(flagship | {"confirm": {"of": 1, "seeds": 3}, "early_stopping": "none"})
        )
        judged = ["evaluation.images=1000", "evaluation.steps=20", "evaluation.sampler=ddim"]
        of_search = [str(space), *short, f"data.path={bench.data}", *judged]
    else:
        large = ["model.channels=128", "model.multipliers=[1,2,2]", "memory.channels_last=true"]
        of_search = ["digits", *short, *large, "compile.capture=auto"]
    size = ["--config", "cifar10", "--batch", "128", "--rounds", "2", "--steps", "20"]
    captured_step = ["compile.capture=step", "optimizer.implementation=fused"]
    return {
        "tests": ["pytest", "-q", "-m", "gpu", "tests/training/test_gpu.py", "-k", "capture or fused"],
        "search": ["tunediff.search", *of_search],
        "peers": ["benchmarks.peers", *size, *knobs, *captured_step, "--peers", "diffusers"],
    }  # fmt: skip


def tests(bench: Bench) -> None:
    command(bench, "tests", words_of(bench)["tests"], ["--co"])


def search(bench: Bench) -> None:
    begun = time.time()
    command(bench, "search", words_of(bench)["search"], ["--dry-run"])
    events = record.events(bench.out / "searches/gpu-step/trials/t0000")
    for event in () if bench.dry else events:
        if event["event"] == "point":
            after = ("train", "data_wait", "evaluation", "compile")
            trained = event["time"] - sum(event["seconds"].get(part, 0.0) for part in after)
            bench.row("first step", after_s=trained - begun)
            return
    if not bench.dry:
        bench.row("FAILED", of="first step", error="the first trial has no point")


def peers(bench: Bench) -> None:
    command(bench, "peers", words_of(bench)["peers"], ["--help"])


@contextlib.contextmanager
def guarded(bench: Bench, what: str) -> Iterator[None]:
    """Keep an error as a row: the other parts go on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        bench.row("FAILED", of=what, error=repr(error)[:400])


PARTS: dict[str, tuple[Callable[[Bench], None], float, float]] = {
    "ceilings": (ceilings, 10, 40),
    "evaluation": (evaluation, 20, 70),
    "search": (search, 60, 300),
    "peers": (peers, 60, 200),
    "compiled": (compiled, 100, 200),
    "examples": (examples, 20, 60),
    "step-128": (functools.partial(step, batch=128), 20, 100),
    "step-1024": (functools.partial(step, batch=1024), 20, 100),
    "operation": (operation, 20, 60),
    "tests": (tests, 30, 120),
    "step-32": (functools.partial(step, batch=32), 20, 80),
    "step-512": (functools.partial(step, batch=512), 20, 80),
    "start": (start, 20, 60),
}
"""By name: the part, the seconds without which it is not begun, and those after which it is ended."""


def run_part(bench: Bench, name: str, first: int = 0) -> None:
    """Run a part in a process of its own, from a cell on: nothing that happens there reaches another part."""
    _, least_s, most_s = PARTS[name]
    limit_s = 600.0 if bench.dry else min(most_s, bench.left_s - 3)
    if limit_s < least_s:
        bench.row("SKIPPED", of=name, left_s=bench.left_s)
        return
    words = [
        sys.executable,
        "-m",
        "benchmarks.gpu_step",
        str(bench.out),
        "--part",
        name,
        "--first",
        str(first),
    ]
    words += ["--end", str(time.monotonic() + limit_s), *(["--dry"] if bench.dry else [])]
    words += ["--data", bench.data] if bench.data else []
    try:
        code = subprocess.run(words, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        bench.row("FAILED", of=name, error=f"stopped after {limit_s:.0f} s")
        return
    if code >= AGAIN:
        run_part(bench, name, code - AGAIN)
    elif code:
        bench.row("FAILED", of=name, error=f"its process ended with {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=Path("ray_results/reference/gpu-step"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--data", default="", help="CIFAR-10, as data.path takes it")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    end = options.end or time.monotonic() + 60 * options.minutes
    bench = Bench(options.out, end, options.dry, options.first, options.data)
    if options.part is not None:
        if not options.dry:
            use_side_stream(bench.device)
        with guarded(bench, options.part):
            PARTS[options.part][0](bench)
        return
    for name in options.only:
        run_part(bench, name)
    bench.row("end", left_s=bench.left_s)


if __name__ == "__main__":
    main()
