"""Part C: a search as one starts it, with what goes wrong in long ones. `doctor --full --part C`.

Six trials of seconds: one wants more memory than there is, the worker of one is killed, one is compiled; where there
are several GPUs, one more for each way of using two. After it, two processes that train as one, without Ray.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tunediff import machine, record
from tunediff.distributed import alone
from tunediff.doctor import apart
from tunediff.doctor.finding import Answer, Site, check
from tunediff.points import Point
from tunediff.training import hardware, memory

NAME = "whole"
WITHIN_S = 900.0
HUGE = {"loader.batch_size": 65536, "model.channels": 512}
"""128 GiB for one activation of 32×32 in float32."""
KILLED, OOM, COMPILED = "t0003", "t0002", "t0004"
TRIALS: tuple[dict[str, Any], ...] = (
    {}, {"loader.batch_size": 64}, HUGE, {"loader.batch_size": 32}, {"compile.mode": "default"},
    {"precision.amp": "bf16"},
)  # fmt: skip
STRATEGIES = ("ddp", "fsdp", "pipeline")
SAME = 1e-3
"""How far two ranks may end from one after ten steps in float32, in what the network says and in its loss: part A's
bound, which `AdamW` with another beta2 exceeds twentyfold."""
PAYS = 1.1
"""How many times as fast as one process several must be for it to be worth a search."""
TOGETHER_S = 240.0
FIXED = {
    "data.image_size": 32, "data.max_images": 256, "model.multipliers": [1], "model.attention": [],
    "model.channels": 8, "evaluation.images": 32, "evaluation.steps": 2, "evaluation.points": 2,
    "evaluation.extractor": "random", "evaluation.validation_images": 32,
}  # fmt: skip


def trials() -> list[dict[str, Any]]:
    """Of the search, the baseline first."""
    strategies = STRATEGIES if len(machine.gpus()) > 1 else ()
    return [*TRIALS, *({"parallel.workers": 2, "parallel.strategy": one} for one in strategies)]


def asked() -> dict[str, Any]:
    """The search file."""
    budget = {"per_trial": "4s", "compile": "free"}
    return {"workload": "digits", "budget": budget, "fixed": FIXED, "trials": trials()}


@functools.cache
def searched() -> tuple[int | None, dict[str, record.TrialRecord], bool, str]:
    """Exit code (None: it did not end), its trials by name, whether a worker was killed, and its last lines."""
    memory.reset(alone().device)  # what other parts have left with the allocator is the search's
    with tempfile.TemporaryDirectory(prefix="tunediff-doctor-", ignore_cleanup_errors=True) as place:
        file, folder, log = Path(place) / "whole.yaml", Path(place) / NAME, Path(place) / "log"
        file.write_text(yaml.safe_dump(asked()))
        line = [sys.executable, "-m", "tunediff.search", str(file), "--name", NAME, "--storage", place]
        with open(log, "wb") as heard:
            process = subprocess.Popen(line, stdout=heard, stderr=heard, start_new_session=True)
        killed, until = False, time.monotonic() + WITHIN_S
        try:
            while process.poll() is None and time.monotonic() < until:
                killed = killed or kill(folder / "trials" / KILLED)
                time.sleep(0.2)
        finally:
            code = process.poll()
            _end(process)
        found = {one.name: one for one in record.read_trials(folder)}
        return code, found, killed, " ".join(log.read_text(errors="replace").splitlines()[-3:])


def kill(trial: Path) -> bool:
    """Kill the worker of this trial with signal 9 once it has been measured; whether that was done."""
    events = list(record.events(trial)) if trial.is_dir() else []
    workers = [event["pid"] for event in events if event["event"] == "worker"]
    if not workers or not any(event["event"] == "point" for event in events):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(workers[-1], signal.SIGKILL)
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C and SIGTERM end a search, and what is left after that."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)


@check("a search", needed=True, part="C")
def search(site: Site) -> Answer:
    """It ends, and each trial is told as what became of it."""
    code, found, killed, last = searched()
    if code is None:
        came = ", ".join(f"{name} {one.status}" for name, one in sorted(found.items()))
        return Answer("missing", f"not done after {WITHIN_S:.0f} s: {came or last}"[:400],
                      "it hangs, or this machine is too slow or too busy for it")  # fmt: skip
    if code != 0:
        return Answer("missing", f"exit code {code}: {last}"[:400], "the same would happen to yours")
    return judged(found, killed, len(trials()))


def judged(found: Mapping[str, record.TrialRecord], killed: bool, count: int) -> Answer:
    """Of the trials of a search that has ended."""
    names = [f"t{index:04d}" for index in range(count)]
    became = {name: found[name].status if name in found else "not there" for name in names}
    said, wrong = ", ".join(f"{name} {status}" for name, status in became.items()), list[str]()
    for name, status in became.items():
        expected = "oom" if name == OOM else "ok"
        if status != expected:
            why = f" ({found[name].reason})" if name in found and found[name].reason else ""
            wrong.append(f"{name} should be {expected}{why}")
    if not killed:
        wrong.append(f"the worker of {KILLED} could not be killed")
    elif KILLED in found and found[KILLED].attempts < 2:
        wrong.append(f"{KILLED} did not go on after its worker was killed")
    if COMPILED in found and not _graphs(found[COMPILED].points):
        wrong.append(f"{COMPILED} compiled nothing")
    if wrong:
        return Answer("wrong", f"{said}; {'; '.join(wrong)}"[:600], "such trials of yours would end so too", became)
    return Answer("ok", said, "out of memory is told, a killed worker is replaced, a compiled trial compiles", became)


def _graphs(points: Sequence[Point]) -> int:
    return int(points[-1].get("compiled_graphs", 0) or 0) if points else 0


@check("energy of trials", part="C")
def energy(site: Site) -> Answer:
    """Watt-hours in the journal of the baseline, where they are counted."""
    _, found, _, _ = searched()
    points = found["t0000"].points if "t0000" in found else []
    if not points:
        return Answer("missing", "the baseline has no point", "nothing is known of its energy")
    if "energy_wh" not in points[-1]:
        return Answer("missing", f"not counted: {hardware.NO_ENERGY}", "energy_wh cannot be an objective here")
    return Answer("ok", f"{points[-1]['energy_wh']:.3g} Wh for the baseline", "energy_wh can be an objective")


# ------------------------------------------------------------------------------------------------------- several ranks
def one_only(site: Site) -> str:
    """Why no two processes can train together here; '' where they can."""
    count, what = (len(machine.gpus()), "GPU") if site.device == "cuda" else (machine.cores(), "CPU core")
    return f"{count} {what}" if count < 2 else ""


@check("two ranks", part="C")
def two_ranks(site: Site) -> Answer:
    """Two processes end where one does, by each strategy, and how fast they are; on more GPUs, DDP on all as well."""
    if why := one_only(site):
        return Answer("skipped", why, "parallel.workers = 1 is what there is")
    ways: dict[str, tuple[str, int]] = {name: (name, 2) for name in STRATEGIES}
    if site.device == "cuda":
        ways["dp"] = "dp", 1
        many = 2 ** (len(machine.gpus()).bit_length() - 1)  # divides the batch
        ways |= {f"ddp on {many} GPUs": ("ddp", many)} if many > 2 else {}
    single = apart.ask("probes", "together", "single", within_s=TOGETHER_S)
    found, failed = dict[str, dict[str, Any]](), list[str]()
    for name, (strategy, ranks) in ways.items():
        try:
            found[name] = apart.ask("probes", "together", strategy, ranks=ranks, within_s=TOGETHER_S)
        except (RuntimeError, TimeoutError) as error:
            failed.append(f"{name}: {error}"[:200])
    return compared(single, found, failed)


def compared(single: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]], failed: Sequence[str]) -> Answer:
    """Each way beside one process: how far from what a CPU learns alone, and how many times as fast."""
    times = {name: one["images_per_s"] / single["images_per_s"] for name, one in found.items()}
    numbers = {name: {**one, "times_as_fast": times[name]} for name, one in found.items()} | {"single": dict(single)}
    words = [
        f"{name} {times[name]:.2f} times as fast, {one['apart']:.1e} and {one['loss_apart']:.1e} apart"
        for name, one in found.items()
    ]
    said = "; ".join([f"beside one process, of which network and loss may be {SAME:g} apart", *words, *failed])
    if wrong := [name for name, one in found.items() if not (one["apart"] <= SAME and one["loss_apart"] <= SAME)]:
        return Answer("wrong", f"{said}; too far: {', '.join(wrong)}", "leave these out of parallel.strategy", numbers)
    if failed:
        return Answer("missing", said, "leave these out of parallel.strategy", numbers)
    if max(times.values()) < PAYS:
        return Answer("weak", said, "parallel.workers > 1 does not pay for such a network here", numbers)
    return Answer("ok", said, "parallel.workers can be searched: they change the speed, not what is learned", numbers)


@check("a killed rank", part="C")
def killed_rank(site: Site) -> Answer:
    """One of two is killed while they train: the other must say so in words that a search knows."""
    if why := one_only(site):
        return Answer("skipped", why, "parallel.workers = 1 is what there is")
    found = apart.ask("probes", "killed", ranks=2, within_s=TOGETHER_S, survivors=1)
    return noticed(found["waited_s"], found["said"])


def noticed(waited_s: float, said: str) -> Answer:
    """Of what the rank that is left has raised."""
    from tunediff.tuning import worker  # imports Ray

    numbers = {"waited_s": waited_s, "said": said}
    if not said:
        return Answer("weak", f"the other rank still waits after {waited_s:.0f} s",
                      "a search sees by itself that a process has died; so does torchrun", numbers)  # fmt: skip
    if not any(sign in said.lower() for sign in worker.GONE):
        return Answer("wrong", f"after {waited_s:.1f} s: {said}"[:400],
                      "no words for a lost process: such a trial would count as failed", numbers)  # fmt: skip
    return Answer("ok", f"noticed after {waited_s:.1f} s: {said}"[:200], "its trial goes on with new workers", numbers)


CHECKS = (search, energy, two_ranks, killed_rank)
