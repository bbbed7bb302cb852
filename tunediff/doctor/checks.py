"""The checks of the doctor. What may crash or hang runs in processes of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch
from torch import nn

from tunediff import config as cfg
from tunediff.config.code import described
from tunediff.config.systems import Loader
from tunediff.core import disk, environment, machine, text
from tunediff.core.clock import Budget
from tunediff.core.template import ask
from tunediff.core.trial_record import CAPTURED
from tunediff.data import loader
from tunediff.distributed import alone, from_environment
from tunediff.profiling import measure
from tunediff.training import hardware
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import run


@dataclass
class Finding:
    """What a check has found; the fields are the keys of the JSON."""

    state: str
    """`ok`; `weak`: it works, with a limit that a search feels; `missing`: it does not work;
    `wrong`: it gives wrong results; `skipped`: it cannot be checked here."""
    found: str
    means: str = ""
    """The consequence for a search."""
    name: str = ""
    needed: bool = False
    """Whether a search cannot run, or be relied on, without it."""

    @property
    def stops(self) -> bool:
        """Return whether it stops a search from being started."""
        return self.needed and self.state in ("missing", "wrong")


# ---- in this process
def gpus(storage: Path) -> Finding:
    """Check that torch sees the GPUs that trials are planned for."""
    planned = len(machine.gpus())
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    build = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if planned != seen:
        found = f"{text.pluralize(planned, 'GPU')} by the driver, {seen} by torch ({build})"
        means = f"trials would find no GPU: install another build of torch, or use --gpus {seen}"
        return Finding("missing", found, means)
    if seen:
        names = ", ".join(torch.cuda.get_device_properties(index).name for index in range(seen))
        return Finding("ok", f"{names}; {build}", f"{seen} at once")
    return Finding("weak", f"none; {build}", "small networks and images only")


def cpu(storage: Path) -> Finding:
    """Measure how many cores this process may use, and how busy other processes keep them."""
    cores, others = machine.cores(), psutil.cpu_percent(interval=1.0) / 100
    means = "training, loader and Ray share one core" if cores < 2 else ""
    if others > hardware.DISTURBED:
        means = "measurements may be marked as disturbed: wait"
    name = environment.describe()["cpu"]
    found = f"{name}: {cores} of {psutil.cpu_count()} cores; others use {others:.0%}"
    return Finding("weak" if means else "ok", found, means)


def formats(storage: Path) -> Finding:
    """Measure how many times as fast as in float32 a matrix product is."""
    gains = measure.format_gains(alone())
    found = ", ".join(f"{name} {gain:.2g}×" for name, gain in gains.items()) or "float32 only"
    if fast := [name for name, gain in gains.items() if gain >= 1.1]:
        return Finding("ok", found, f"worth searching: {', '.join(fast)}")
    return Finding("weak", found, "precision.amp does not pay here")


def disk_space(storage: Path) -> Finding:
    """Check that the folder of all searches is writable and has room."""
    storage = storage.absolute()
    folder = next(parent for parent in (storage, *storage.parents) if parent.is_dir())
    if (why := disk.unwritable(folder)) is not None:
        return Finding(
            "missing", f"{folder} cannot be written: {why.strerror}", "use another --storage"
        )
    usage = shutil.disk_usage(folder)
    found = f"{folder}: {usage.free / 2**30:,.0f} GiB free"
    if usage.used > 0.95 * usage.total:  # Ray's `local_fs_capacity_threshold`
        return Finding("weak", found, "over 95 % full, where Ray begins to refuse work")
    return Finding("ok", found)


def loading(storage: Path) -> Finding:
    """Check that two loader processes start, and hand over the right rows."""
    rows, section = torch.arange(64), Loader(batch_size=8, workers=2)
    order = loader.Order(len(rows), section.batch_size, 1, 0, 1, seed=0)
    with loader.build(rows, section, order, alone().device) as batches:
        moved = torch.cat([batches.move(batches.fetch()) for _ in range(2)]).cpu()
    if not torch.equal(moved, torch.cat([order.indices(0), order.indices(1)])):
        return Finding("wrong", "rows were lost or mixed up", "loader.workers = 0 only")
    return Finding("ok", "two start and hand over their rows")


# ---- in other processes
def answer(name: str, within_s: float, ranks: int = 1) -> str:
    """Return what is wrong by one of `PROBES`, called in processes of its own; '' if nothing is."""
    with tempfile.TemporaryFile() as output:
        return str(ask(send, name, ranks=ranks, within_s=within_s, output=output))


def send(connection: Connection, name: str) -> None:
    """Send what one of `PROBES` returns; the function of a template's run."""
    connection.send(PROBES[name]())


