"""Part A: does this device compute what a CPU does, in every form that a search draws? `doctor --full --part A`.

The measure is how far two networks are apart after ten steps from equal weights on equal numbers: the Euclidean norm of
the difference between what they say of the same images, over the norm of what the reference says, which began at 0. The
reference is trained in float32 on the CPU, eager, contiguous, AdamW one tensor after the other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tunediff.distributed import World, alone
from tunediff.doctor import apart
from tunediff.doctor.finding import Answer, Check, Site, check
from tunediff.doctor.trainings import CPU, STEPS, EnoughError, Trained, Watch, diffusion, small, trained
from tunediff.doctor.trainings import apart as distance
from tunediff.record import NotFiniteError
from tunediff.training import memory
from tunediff.training.feed import Feed
from tunediff.training.trial import Trial
from tunediff.workloads.diffusion.timesteps.base import KINDS

BOUNDS = {"float32": 1e-3, "TF32": 5e-3, "bf16": 0.015, "fp16": 5e-3}
"""Largest distance that rounding explains. On a CPU below 1e-5 (float32, other kernels), 0.003 (bf16) and 0.0006 (fp16,
whose mantissa has as many bits as TF32's) were seen; AdamW's beta2 of 0.9 in place of 0.999 makes 0.02 and more."""
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {}, "TF32": {"precision__matmul": "high", "precision__conv_tf32": True},
    "bf16": {"precision__amp": "bf16"}, "fp16": {"precision__amp": "fp16"},
}  # fmt: skip
FORMS = ("for_loop", "foreach", "fused")
SYNC_STEPS = 20
OWN_MIB = 64.0
"""By how much the peak of a small network may change after something large was there, and on a GPU all that it may be
beside what it keeps."""
ALIKE = "these knobs change the speed, not what is learned"
UNBOUNDED = "trials in this form learn something else: leave it out of a search"

part = functools.partial(check, needed=True, part="A")


@functools.cache
def reference() -> Trained:
    """The training that the others are held against."""
    return trained(small(), CPU)


def forms(name: str, site: Site) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every form of the optimizer, of memory and of data in this number format; a CPU's fp16, being slow, in three."""
    few = site.device == "cpu" and name == "fp16"
    optimizers = (*FORMS, "compiled") if site.device == "cuda" else FORMS
    orders = [(False, "torch")] if few else [(False, "torch"), (True, "torch")]
    if site.device == "cuda":
        orders += [(True, "triton")]
    for optimizer, (last, norm), resident in itertools.product(optimizers, orders, (few, True)):
        if few and not resident:
            continue
        words = [optimizer, *["channels_last"] * last, *["triton"] * (norm == "triton"), *["resident"] * resident]
        yield " ".join(words), {
            **FORMATS[name], "optimizer__implementation": optimizer, "memory__channels_last": last,
            "loader__resident": resident, "model__norm": norm,
        }  # fmt: skip


def _numbers(name: str, site: Site) -> Answer:
    if name == "TF32" and (site.device != "cuda" or torch.cuda.get_device_capability() < (8, 0)):
        return Answer("skipped", "a format of NVIDIA GPUs from Ampere on")
    found: dict[str, float] = {}
    for words, changes in forms(name, site):
        try:
            found[words] = distance(trained(small(**changes), alone()).says, reference().says)
        except NotFiniteError:
            found[words] = float("inf")
    return bounded(found, BOUNDS[name], f"{len(found)} forms of ten steps")


def bounded(found: dict[str, float], bound: float, what: str, means: str = ALIKE) -> Answer:
    """`wrong` where a distance is above the bound, or no number."""
    worst = max(found, key=lambda words: found[words] if found[words] == found[words] else float("inf"))
    said = f"{what}: at most {found[worst]:.1e} apart ({worst}); allowed {bound:g}"
    if wrong := [words for words, one in found.items() if not one <= bound]:
        return Answer("wrong", f"{said}; too far: {', '.join(wrong)}", UNBOUNDED, found)
    return Answer("ok", said, means, found)


NUMBERS = tuple(part(f"{name}, ten steps")(functools.partial(_numbers, name)) for name in FORMATS)


@part("one update")
def one_update(site: Site) -> Answer:
    """Clipping, AdamW and the averaged weights as one compiled function, against one after the other."""
    if site.device != "cuda":
        return Answer("skipped", "on a CPU the compiled optimizer is the fused one")
    ways = {form: diffusion(small(optimizer__implementation=form), alone(), STEPS) for form in ("compiled", "fused")}
    return bounded({"compiled": distance(ways["compiled"], ways["fused"])}, BOUNDS["float32"], f"{STEPS} steps")


# ------------------------------------------------------------------------------------------------------------ samplers
def _stop() -> None:
    raise EnoughError


def samplers() -> list[str]:
    """Every timestep sampler there is."""
    return sorted(member().name for member in KINDS)


def resumed(sampler: str, world: World) -> float:
    """How far a training that was interrupted after half of its steps ends from one that was not."""
    config = small(timesteps__name=sampler, evaluation__points=2)
    with tempfile.TemporaryDirectory(prefix="tunediff-doctor-") as folder:
        whole = diffusion(config, world, 6)
        with contextlib.suppress(EnoughError):
            diffusion(config, world, 6, Path(folder), Watch(at_point=_stop))
        again = diffusion(config, world, 6, Path(folder))
    return distance(again, whole)


@part("resume")
def resume(site: Site) -> Answer:
    """A training that was interrupted ends as one that was not, with every sampler."""
    found = {name: resumed(name, alone()) for name in samplers()}
    return bounded(found, BOUNDS["float32"], "every sampler, resumed", "an interrupted search loses nothing")


class Unwaiting(Trial):
    """The workload's part of a step must not wait for the device: the host runs ahead of it."""

    def _passes(self, feed: Feed) -> Iterator[Any]:
        for batch in super()._passes(feed):
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield batch
            finally:
                torch.cuda.set_sync_debug_mode("default")


def waits(site: Site) -> dict[str, str]:
    """Of every sampler with which a step waits for the device: what torch says of it."""
    found = {}
    for name in samplers():
        config = small(timesteps__name=name, optimizer__implementation="fused", loader__resident=True)
        try:
            diffusion(config, alone(), SYNC_STEPS, kind=Unwaiting)
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


@check("no waiting", part="A")
def waiting(site: Site) -> Answer:
    """Twenty steps of every sampler while torch raises where the host waits for the device."""
    if site.device != "cuda":
        return Answer("skipped", "no GPU: a CPU has nothing to wait for")
    if found := waits(site):
        said = "; ".join(f"{name}: {why}" for name, why in found.items())
        return Answer("weak", said, "with these samplers the GPU stands idle for a moment in every step", found)
    return Answer("ok", f"{len(samplers())} samplers, {SYNC_STEPS} steps each", "the host runs ahead of the GPU")


# ------------------------------------------------------------------------------------------------------------ compiler
def modes(site: Site) -> Iterator[dict[str, Any]]:
    """Every mode and scope of torch.compile that may be searched; on a CPU, where others are the same and take minutes,
    `default`."""
    for mode in ("default", "reduce-overhead", "max-autotune") if site.device == "cuda" else ("default",):
        for scope in ("model",) if mode == "reduce-overhead" else ("model", "blocks"):
            yield {"compile__mode": mode, "compile__scope": scope}


@part("compiled")
def compiled(site: Site) -> Answer:
    """Every mode and scope: compiled in the first step and never again, and right."""
    found, counts = dict[str, float](), dict[str, list[int]]()
    for changes in modes(site):
        one, words = trained(small(**changes), alone()), " ".join(map(str, changes.values()))
        found[words], counts[words] = distance(one.says, reference().says), one.graphs
    if wrong := [words for words, each in counts.items() if each[0] != each[-1]]:
        more = "; ".join(f"{words}: {counts[words][0]} graphs after the first step, {counts[words][-1]} after the last"
                         for words in wrong)  # fmt: skip
        return Answer("wrong", more, "it compiles again while it trains: such trials are slower than they should be",
                      counts)  # fmt: skip
    if not all(each[-1] for each in counts.values()):
        return Answer("wrong", f"graphs: {counts}", "nothing was compiled, though it was asked for", counts)
    return bounded(found, BOUNDS["float32"], f"{len(found)} ways, graphs constant")


# -------------------------------------------------------------------------------------------------------------- memory
def exhaust(device: torch.device) -> None:
    """Take memory until there is none. Raises what torch raises then."""
    taken = []
    while True:
        taken.append(torch.empty(2**30 if device.type == "cuda" else 2**60, dtype=torch.uint8, device=device))


def held_mib(device: torch.device) -> float:
    """What tensors hold of a GPU; 0 on a CPU, which does not count."""
    return torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0


@part("out of memory")
def out_of_memory(site: Site) -> Answer:
    """Memory runs out, is told as that, is given back, and the next training is as it was."""
    device = alone().device
    before = held_mib(device)
    try:
        exhaust(device)
    except Exception as error:
        if not memory.is_oom(error):
            said = f"{type(error).__name__}: {error}"
            return Answer(
                "wrong", said[:300], "a trial without memory would be told as broken, and not teach the search"
            )
    memory.reset(device)
    if (kept := held_mib(device) - before) > 1:
        return Answer("wrong", f"{kept:,.0f} MiB are not given back", "the next trials of a worker have less memory")
    found = distance(trained(small(), alone()).says, reference().says)
    return bounded(
        {"the next training": found},
        BOUNDS["float32"],
        "told as out of memory, all given back",
        "a trial without memory costs no other",
    )


def peaks(world: World) -> tuple[float, float]:
    """Peak MiB of a small training, before and after half a GiB was there and is gone; on a GPU beside what libraries
    keep, such as the workspaces of cuBLAS."""
    found = []
    for _ in range(2):
        found.append(trained(small(), world).outcome.peak["peak_memory_mib"] - held_mib(world.device))
        torch.ones(2**27, device=world.device)
    return found[0], found[1]


@part("peak memory")
def peak(site: Site) -> Answer:
    """The peak of a small network is its own, whatever was there before."""
    trained(small(), alone())  # libraries load
    first, second = peaks(alone())
    said = f"{first:,.0f} MiB, and {second:,.0f} MiB after half a GiB was there and gone"
    too_much = site.device == "cuda" and max(first, second) > OWN_MIB
    if too_much or abs(second - first) > OWN_MIB:
        return Answer("wrong", f"{said}; of a network with 1 MiB of weights", "peak_memory_mib of small trials is not "
                      "theirs: trade-offs with memory are not to be believed", {"mib": [first, second]})  # fmt: skip
    return Answer("ok", said, "peak_memory_mib is the trial's own", {"mib": [first, second]})


@part("one-rank group")
def one_rank(site: Site) -> Answer:
    """A process group of one: DDP's gradients through it are those without it."""
    found = apart.ask("probes", "one_rank", within_s=120)
    if not found["right"]:
        return Answer(
            "wrong", f"{found['backend']}: other gradients than without", "several workers are not to be believed"
        )
    return Answer("ok", f"{found['backend']}, gradients as without", "the library for several GPUs loads and works")


CHECKS: tuple[Check, ...] = (*NUMBERS, one_update, resume, waiting, compiled, out_of_memory, peak, one_rank)
