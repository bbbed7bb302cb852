"""The checks of the doctor, and what they found."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from tunediff.config.code import described
from tunediff.config.systems import Loader
from tunediff.core import environment, machine, text
from tunediff.core.trial_record import CAPTURED
from tunediff.data import loader
from tunediff.distributed import alone
from tunediff.doctor.processes import answer
from tunediff.profiling import measure
from tunediff.training import hardware


@dataclass
class Finding:
    """What a check has found; the fields are the keys of the JSON."""

    state: str
    """`ok`; `weak`: it works, with a limit that a search feels; `missing`: it does not work;
    `wrong`: it gives wrong results; `skipped`: it cannot be checked here."""
    found: str
    means: str = ""
    """The consequence for a search."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    needed: bool = False
    """Whether a search cannot run, or be relied on, without it."""
    seconds: float = 0.0

    @property
    def stops(self) -> bool:
        """Return whether it stops a search from being started."""
        return self.needed and self.state in ("missing", "wrong")


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
    hidden = os.environ.get(machine.VISIBLE)
    why = f"{machine.VISIBLE}={hidden} hides all" if hidden is not None else build
    return Finding("weak", f"none; {why}", "small networks and images only")


def cpu(storage: Path) -> Finding:
    """Measure how many cores this process may use, and how busy other processes keep them."""
    cores, all_cores = machine.cores(), psutil.cpu_count() or 1
    before = hardware.Usage.now()
    psutil.cpu_percent(interval=1.0)
    used = hardware.Usage.now().since(before)
    others = hardware.disturbance(used, used.own_s, all_cores)["other_load_share"]
    numbers = {"cores": cores, "machine_cores": all_cores, "other_load_share": others}
    means = "training, loader and Ray share one core" if cores < 2 else ""
    if others > hardware.DISTURBED:
        means = "measurements may be marked as disturbed: wait"
    name = environment.describe()["cpu"]
    found = f"{name}: {cores} of {all_cores} cores; others use {others:.0%}"
    return Finding("weak" if means else "ok", found, means, numbers)


def formats(storage: Path) -> Finding:
    """Measure how many times as fast as in float32 a matrix product is."""
    gains = measure.format_gains(alone())
    found = ", ".join(f"{name} {gain:.2g}×" for name, gain in gains.items()) or "float32 only"
    if fast := [name for name, gain in gains.items() if gain >= 1.1]:
        return Finding("ok", found, f"worth searching: {', '.join(fast)}", gains)
    return Finding("weak", found, "precision.amp does not pay here", gains)


def disk(storage: Path) -> Finding:
    """Check that the folder of all searches is writable and has room."""
    storage = storage.absolute()
    folder = next(parent for parent in (storage, *storage.parents) if parent.is_dir())
    if (why := environment.unwritable(folder)) is not None:
        return Finding("missing", f"{folder} cannot be written: {why}", "use another --storage")
    usage = shutil.disk_usage(folder)
    free_gib, means = usage.free / 2**30, ""
    if usage.used > 0.95 * usage.total:  # Ray's `local_fs_capacity_threshold`
        means = "over 95 % full, where Ray begins to refuse work"
    elif free_gib < 5:
        means = "--dry-run says what a search takes of it"
    found = f"{folder}: {free_gib:,.0f} GiB free"
    return Finding("weak" if means else "ok", found, means, {"free_gib": free_gib})


def loading(storage: Path) -> Finding:
    """Check that two loader processes start, and hand over the right rows."""
    rows, section = torch.arange(64), Loader(batch_size=8, workers=2)
    order = loader.Order(len(rows), section.batch_size, 1, 0, 1, seed=0)
    with loader.build(rows, section, order, alone().device) as batches:
        moved = torch.cat([batches.move(batches.fetch()) for _ in range(2)]).cpu()
    if not torch.equal(moved, torch.cat([order.indices(0), order.indices(1)])):
        return Finding("wrong", "rows were lost or mixed up", "loader.workers = 0 only")
    return Finding("ok", "two start and hand over their rows")


