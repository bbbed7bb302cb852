"""The machine itself: cores, memory, GPUs, shared memory, disk."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil
import torch

from tunediff.config.systems import Loader
from tunediff.core import environment, files, machine, text
from tunediff.data.cache import cache_dir
from tunediff.doctor.finding import Answer, Site, check
from tunediff.evaluation import weights
from tunediff.profiling import measure
from tunediff.training import hardware

LITTLE_MEMORY_MIB = 4096.0
LITTLE_DISK = 5 * 2**30
FULL_DISK = 0.95
"""From this share on Ray stops to make objects (its `local_fs_capacity_threshold`)."""
SHARED = Loader(batch_size=1024, workers=8, prefetch_factor=4)
"""A hungry search's loader, whose batches of 3 × 32 × 32 float32 lie in shared memory."""
SHM = Path("/dev/shm")


@check("CPU")
def cpu(site: Site) -> Answer:
    """Cores that this process may use, and whether others use them at this moment."""
    have, all_cores, allowed = machine.cores(), psutil.cpu_count() or 1, machine.quota()
    before = hardware.Usage.now()
    psutil.cpu_percent(interval=1.0)
    used = hardware.Usage.now().since(before)
    others = hardware.disturbance(used, used.own_s, all_cores)["other_load_share"]
    limit = "no quota" if math.isinf(allowed) else f"quota {allowed:g}"
    features = ", ".join(environment.describe()["cpu_features"]) or "none that torch asks for"
    numbers = {"cores": have, "machine_cores": all_cores, "other_load_share": others}
    numbers |= {} if math.isinf(allowed) else {"quota_cores": allowed}
    cpu_name = environment.describe()["cpu"]
    message = f"{cpu_name}: {have} of {all_cores} cores, {limit}; {features}; others use {others:.0%}"
    if others > hardware.DISTURBED:
        means = "what is measured now may be marked as disturbed: wait, or take cores apart (taskset)"
        return Answer("weak", message, means, numbers)
    if have < 2:
        return Answer("weak", message, "training, loader processes and Ray share one core", numbers)
    return Answer("ok", message, f"a trial without GPU trains with {have} threads", numbers)


@check("memory")
def memory(site: Site) -> Answer:
    """Host memory that a training may take, by what is free and by the limit of the cgroup."""
    limit = measure.memory_limit_mib(torch.device("cpu"))
    message = f"{psutil.virtual_memory().total / 2**30:.1f} GiB, of which a training may take {limit / 1024:.1f} GiB"
    if limit < LITTLE_MEMORY_MIB:
        means = "Ray and its workers take two of these before the first step: small batches only"
        return Answer("weak", message, means, {"limit_mib": limit})
    return Answer("ok", message, "batches grow until this is used", {"limit_mib": limit})


