"""Measure whether trainings that share a device slow each other down, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.config.systems import Systems
from tunediff.core import processes

MEASURED_S = 10.0
"""Training seconds of each measurement, about."""
LOSS = 0.02
"""Part of its samples per second that a training may lose beside others, or twice the noise if that is more."""
LONGEST_S = 600.0
"""Seconds after which a process that has not answered is given up."""


class Beside(NamedTuple):
    """Samples per second of trainings, of one alone and of all beside each other."""

    alone: float
    beside: tuple[float, ...]
    noise: float
    """Standard deviation of the ratio of two rates."""

    @property
    def kept(self) -> float:
        """Return the part of its rate that the slowest keeps."""
        return min(self.beside) / self.alone

    @property
    def steady(self) -> bool:
        """Return whether the slowest keeps its rate, up to the noise."""
        return self.kept >= 1 - max(LOSS, 2 * self.noise)

    def __str__(self) -> str:
        rates = ", ".join(f"{rate:.4g}" for rate in self.beside)
        kept = f"the slowest keeps {self.kept:.0%} of its samples/s (noise {self.noise:.1%})"
        return f"beside each other {kept}: {self.alone:.4g} alone, {rates} beside"


def measure(config: Systems, number: int, seconds: float = MEASURED_S) -> Beside:
    """Train one for about so many seconds, and then so many at once for as many steps.

    Raises `ConfigError` if one fails, as by lack of memory.
    """
    with tempfile.TemporaryDirectory(prefix="tunediff-beside-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(cfg.dump(config), encoding="utf-8")
        (alone,) = _speeds(folder / "alone", 1, seconds, 0)
        together = _speeds(folder / "beside", number, seconds, alone["steps"])
    relative = [(speed["samples_per_s_sd"] or 0.0) / speed["samples_per_s"] for speed in [alone, *together]]
    noise = (relative[0] ** 2 + max(relative[1:]) ** 2) ** 0.5
    return Beside(alone["samples_per_s"], tuple(speed["samples_per_s"] for speed in together), noise)


def _speeds(folder: Path, number: int, seconds: float, steps: int) -> list[dict[str, Any]]:
    """Return what so many processes measured, which began together; 0 steps: as many as the seconds take."""
    folder.mkdir()
    answers = [folder / f"{place}.json" for place in range(number)]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                processes.started(__name__, str(answer), f"{seconds}", f"{steps}", output=answer.with_suffix(".txt"))
            )
            for answer in answers
        ]
        _wait([answer.with_suffix(".ready") for answer in answers], answers, started)
        (folder / "go").touch()
        _wait(answers, answers, started)
    return [processes.read_answer(answer) for answer in answers]


def _wait(paths: list[Path], answers: list[Path], started: list[list[processes.Process]]) -> None:
    """Wait until all these files exist. Raises `ConfigError` if a process has ended without its answer."""
    until = time.monotonic() + LONGEST_S
    while not all(path.exists() for path in paths):
        for answer, (process,) in zip(answers, started, strict=True):
            if (process.poll() is not None and not answer.exists()) or time.monotonic() > until:
                why = processes.last_line(answer.with_suffix(".txt")) or f"no answer after {LONGEST_S:.0f} s"
                raise ConfigError(f"trials_per_gpu: one of {len(answers)} trainings at once failed: {why}")
        time.sleep(0.05)


def main(answer: Path, seconds: float, steps: int) -> None:
    """Measure one training once the file `go` is there."""
    from tunediff.profiling.measure import Bench, steps_in  # imports torch

    config = cfg.load(answer.parents[1] / "config.yaml")
    bench = Bench.of(config)
    steps = steps or steps_in(seconds, bench.speed(config, 3)["step_s"])
    answer.with_suffix(".ready").touch()
    while not (answer.parent / "go").exists():
        time.sleep(0.005)
    speed = bench.speed(config, steps)
    part = answer.with_suffix(".part")
    part.write_text(json.dumps(speed))
    part.replace(answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
