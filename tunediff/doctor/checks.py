"""Can a search train here, how fast, and what is broken?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from tunediff.config.systems import Loader
from tunediff.core import environment, machine, processes, text
from tunediff.data import loader
from tunediff.distributed import alone
from tunediff.doctor.finding import Answer, Site, check
from tunediff.profiling import measure
from tunediff.training import hardware

PAYS = 1.1
"""How many times as fast as float32 a matrix product must be in a format that is worth a search."""
LITTLE_DISK_GIB, FULL_DISK = 5.0, 0.95
"""Ray stops to make objects from that share on (its `local_fs_capacity_threshold`)."""


def ask(probe: str, *, ranks: int = 1, within_s: float) -> dict[str, Any]:
    """Return what a function of `probes` returns on rank 0. Raises RuntimeError and
    TimeoutError."""
    return processes.answer("tunediff.doctor.probes", probe, ranks=ranks, within_s=within_s)


@check("versions", needed=True)
def versions(site: Site) -> Answer:
    """Packages that every search needs."""
    installed = environment.describe()["versions"]
    absent = [name for name, version in installed.items() if version == "not installed"]
    message = ", ".join(f"{name} {version}" for name, version in installed.items())
    if lacking := [name for name in absent if name != "tunediff"]:
        return Answer("missing", message, f"not installed: {', '.join(lacking)}")
    return Answer("ok", message)


@check("GPU", needed=True)
def gpus(site: Site) -> Answer:
    """Whether trials are planned for the GPUs that torch sees."""
    planned = len(machine.gpus())
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    build = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    numbers = {"planned": planned, "seen": seen}
    if planned != seen:
        message = f"{text.pluralize(planned, 'GPU')} by the driver, {seen} by torch ({build})"
        means = (
            f"trials would not run where they are planned: another build of torch, or --gpus {seen}"
        )
        return Answer("missing", message, means, numbers)
    if seen:
        names = ", ".join(torch.cuda.get_device_properties(index).name for index in range(seen))
        return Answer("ok", f"{names}; {build}", f"{seen} at once", numbers)
    hidden = os.environ.get(machine.VISIBLE)
    if signs := machine.signs() if hidden is None else []:
        message = f"{', '.join(signs)}, but no GPU that can be used ({build})"
        means = "a search would run on the CPU: give the container its GPUs, or install the driver"
        return Answer("missing", message, means, numbers)
    why = f"{machine.VISIBLE}={hidden} hides all" if hidden is not None else build
    return Answer("weak", f"none; {why}", "small networks and images only", numbers)


@check("CPU")
def cpu(site: Site) -> Answer:
    """Cores that this process may use, and whether others use them at this moment."""
    have, all_cores = machine.cores(), psutil.cpu_count() or 1
    before = hardware.Usage.now()
    psutil.cpu_percent(interval=1.0)
    used = hardware.Usage.now().since(before)
    others = hardware.disturbance(used, used.own_s, all_cores)["other_load_share"]
    numbers = {"cores": have, "machine_cores": all_cores, "other_load_share": others}
    name = environment.describe()["cpu"]
    message = f"{name}: {have} of {all_cores} cores; others use {others:.0%}"
    if others > hardware.DISTURBED:
        return Answer("weak", message, "measurements may be marked as disturbed: wait", numbers)
    if have < 2:
        return Answer("weak", message, "training, loader and Ray share one core", numbers)
    return Answer("ok", message, numbers=numbers)


@check("number formats")
def formats(site: Site) -> Answer:
    """How many times as fast as in float32 a matrix product is."""
    gains: Mapping[str, float] = measure.format_gains(alone())
    message = ", ".join(f"{name} {gain:.2g}×" for name, gain in gains.items())
    fast = [name for name, gain in gains.items() if gain >= PAYS]
    if not fast:
        return Answer("weak", message or "float32 only", "precision.amp does not pay here", gains)
    return Answer("ok", message, f"worth searching: {', '.join(fast)}", gains)


@check("disk", needed=True)
def disk(site: Site) -> Answer:
    """The folder of all searches: writable, and with room."""
    storage = site.storage.absolute()
    folder = next(parent for parent in (storage, *storage.parents) if parent.is_dir())
    if (why := environment.unwritable(folder)) is not None:
        return Answer("missing", f"{folder} cannot be written: {why}", "--storage names another")
    usage = shutil.disk_usage(folder)
    free_gib = usage.free / 2**30
    message, numbers = f"{folder}: {free_gib:,.0f} GiB free", {"free_gib": free_gib}
    if usage.used / usage.total > FULL_DISK:
        means = f"over {FULL_DISK:.0%} full, where Ray begins to refuse work"
        return Answer("weak", message, means, numbers)
    if free_gib < LITTLE_DISK_GIB:
        return Answer("weak", message, "--dry-run says what a search takes of it", numbers)
    return Answer("ok", message, numbers=numbers)


@check("loader processes", needed=True)
def loading(site: Site) -> Answer:
    """Two loader processes start, and hand over the right rows."""
    rows, section = torch.arange(64), Loader(batch_size=8, workers=2)
    order = loader.Order(len(rows), section.batch_size, 1, 0, 1, seed=0)
    with loader.build(rows, section, order, torch.device(site.device)) as batches:
        moved = torch.cat([batches.move(batches.fetch()) for _ in range(2)]).cpu()
    if not torch.equal(moved, torch.cat([order.indices(0), order.indices(1)])):
        return Answer("wrong", "rows were lost or mixed up", "loader.workers = 0 only")
    return Answer("ok", "two start and hand over their rows")


@check("process group")
def group(site: Site) -> Answer:
    """Collectives between all GPUs, or two processes on a CPU."""
    ranks = max(2, len(machine.gpus()))
    if site.device == "cuda" and len(machine.gpus()) == 1:
        return Answer("skipped", "one GPU", "parallel.workers = 1 is what there is")
    result = ask("group", ranks=ranks, within_s=120)
    message = (
        f"{ranks} over {result['backend']}: 25 MiB averaged in {1000 * result['mean_s']:.0f} ms"
    )
    if not result["right"]:
        return Answer("wrong", f"{message}, wrongly", "parallel.workers = 1 only")
    return Answer("ok", message, numbers=result)


@check("torch.compile")
def compiling(site: Site) -> Answer:
    """A small network, compiled, computes what it does eagerly."""
    without = "compile.mode = none only: trials that draw another one fail"
    try:
        result = ask("compiled", within_s=300)
    except (RuntimeError, TimeoutError) as error:
        return Answer(
            "missing", str(error), f"{without}; it takes a C++ compiler and Python's headers"
        )
    message = f"a small network in {result['compile_s']:.0f} s"
    if not result["right"] or not result["graphs"]:
        why = "not what it computes eagerly" if not result["right"] else "no graph was compiled"
        return Answer("wrong", f"{message}: {why}", without)
    return Answer("ok", message, "larger networks take minutes on a CPU", result)


@check("Ray", needed=True)
def ray(site: Site) -> Answer:
    """A cluster as a search starts it runs a task, has this machine's cores and GPUs, and a
    dashboard."""
    result = ask("cluster", within_s=240)  # of which Ray may start for 120
    message = f"up after {result['start_s']:.1f} s, first task after {result['task_s']:.1f} s"
    if not result["right"]:
        means = "it counts other cores or GPUs than there are: trials may wait for ever"
        return Answer("wrong", message, means, result)
    if not result["status"]:
        means = "no dashboard, which frees what stopped trials held: early_stopping: none"
        return Answer("weak", f"{message}; {result['message']}", means, result)
    return Answer("ok", message, numbers=result)


CHECKS = (versions, gpus, cpu, formats, disk, loading, group, compiling, ray)
