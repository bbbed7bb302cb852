"""One run of a command: start it, read its metrics, end it at its budget, and say how it ended."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff.command.clock import CommandClock
from tunediff.command.definition import TIME_TO_TARGET, CommandDefinition, Target, places
from tunediff.command.metrics import MetricFile, MetricPattern, Reduction, declared, value_in
from tunediff.command.process import LOG, CommandProcess
from tunediff.core.point import Point
from tunediff.core.trial_record import RESERVED, End

POINTS = 20
"""Points of a curve at most, at equal shares of the budget."""
GROWTH = 1.05
"""Least growth of the seconds from point to point where there is no budget."""
OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "Cannot allocate memory", "MemoryError")


@dataclasses.dataclass(frozen=True)
class CommandRun:
    """What one run needs; `folder` is its own, and stays with its results."""

    definition: CommandDefinition
    values: Mapping[str, Any]
    """Parameters by name."""
    seed: int
    folder: Path
    budget_s: float | None
    """None: it runs to its own end."""
    steps: int | None = None
    devices: Sequence[int] | None = None
    """GPUs that it may use; None: what the environment says."""
    threads: int | None = None
    stop_at_first: bool = False
    """Whether the first value is enough: for a check."""

    def argv(self, port: int) -> list[str]:
        """Return the command line of this run."""
        gpus = self.definition.gpus or None
        known = places(self.folder, self.seed, port, self.budget_s, steps=self.steps, gpus=gpus)
        return self.definition.template.render(self.values, known)

    def environment(self, port: int) -> dict[str, str]:
        """Return the environment of this run."""
        cache = self.folder / "cache"
        mine = {
            "TUNEDIFF_SEED": self.seed, "TUNEDIFF_FOLDER": self.folder, "TUNEDIFF_BUDGET_S": self.budget_s,
            "TUNEDIFF_RESUME": 0, "MASTER_PORT": port, "PYTHONUNBUFFERED": 1,
            "TORCHINDUCTOR_CACHE_DIR": cache / "inductor", "TRITON_CACHE_DIR": cache / "triton",
        }  # fmt: skip
        if self.threads is not None:
            mine |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), self.threads)
        if self.devices is not None:
            mine["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.devices))
        return os.environ | {name: str(value) for name, value in mine.items() if value is not None}


class RunFollower:
    """Turns lines of a run into points of its curve; knows nothing of processes."""

    def __init__(self, run: CommandRun, clock: CommandClock) -> None:
        definition = run.definition
        self.run, self.clock = run, clock
        self._pattern = MetricPattern(definition.objective, definition.pattern, "pattern")
        self._reduction = Reduction(definition.reduce, "reduce")
        self._target = Target.of(definition.target, "target") if definition.target else None
        self._file = (
            MetricFile(Path(definition.metrics.format(folder=run.folder)))
            if definition.metrics
            else None
        )
        self.values = 0
        """Values of the objective so far."""
        self.first_s: float | None = None
        """Seconds after the start at which the first one came."""
        self.target_met = False
        self.artifacts: list[str] = []
        self.out_of_memory = False
        self._others: dict[str, float] = {}
        self._pending: Point | None = None
        self._latest: Point | None = None
        self._thinned: Point | None = None
        self._ready: list[Point] = []
        self._emitted_s = 0.0

    def read(self, line: str, now: float) -> None:
        """Take note of a line."""
        self.clock.read(line, now)
        name, _, path = line.strip().partition(" ")
        if name in ("ARTIFACT", "CHECKPOINT") and path:
            self.artifacts.append(path)
        if any(sign in line for sign in OUT_OF_MEMORY):
            self.out_of_memory = True
        others = declared(line)
        self._others |= {key: value for key, value in others.items() if _free(key)}
        value = others.get(self.run.definition.objective)
        if value is None and (
            self.run.definition.pattern is not None or self._pattern.name in line
        ):
            value = self._pattern.find(line) if self._file is None else None
        if value is not None:
            self._take(value, now)

    def read_file(self, now: float) -> None:
        """Take note of what is new in the file of metrics."""
        for record in self._file.rows() if self._file is not None else ():
            if (value := value_in(record, self.run.definition.objective)) is not None:
                self._take(value, now)

    def _take(self, value: float, now: float) -> None:
        seconds = self.clock.elapsed_s(now)
        if self.run.budget_s is not None and seconds > self.run.budget_s:
            return
        self.values += 1
        if self.first_s is None:
            self.first_s = now - self.clock.begun
        reduced = self._reduction.add(value)
        metrics = {**self._others, self.run.definition.objective: reduced}
        if self._target is not None and not self.target_met and self._target.met(reduced):
            self.target_met = True
            metrics[TIME_TO_TARGET] = seconds
        index, fraction = self._bin(seconds)
        if self._pending is not None and self._pending.index != index:
            self._complete()
        self._thinned = None
        self._pending = self._latest = Point(
            index=index, train_s=seconds, samples=self.values, steps=self.values,
            fraction=fraction, device_s=seconds * max(1, self.run.definition.gpus),
            before_first_batch_s=self.clock.start_up_s(now), metrics=metrics,
        )  # fmt: skip

    def _bin(self, seconds: float) -> tuple[int, float]:
        if self.run.budget_s is None:
            return self.values, 1.0
        index = min(POINTS, 1 + int(seconds / self.run.budget_s * POINTS))
        return index, index / POINTS

    def _complete(self) -> None:
        """Put the pending point on the curve: nothing later can belong to its share of the budget."""
        point, self._pending = self._pending, None
        assert point is not None
        if self.run.budget_s is not None or point.train_s >= GROWTH * self._emitted_s:
            self._ready.append(point)
            self._emitted_s = point.train_s
        else:
            self._thinned = point

    def points(self, now: float) -> list[Point]:
        """Return the points that are complete by now, each once."""
        point, budget_s = self._pending, self.run.budget_s
        if point is not None and (
            budget_s is None
            or (point.index < POINTS and self.clock.elapsed_s(now) >= point.fraction * budget_s)
        ):
            self._complete()
        ready, self._ready = self._ready, []
        return ready

    def last_point(self) -> Point | None:
        """Return the last value as the point at the whole of the budget; None: it is out already."""
        if self.run.budget_s is None:
            return self._pending or self._thinned
        last = self._pending or self._latest
        return last and dataclasses.replace(last, index=POINTS, fraction=1.0)

    @property
    def value(self) -> float:
        """Return the value that counts so far; NaN without one."""
        return math.nan if self._latest is None else float(self._latest[self._pattern.name])


def _free(name: str) -> bool:
    return name not in RESERVED


def execute(run: CommandRun, stopped: Callable[[], bool] = lambda: False) -> Iterator[Point | End]:
    """Run a command; yield its points, and at last its end. Nothing of it is left then.

    `stopped`: asked several times a second whether to end the run now (`pruned`).
    """
    definition = run.definition
    run.folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    try:
        process = CommandProcess(
            run.argv(port), run.folder, Path(definition.folder), run.environment(port)
        )
    except OSError as error:
        yield End("error", f"{error.strerror or error}: {error.filename or run.argv(port)[0]}")
        return
    clock = definition.clock(process.begun)
    follower = RunFollower(run, clock)
    ending: str | None = None
    signalled_at, code = 0.0, 0
    try:
        for now, line in process.lines():
            if ending is not None:  # what is printed after the budget does not count
                if now - signalled_at >= definition.grace_s:
                    process.signal(signal.SIGKILL)
                continue
            if line is not None:
                follower.read(line, now)
            elif (ending := _over(run, follower, now, stopped)) is not None:
                signalled_at = now
                process.signal(signal.SIGTERM)
            yield from follower.points(now)
            if run.budget_s is not None:
                process.wait_s = clock.remaining_s(run.budget_s, now)
        ended = time.monotonic()
    finally:
        code = process.finish()
    if ending is None:
        follower.read_file(ended)
    if (point := follower.last_point()) is not None:
        yield point
    yield _end(run, follower, process, ending, code, signalled_at or ended)


def _over(
    run: CommandRun, follower: RunFollower, now: float, stopped: Callable[[], bool]
) -> str | None:
    """Return why the run is to end now; None: it goes on."""
    follower.read_file(now)
    if stopped():
        return "pruned"
    if follower.target_met or (run.stop_at_first and follower.values):
        return "enough"
    if run.budget_s is not None and follower.clock.reached(run.budget_s, now):
        return "budget"
    return None


def _end(
    run: CommandRun,
    follower: RunFollower,
    process: CommandProcess,
    ending: str | None,
    code: int,
    now: float,
) -> End:
    clock = follower.clock
    seconds = {"process": now - clock.begun, "training": clock.elapsed_s(now)}
    if (start_up_s := clock.start_up_s(now)) is not None:
        seconds["start_up"] = start_up_s

    def end(status: str, reason: str = "") -> End:
        return End(status, reason, seconds, follower.values)

    if ending == "pruned":
        return end("pruned", "stopped early")
    if ending is None and code != 0:
        tail = "\n".join(process.errors)
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        status = "oom" if follower.out_of_memory or "out of memory" in tail.lower() else "error"
        return end(status, f"{how}: {tail or f'see {run.folder / LOG}'}")
    if follower.values == 0:
        where = f"no value of {run.definition.objective} in what it printed ({run.folder / LOG})"
        if run.definition.metrics is not None:
            where = f"no value of {run.definition.objective} in {run.definition.metrics}"
        return end("error", where)
    if run.definition.outcome == "time" and not follower.target_met:
        return end("error", f"the target {run.definition.target} was not reached")
    value = follower.last_point()
    if value is not None and not math.isfinite(value.metrics[run.definition.objective]):
        return end(
            "nan", f"{run.definition.objective} is {value.metrics[run.definition.objective]}"
        )
    return end("ok")


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
