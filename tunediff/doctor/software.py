"""What the software does on this machine: number formats, process groups, loader, compiler, Ray."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import time
from typing import Any

import torch

from tunediff.config.systems import Loader
from tunediff.core import environment, machine, processes, text
from tunediff.data import loader
from tunediff.distributed import alone
from tunediff.doctor.finding import Answer, Site, check
from tunediff.profiling import measure

PAYS = 1.1
"""How many times as fast as float32 products must be in another format for it to be worth a search."""


def ask(probe: str, *, ranks: int = 1, within_s: float) -> dict[str, Any]:
    """Return what a function of `probes` returns on rank 0. Raises RuntimeError and TimeoutError."""
    return processes.answer("tunediff.doctor.probes", probe, ranks=ranks, within_s=within_s)


@check("versions", needed=True)
def versions(site: Site) -> Answer:
    """Packages that every search needs."""
    described = environment.describe()
    absent = [
        name for name, version in described["versions"].items() if version == "not installed" and name != "tunediff"
    ]
    message = ", ".join(f"{name} {version}" for name, version in described["versions"].items())
    if site.device == "cuda":
        message += f", cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    if absent:
        return Answer("missing", message, f"not installed: {', '.join(absent)}")
    return Answer("ok", f"Python {described['python']}, {message}", "kept in every trial's journal")


# ------------------------------------------------------------------------------------------------------ number formats
@functools.cache
def gains() -> dict[str, float]:
    """See `measure.format_gains`; measured once."""
    return measure.format_gains(alone())


def _format(name: str, knob: str, units: str) -> Answer:
    gain = gains().get(name)
    if gain is None:
        return Answer("missing", f"no units for it here; {units}", f"{knob} is not worth searching")
    message, numbers = f"matrix products {gain:.2g} times as fast as in float32", {"gain": gain}
    if gain < PAYS:
        return Answer("weak", message, f"{knob} does not pay here", numbers)
    return Answer("ok", message, f"{knob} is worth searching", numbers)


@check("bf16")
def bf16(site: Site) -> Answer:
    """Whether products of bfloat16 are faster than float32."""
    return _format(
        "bf16", "precision.amp = bf16", "CPUs with avx512_bf16 or amx_bf16 and GPUs from Ampere on have them"
    )


@check("TF32")
def tf32(site: Site) -> Answer:
    """Whether products of float32 are faster when rounded to TF32."""
    return _format("tf32", "precision.matmul = high", "NVIDIA GPUs from Ampere on have them")


# ----------------------------------------------------------------------------------------------------------- processes
@check("process group")
def group(site: Site) -> Answer:
    """Collectives between all GPUs, or two processes on a CPU."""
    ranks = max(2, len(machine.gpus()))
    if site.device == "cuda" and len(machine.gpus()) == 1:
        return Answer("skipped", "one GPU", "parallel.workers = 1 is what there is")
    result = ask("group", ranks=ranks, within_s=120)
    message = f"{ranks} processes over {result['backend']}: 25 MiB averaged in {1000 * result['mean_s']:.0f} ms"
    if not result["right"]:
        return Answer("wrong", f"{message}, wrongly", "parallel.workers = 1 only: several would learn something else")
    return Answer(
        "ok", message, "added to every step of a large network with parallel.workers > 1", {**result, "ranks": ranks}
    )


@check("loader processes", needed=True)
def loading(site: Site) -> Answer:
    """Two loader processes start, and hand over the right rows."""
    rows, section = torch.arange(64), Loader(batch_size=8, workers=2)
    order = loader.Order(len(rows), section.batch_size, 1, 0, 1, seed=0)
    begin = time.monotonic()
    with loader.build(rows, section, order, torch.device(site.device)) as batches:
        first = batches.move(batches.fetch())
        begun = time.monotonic() - begin
        second = batches.move(batches.fetch())
    right = torch.equal(torch.cat([first, second]).cpu(), torch.cat([order.indices(0), order.indices(1)]))
    message = f"started by forkserver in {begun:.1f} s"
    if not right:
        return Answer(
            "wrong", f"{message}, but rows were lost or mixed up", "loader.workers = 0 or loader.resident only"
        )
    return Answer(
        "ok", message, "loader.workers can be searched; the first batch of a trial waits so long", {"start_s": begun}
    )


# ------------------------------------------------------------------------------------------------------------ compiler
@check("torch.compile")
def compiling(site: Site) -> Answer:
    """A small network, compiled: a compiler is there and what it makes computes the same."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    without = "compile.mode = none only: search files that draw it fail in each such trial"
    try:
        result = ask("compiled", within_s=300)
    except (RuntimeError, TimeoutError) as error:
        tools = f"{error}; C++ compiler: {compiler or 'none'}; Triton: {_triton()}"
        return Answer("missing", tools, f"{without}; a C++ compiler and Python's headers are what it takes")
    message = f"a small network in {result['compile_s']:.0f} s with {compiler}, Triton {_triton()}"
    if not result["right"]:
        return Answer("wrong", f"{message}: not what it computes eagerly", without)
    if not result["graphs"]:
        return Answer("wrong", f"{message}: no graph was compiled", without)
    return Answer(
        "ok",
        message,
        "larger networks take minutes on a CPU; budget: compile: says whether they count as training",
        result,
    )


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@check("CUDA graphs")
def cuda_graphs(site: Site) -> Answer:
    """A recorded graph computes with the numbers that lie there when it is replayed."""
    if site.device != "cuda":
        return Answer("missing", "no GPU", "compile.mode = reduce-overhead and max-autotune gain nothing")
    if not ask("graphs", within_s=120)["right"]:
        return Answer("wrong", "a replay computed something else", "compile.mode = none or default only")
    return Answer("ok", "recorded and replayed", "compile.mode = reduce-overhead and max-autotune can be searched")


# ----------------------------------------------------------------------------------------------------------------- Ray
def _cluster() -> dict[str, Any]:
    if isinstance(answer := _answer(), Exception):
        raise answer
    return answer


@functools.cache
def _answer() -> dict[str, Any] | Exception:
    """Start the cluster once for both checks, also where it fails."""
    try:
        return ask("cluster", within_s=240)  # of which Ray may start for 120
    except (RuntimeError, TimeoutError) as error:
        return error


@check("Ray", needed=True)
def ray(site: Site) -> Answer:
    """A cluster as a search starts it runs a task, and has the cores and GPUs of this machine."""
    result = _cluster()
    message = f"up after {result['start_s']:.1f} s, first task after {result['task_s']:.1f} s"
    if not result["right"]:
        return Answer("wrong", f"{message}; it counts other cores or GPUs than there are", "trials may wait for ever")
    return Answer("ok", message, f"every search begins with it: {text.seconds(result['start_s'])}", result)


@check("Ray's dashboard")
def dashboard(site: Site) -> Answer:
    """It answers, if only that a token is asked for; it also gives back what stopped trials held."""
    result = _cluster()
    if not result["status"]:
        why = result["message"] or "Ray gives it no address"
        return Answer("missing", why, "early stopping may leave places of stopped trials taken: early_stopping: none")
    return Answer(
        "ok", f"http://{result['url']} answers ({result['status']})", "on loopback; a search prints how to see it"
    )


CHECKS = (versions, bf16, tf32, group, loading, compiling, cuda_graphs, ray, dashboard)
