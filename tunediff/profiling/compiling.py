"""What torch.compile costs and gains, and after how much training it has paid."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tunediff import config as cfg
from tunediff.analysis.speed import break_even
from tunediff.config import Systems
from tunediff.config.systems import eager
from tunediff.core import processes
from tunediff.core.files import write_text
from tunediff.profiling.measure import Bench, in_a_line, spread
from tunediff.profiling.result import CompileCost, Failed, Speed


def compile_cost(config: Systems, steps: int, scratch: Path) -> CompileCost | Failed:
    """Compare eager with compiled, one after the other in a process of its own with an empty cache of compiled code.

    `mode` is the configuration's, or `default` where it compiles nothing. `failed` holds the reason when there is no
    result.
    """
    mode = config.compile.mode if config.compile.mode != "none" else "default"
    # `python -m` of this module: multiprocessing would run the script of the caller a second time.
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".compiled-", ignore_cleanup_errors=True) as name:
        folder = Path(name).absolute()
        (folder / "config.yaml").write_text(cfg.dump(config), encoding="utf-8")
        words = (str(folder), mode, f"{steps}", f"{torch.get_num_threads()}")
        try:
            answer = processes.answer(__name__, *words, within_s=math.inf)
        except RuntimeError:
            answer = {"failed": "the process that compiled was killed"}
    if "eager" in answer:
        return compared(mode, answer["eager"], answer["compiled"])
    return {"mode": mode, "failed": answer["failed"]}


def main(folder: Path, mode: str, steps: int, threads: int, path: Path) -> None:
    """Write into `path` the measurements of eager and compiled trainings, or `failed`, the reason for none."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    torch.set_num_threads(threads)
    answer: dict[str, object]
    try:
        eager, compiled = _eager_and_compiled(cfg.load(folder / "config.yaml"), mode, steps)
        answer = {"eager": eager, "compiled": compiled}
    except Exception as error:  # no C++ compiler, an operation that cannot be compiled, …
        answer = {"failed": in_a_line(error)}
    write_text(path, json.dumps(answer))


def _eager_and_compiled(config: Systems, mode: str, steps: int) -> tuple[list[Speed], Speed]:
    """Return `speed` without, with and again without torch.compile; runs in the process of `compile_cost`."""
    bench = Bench.of(config)
    plain = eager(config)
    bench.speed(plain, 2, segments=1)  # libraries load once per process, whatever the mode
    before = bench.speed(plain, steps)
    compiled = bench.speed(cfg.override(config, {"compile.mode": mode}), steps)
    return [before, bench.speed(plain, steps)], compiled


def compared(mode: str, eager: Sequence[Speed], compiled: Speed) -> CompileCost:
    """Return the measurements, the speed-up, whether it is larger than their spread, and the break-even.

    `eager` was measured before and after: how far the two are apart is part of the spread.
    """
    rates = [speed["samples_per_s"] for speed in eager]
    rate, faster = statistics.fmean(rates), compiled["samples_per_s"]
    noise = math.hypot(max(rates) - min(rates), spread(*eager, compiled))
    # compile_s is compilation and the first step, which an eager training has as well.
    seconds = max(0.0, compiled["compile_s"] - eager[-1]["first_step_s"])
    paid = break_even(seconds, faster, faster / rate)
    return {
        "mode": mode, "eager_samples_per_s": rate, "compiled_samples_per_s": faster, "speedup": faster / rate,
        "within_noise": abs(faster - rate) <= 2 * noise, "compile_s": seconds,
        "break_even": None if paid is None else {"samples": paid[0], "seconds": paid[1]},
        "graphs": compiled.get("compiled_graphs"), "expected_graphs": compiled.get("expected_graphs"),
        "peak_memory_mib": [eager[-1]["peak_memory_mib"], compiled["peak_memory_mib"]],
        "disturbed": any(speed["disturbed"] for speed in (*eager, compiled)),
    }  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