def group(storage: Path) -> Finding:
    """Check collectives between all GPUs, or between two processes on a CPU."""
    ranks, means = len(machine.gpus()) or 2, "parallel.workers = 1 only"
    if ranks == 1:
        return Finding("skipped", "one GPU", means)
    if wrong := answer("averaged", 120, ranks):
        return Finding("wrong", wrong, means)
    return Finding("ok", f"{ranks} processes average gradients")


def averaged() -> str:
    """Average gradients over all processes, as DDP does."""
    with from_environment() as world:
        mean = world.mean(torch.full((2**20,), world.rank + 1.0, device=world.device))
        wrong = world.any(not bool((mean == (world.size + 1) / 2).all()))
    return "the mean of all processes is wrong" if wrong else ""


def compiling(storage: Path) -> Finding:
    """Check that a small compiled network computes what it does eagerly."""
    if wrong := answer("compiled", 300):
        return Finding("wrong", wrong, "compile.mode = none only")
    return Finding("ok", "a small network is compiled", "larger networks take minutes on a CPU")


def compiled() -> str:
    """Run a small network forwards and backwards, compiled and eagerly."""
    device = alone().device
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU()).to(device)
    x = torch.randn(2, 8, device=device, requires_grad=True)
    eager, compiled = (
        torch.autograd.grad(model(x).square().sum(), x)[0]
        for model in (network, torch.compile(network, fullgraph=True))
    )
    right = torch.allclose(eager, compiled, rtol=1e-3, atol=1e-4)
    return "" if right else "its gradients are not those of eager steps"


def capturing(storage: Path) -> Finding:
    """Check that a training's step can be captured, and that replays learn the same."""
    if not machine.gpus():
        return Finding("ok", "no GPU: compile.capture = step has no effect")
    if wrong := answer("captured", 180):
        return Finding("wrong", wrong, "compile.capture = none only")
    return Finding("ok", "a small step is captured, and its replays learn the same")


def captured() -> str:
    """Train a small network for a few steps, captured."""
    knobs = {"optimizer.implementation": "fused", "compile.capture": "step"}
    config = cfg.override(cfg.baseline("digits"), knobs)
    engine = Engine(config, Budget(steps=6), alone(), Observer(), evaluates=False)
    point = run(engine).points[-1]
    return "" if point.capture == CAPTURED else str(point.capture)


def ray(storage: Path) -> Finding:
    """Check that a cluster runs a task, and counts the cores and GPUs of this machine."""
    if wrong := answer("cluster", 240):  # Ray may take 120 of them to start
        return Finding("wrong", wrong, "trials may wait for ever")
    return Finding("ok", "a cluster starts and runs a task")


def cluster() -> str:
    """Start a Ray cluster as a search does, and run a task."""
    import ray

    from tunediff.ray_backend import connection
    from tunediff.tuning import resources

    with connection.cluster(None):
        ray.get(ray.remote(num_cpus=1)(lambda: None).remote(), timeout=60)
        local, counted = resources.local(), ray.cluster_resources()
        if [counted.get("CPU", 0), counted.get("GPU", 0)] != [local.cores, local.gpus]:
            return "it counts other cores or GPUs than there are"
    return ""


PROBES: Mapping[str, Callable[[], str]] = {
    "averaged": averaged, "compiled": compiled, "captured": captured, "cluster": cluster,
}  # fmt: skip
Check = tuple[str, bool, Callable[[Path], Finding]]
"""Name, whether it is needed, and the function, which gets the folder of all searches."""
CHECKS: Sequence[Check] = (
    ("GPU", True, gpus),
    ("CPU", False, cpu),
    ("number formats", False, formats),
    ("disk", True, disk_space),
    ("loader processes", True, loading),
    ("process group", False, group),
    ("torch.compile", False, compiling),
    ("captured steps", False, capturing),
    ("Ray", True, ray),
)


def examine(check: Check, storage: Path) -> Finding:
    """Run a check; an error that it raises is its finding."""
    name, needed, function = check
    try:
        finding = function(storage)
    except Exception as error:
        found = " ".join(described(error).split())[:300]
        finding = Finding("missing", found, "a search that needs it will fail in the same way")
    finding.name, finding.needed = name, needed
    return finding


def verdict(findings: Sequence[Finding]) -> str:
    """Return a sentence on whether a search can run here."""
    if names := [finding.name for finding in findings if finding.stops]:
        return f"a search should not be started here: {', '.join(names)}"
    worse = [one for one in findings if one.state not in ("ok", "skipped")]
    return "; ".join(["a search can run here", *(f"{one.name}: {one.state}" for one in worse)])