def group(storage: Path) -> Finding:
    """Check collectives between all GPUs, or between two processes on a CPU."""
    ranks = len(machine.gpus()) or 2
    if ranks == 1:
        return Finding("skipped", "one GPU", "parallel.workers = 1 only")
    numbers = answer("averaged", ranks=ranks, within_s=120)
    found = f"{ranks} processes average 25 MiB in {numbers['mean_s']:.3f} s"
    if not numbers["right"]:
        return Finding("wrong", f"{found}, wrongly", "parallel.workers = 1 only")
    return Finding("ok", found, numbers=numbers)


def compiling(storage: Path) -> Finding:
    """Check that a small compiled network computes what it does eagerly."""
    means = "compile.mode = none only: trials that draw another one fail"
    try:
        numbers = answer("compiled", within_s=300)
    except (RuntimeError, TimeoutError) as error:
        needs = "it takes a C++ compiler and Python's headers"
        return Finding("missing", str(error), f"{means}; {needs}")
    found = f"a small network in {numbers['compile_s']:.0f} s, {numbers['graphs']} graphs"
    if not (numbers["graphs"] and numbers["right"]):
        return Finding("wrong", f"{found}, not as computed eagerly", means, numbers)
    return Finding("ok", found, "larger networks take minutes on a CPU", numbers)


def capturing(storage: Path) -> Finding:
    """Check that a training's step can be captured, and that replays learn the same."""
    if not machine.gpus():
        return Finding("ok", "no GPU: compile.capture = step has no effect")
    numbers = answer("captured", within_s=180)
    if numbers["capture"] != CAPTURED:
        return Finding("wrong", numbers["capture"], "compile.capture = none only", numbers)
    return Finding("ok", "a small step is captured, and its replays learn the same")


def ray(storage: Path) -> Finding:
    """Check that a cluster runs a task, and counts the cores and GPUs of this machine."""
    numbers = answer("cluster", within_s=240)  # Ray may take 120 of them to start
    found = f"up after {numbers['start_s']:.1f} s, first task after {numbers['task_s']:.1f} s"
    if not numbers["right"]:
        means = "it counts other cores or GPUs than there are: trials may wait for ever"
        return Finding("wrong", found, means, numbers)
    if not numbers["url"]:
        means = "no dashboard, which frees what stopped trials held: early_stopping: none"
        return Finding("weak", found, means, numbers)
    return Finding("ok", found, numbers=numbers)


Check = tuple[str, bool, Callable[[Path], Finding]]
"""Name, whether it is needed, and the function, which gets the folder of all searches."""
CHECKS: Sequence[Check] = (
    ("GPU", True, gpus),
    ("CPU", False, cpu),
    ("number formats", False, formats),
    ("disk", True, disk),
    ("loader processes", True, loading),
    ("process group", False, group),
    ("torch.compile", False, compiling),
    ("captured steps", False, capturing),
    ("Ray", True, ray),
)


def examine(check: Check, storage: Path) -> Finding:
    """Run a check; an error that it raises is its finding."""
    name, needed, run = check
    begin = time.monotonic()
    try:
        finding = run(storage)
    except Exception as error:
        found = " ".join(described(error).split())[:300]
        finding = Finding("missing", found, "a search that needs it will fail in the same way")
    finding.name, finding.needed, finding.seconds = name, needed, time.monotonic() - begin
    return finding


def verdict(findings: Sequence[Finding]) -> str:
    """Return a sentence on whether a search can run here."""
    if names := [finding.name for finding in findings if finding.stops]:
        return f"a search should not be started here: {', '.join(names)}"
    parts = ["a search can run here"]
    for state in ("wrong", "weak", "missing"):
        if names := [finding.name for finding in findings if finding.state == state]:
            parts.append(f"{state}: {', '.join(names)}")
    return "; ".join(parts)
