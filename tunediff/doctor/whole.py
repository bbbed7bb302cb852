"""Part C: a search as one starts it, with what goes wrong in long ones. `doctor --full --part C`.

Six trials of seconds: one wants more memory than there is, the worker of one is killed, one is compiled; where there
are several GPUs, one more for each way of using two.
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
from tunediff.doctor.finding import Answer, Site, check

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
FIXED = {
    "data.image_size": 32, "data.max_images": 256, "model.multipliers": [1], "model.attention": [],
    "model.channels": 8, "evaluation.images": 64, "evaluation.steps": 5, "evaluation.points": 2,
    "evaluation.extractor": "random", "evaluation.validation_images": 64,
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


def _graphs(points: Sequence[record.Point]) -> int:
    return int(points[-1].get("compiled_graphs", 0) or 0) if points else 0


@check("energy of trials", part="C")
def energy(site: Site) -> Answer:
    """Joules in the journal of the baseline, where they are counted."""
    _, found, _, _ = searched()
    points = found["t0000"].points if "t0000" in found else []
    if not points or "energy_wh" not in points[-1]:
        return Answer("missing", "no energy_wh in the baseline's points", "energy_wh cannot be an objective here")
    return Answer("ok", f"{points[-1]['energy_wh']:.3g} Wh for the baseline", "energy_wh can be an objective")


@check("several GPUs", part="C")
def several(site: Site) -> Answer:
    """Two GPUs as one, by each strategy."""
    count = len(machine.gpus())
    if count < 2:
        return Answer("skipped", f"{count} GPUs", "parallel.workers = 1 is what a GPU search has here")
    _, found, _, _ = searched()
    return strategies(found)


def strategies(found: Mapping[str, record.TrialRecord]) -> Answer:
    """Images/s of each, beside one GPU's."""
    rates = dict[str, Any]()
    for index, name in enumerate(STRATEGIES, len(TRIALS)):
        trial = found.get(f"t{index:04d}")
        if trial is None or trial.status != "ok" or not trial.points:
            why = trial.reason if trial is not None else "not there"
            return Answer("missing", f"{name}: {why}", "leave it out of parallel.strategy")
        rates[name] = trial.points[-1].samples_per_s
    alone = found["t0000"].points[-1].samples_per_s
    said = ", ".join(f"{name} {rate:,.0f} images/s" for name, rate in rates.items())
    return Answer("ok", f"{said}; one GPU {alone:,.0f}", "all can be searched; a large network gains more", rates)


CHECKS = (search, energy, several)
