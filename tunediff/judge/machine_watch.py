"""Watch the machine of a comparison: what it is, how it is, and how fast it is between the pairs.

A reference of at most a few seconds, a product of matrices, a copy and what a loader does, runs
before the first pair, after each one and so at the end. Where it changes, the machine has drifted:
the pairs before and after it are blocks of the test (`analysis.drift`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from tunediff.analysis.drift import FILE
from tunediff.core import environment, machine
from tunediff.tuning.at_once import RunDevice

LEAST_S, MOST_S, SHARE = 0.05, 2.0, 0.02
"""Seconds of each part of the reference: this share of those of a pair, within these limits."""
SERIALS = ("product_serial", "board_serial")
THERMAL = Path("/sys/devices/system/cpu")
DMI = Path("/sys/class/dmi/id")
GPU_FIELDS = (
    "name", "uuid", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu",
    "clocks_throttle_reasons.active",
)  # fmt: skip
"""What nvidia-smi is asked for."""


# ---- what it is
def facts(dmi: Path = DMI) -> dict[str, Any]:
    """Return model, digest of its serial numbers and driver; None for what cannot be read."""
    serials = [text for name in SERIALS if (text := _text(dmi / name))]
    serials += [uuid for uuid in machine.cards() if uuid]
    known = environment.describe_machine()
    drivers = {line["driver_version"] for line in _gpu_lines()}
    return {
        "model": known["cpu"],
        "gpus": known["gpus"],
        "serial_digest": hashlib.sha256("\n".join(serials).encode()).hexdigest()[:12]
        if serials
        else None,
        "driver": ", ".join(sorted(drivers)) or None,
        "kernel": os.uname().release if hasattr(os, "uname") else None,
    }


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


# ---- how it is
def state() -> dict[str, Any]:
    """Return clocks, temperatures, throttling and load now; None for what cannot be read."""
    frequency = temperatures = None
    with contextlib.suppress(OSError, AttributeError, NotImplementedError):
        frequency = psutil.cpu_freq()
    with contextlib.suppress(OSError, AttributeError):
        temperatures = psutil.sensors_temperatures()
    degrees = [entry.current for group in (temperatures or {}).values() for entry in group]
    throttles = [_text(path) for path in THERMAL.glob("cpu*/thermal_throttle/core_throttle_count")]
    counts = [int(text) for text in throttles if text.isdigit()]
    return {
        "clock_mhz": round(frequency.current) if frequency is not None else None,
        "temperature_c": max(degrees, default=None),
        "throttle_count": sum(counts) if counts else None,
        "load": round(psutil.getloadavg()[0] / machine.cores(), 3),
        "gpus": [_gpu_state(line) for line in _gpu_lines()],
    }


def _gpu_state(line: dict[str, str]) -> dict[str, Any]:
    reasons = line["clocks_throttle_reasons.active"]
    return {
        "clock_mhz": _number(line["clocks.sm"]),
        "memory_clock_mhz": _number(line["clocks.mem"]),
        "temperature_c": _number(line["temperature.gpu"]),
        "throttle_reasons": reasons if reasons.startswith("0x") else None,
    }


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def _gpu_lines() -> list[dict[str, str]]:
    """Return what nvidia-smi says of each GPU; [] without a working driver."""
    if not machine.gpus() or (command := machine.nvidia_smi()) is None:
        return []
    query = [f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [command, *query], capture_output=True, text=True, timeout=20, check=True
        )
        rows = [line.split(", ") for line in done.stdout.splitlines()]
        return [
            dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)
        ]
    return []


# ---- how fast it is
def reference(seconds: float) -> dict[str, float]:
    """Return the seconds of some products, of a copy and of a batch of a loader, on one core.

    Each repeats for `seconds`, in pieces that are shorter than a turn of the scheduler: the fastest
    tenth shows the machine, and not what else runs on it.
    """
    rng = np.random.default_rng(0)
    factor = rng.standard_normal((64, 64), dtype=np.float32)  # larger ones take several threads
    source, target = _aligned(2**21), _aligned(2**21)
    source[:] = rng.integers(0, 8, len(source), dtype=np.uint8)
    packed = zlib.compress(source[: 2**16].tobytes(), 1)

    def products() -> None:
        for _ in range(10):
            _ = factor @ factor

    parts: dict[str, Callable[[], object]] = {
        "product_s": products,
        "copy_s": lambda: np.copyto(target, source),
        "loader_s": lambda: np.frombuffer(zlib.decompress(packed), np.uint8).astype(np.float32),
    }
    return {name: _fastest_s(part, seconds) for name, part in parts.items()}


def _aligned(size: int) -> NDArray[np.uint8]:
    """Return memory that begins at a multiple of its size, which changes a copy by 20 %."""
    memory = np.zeros(2 * size, dtype=np.uint8)
    begin = -memory.ctypes.data % size
    return memory[begin : begin + size]


def _fastest_s(part: Callable[[], object], seconds: float) -> float:
    part()  # the first call pays for pages
    times, begun = list[float](), time.perf_counter()
    while len(times) < 40 or time.perf_counter() - begun < seconds:
        before = time.perf_counter()
        part()
        times.append(time.perf_counter() - before)
    return float(np.quantile(times, 0.1))


def neighbours(run_devices: Sequence[RunDevice], seconds: float) -> dict[str, float]:
    """Return by which share of its seconds each part of the reference takes longer while every
    share of the machine runs it: equal work on equal devices, first one by one, then at once."""
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()", str(seconds)]
    processes = []
    with contextlib.ExitStack() as stack:
        for device in run_devices:
            cores = ",".join(map(str, device.cores))
            process = subprocess.Popen(
                [*command, cores], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            processes.append(stack.enter_context(process))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        alone = [_answers([process])[0] for process in processes]
        together = _answers(processes)
    return {
        part: float(
            np.mean([now[part] / before[part] for before, now in zip(alone, together, strict=True)])
        )
        - 1
        for part in alone[0]
    }


def _answers(processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, float]]:
    """Let processes of `serve` measure at the same time; return what each has found."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [json.loads(process.stdout.readline()) for process in processes if process.stdout]


def serve() -> None:
    """Measure the reference for each line of standard input, on the cores of the command line."""
    seconds, cores = float(sys.argv[1]), [int(word) for word in sys.argv[2].split(",") if word]
    if cores:
        os.sched_setaffinity(0, cores)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(reference(seconds)), flush=True)


class MachineWatch:
    """Writes a line about the machine between the pairs of a comparison."""

    def __init__(
        self, folder: Path, noted: int | None = None, run_devices: Sequence[RunDevice] = ()
    ) -> None:
        """`noted`: pairs of a comparison that is over, after which nothing more is to be said;
        `run_devices`: on which runs at the same time are neighbours."""
        self._file, self._noted, self._run_devices = folder / FILE, noted, run_devices
        self._pair_began: float | None = None

    def note(self, pairs: int) -> None:
        """Write how the machine is after so many pairs, once."""
        if pairs == self._noted:
            return
        now, self._noted = time.monotonic(), pairs
        pair_s = now - self._pair_began if self._pair_began is not None else 0.0
        seconds = min(MOST_S, max(LEAST_S, SHARE * pair_s))
        line = {"time": time.time(), "pairs": pairs, **reference(seconds), **state()}
        if not self._file.is_file():
            line |= {"facts": facts()}
            if self._run_devices:
                line |= {"neighbours": neighbours(self._run_devices, 6 * LEAST_S)}
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._pair_began = time.monotonic()