# ----------------------------------------------------------------------------------------------------------------- GPU
@check("GPU", needed=True)
def gpus(site: Site) -> Answer:
    """Whether the GPUs that are there, those that trials are planned for and those that torch sees are the same."""
    planned, seen = machine.gpus(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    build = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    numbers = {"planned": len(planned), "seen": seen}
    if len(planned) != seen:
        hint = "a torch build for this driver" if torch.version.cuda else "a torch build with CUDA (this one has none)"
        message = f"{text.pluralize(len(planned), 'GPU')} by the driver, {seen} by torch ({build})"
        means = f"trials would not run where they are planned: {hint}, or --gpus {seen}"
        return Answer("missing", message, means, numbers)
    if seen:
        names = [torch.cuda.get_device_properties(index) for index in range(seen)]
        listed = "; ".join(
            f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
            for gpu in names
        )
        return Answer("ok", f"{listed}; {build}", f"{seen} at once: one for each worker of a trial", numbers)
    hidden = os.environ.get(machine.VISIBLE)
    if signs := machine.signs() if hidden is None else []:
        return Answer("missing", f"{', '.join(signs)}, but no GPU that can be used ({build})",
                      "a search would run on the CPU: look at nvidia-smi, and give the container its GPUs",
                      numbers)  # fmt: skip
    why = f"{machine.VISIBLE}={hidden} hides all" if hidden is not None else build
    return Answer("weak", f"none; {why}", "trainings run on the CPU: small networks and images only", numbers)


QUERY = {
    "driver_version": "driver", "power.limit": "power limit (W)", "power.default_limit": "default limit (W)",
    "utilization.gpu": "in use (%)", "memory.used": "memory in use (MiB)",
    "pcie.link.width.current": "PCIe lanes", "pcie.link.width.max": "PCIe lanes at most",
}  # fmt: skip
BUSY_MIB = 1024.0
"""Memory in use from which somebody else works on a GPU: driver, display and a context of ours take less."""


@check("GPU's condition")
def condition(site: Site) -> Answer:
    """Driver, power limit, link, and whether somebody else is on it: what one wants to know of a rented GPU."""
    if site.device != "cuda":
        return Answer("skipped", "no GPU")
    # By itself it lists all GPUs of the machine, whichever are ours.
    ours = ["-i", ",".join(machine.gpus())]
    command = ["nvidia-smi", *ours, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return judged([[word.strip() for word in line.split(",")] for line in output.splitlines() if line.strip()])


def judged(rows: list[list[str]]) -> Answer:
    """What the columns of `QUERY` say of each GPU."""
    weak = []
    for index, row in enumerate(rows):
        _, limit, default, used, mib, lanes, most = map(_number, row)
        weak += [f"GPU {index} is limited to {limit:g} of {default:g} W"] if limit < default else []
        weak += [f"GPU {index} has {lanes:g} of {most:g} PCIe lanes"] if lanes < most else []
        weak += [f"somebody else is on GPU {index}"] if used > 100 * hardware.DISTURBED or mib > BUSY_MIB else []
    message = "; ".join(
        ", ".join(f"{quantity} {word}" for quantity, word in zip(QUERY.values(), row, strict=True)) for row in rows
    )
    if weak:
        return Answer("weak", message, f"{'; '.join(weak)}: slower than it could be, or not the same every time")
    return Answer("ok", message, "nobody else is on it, and nothing holds it back")


def _number(word: str) -> float:
    """nan where the driver does not know it (`[N/A]`), which compares as no limit."""
    try:
        return float(word)
    except ValueError:
        return math.nan


# -------------------------------------------------------------------------------------------------------------- places
@check("shared memory")
def shared_memory(site: Site) -> Answer:
    """/dev/shm against what the batches of loader processes take, which are handed over through it."""
    if not SHM.is_dir():
        return Answer("missing", f"no {SHM}", "loader processes have no way to hand over batches: loader.workers = 0")
    if (why := environment.unwritable(SHM)) is not None:
        return Answer("missing", f"{SHM} cannot be written: {why}", "loader.workers = 0 or loader.resident = true only")
    free, batch_bytes = shutil.disk_usage(SHM).free, SHARED.batch_size * 3 * 32 * 32 * 4
    needs = batch_bytes * SHARED.workers * SHARED.prefetch_factor * max(1, len(machine.gpus()))
    message, numbers = f"{free / 2**20:,.0f} MiB free in {SHM}", {"free_mib": free / 2**20, "needs_mib": needs / 2**20}
    if free < needs:
        batches = f"{SHARED.workers} loader processes with batches of {SHARED.batch_size} images at 32×32"
        return Answer("weak", message, f"{batches} take {needs / 2**20:,.0f} MiB, and the data comes on top: start the "
                      "container with a larger --shm-size, or search loader.resident", numbers)  # fmt: skip
    return Answer("ok", message, f"enough for {SHARED.workers} loader processes of each training process", numbers)


@check("disk", needed=True)
def disk(site: Site) -> Answer:
    """The folder of all searches and Ray's: writable, and with room."""
    storage = site.storage.absolute()
    folder = next(parent for parent in (storage, *storage.parents) if parent.is_dir())
    if (why := environment.unwritable(folder)) is not None:
        return Answer("missing", f"{folder} cannot be written: {why}", "results have no place: --storage names another")
    usage = {path: shutil.disk_usage(path) for path in (folder, Path(tempfile.gettempdir()))}
    message = "; ".join(f"{path}: {disk.free / 2**30:,.0f} GiB free" for path, disk in usage.items())
    numbers = {"free_gib": usage[folder].free / 2**30}
    if any(disk.used / disk.total > FULL_DISK for disk in usage.values()):
        return Answer("weak", message, f"a disk is over {FULL_DISK:.0%} full, where Ray begins to refuse work", numbers)
    if usage[folder].free < LITTLE_DISK:
        means = "checkpoints of a large network take 0.6 GiB each: --dry-run counts them"
        return Answer("weak", message, means, numbers)
    return Answer("ok", message, "--dry-run says what a search will take of it", numbers)


@check("home folder")
def home(site: Site) -> Answer:
    """Whether it can be written: caches lie there."""
    if (folder := files.home()) is not None:
        return Answer("ok", f"{folder} can be written", f"prepared data is kept in {cache_dir()}")
    message = f"{os.environ.get('HOME') or 'none'}: cannot be written"
    return Answer("weak", message, f"prepared data is kept in {cache_dir()} (TUNEDIFF_CACHE names another)")


@check("Inception weights")
def inception(site: Site) -> Answer:
    """Whether they are in the cache, or could be fetched; nothing is fetched here."""
    if (path := weights.cached()) is not None:
        return Answer("ok", f"in {path}", "distances are called FID")
    without = "without them FD with another extractor is what there is (evaluation.extractor)"
    if (why := weights.unreachable()) is None:
        return Answer(
            "weak", f"not here; {weights.URL} answers", "91 MiB are downloaded when a search first needs them"
        )
    return Answer("missing", f"not here, and {weights.URL} cannot be reached: {why}", without)


@check("energy")
def energy(site: Site) -> Answer:
    """Whether joules are counted."""
    if hardware.EnergyMeter(torch.device(site.device)).joules() is None:
        return Answer("missing", hardware.NO_ENERGY, "energy_wh is not recorded and cannot be an objective")
    return Answer("ok", "counted", "every point of a training has its joules")


CHECKS = (cpu, memory, gpus, condition, shared_memory, disk, home, inception, energy)
