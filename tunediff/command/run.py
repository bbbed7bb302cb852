"""One run of a command: start it, read its metrics, end it at its budget, and say how it ended."""

from __future__ import annotations

import dataclasses
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff.command import worktrees
from tunediff.command.definition import CommandDefinition
from tunediff.command.metrics import (
    MetricFile,
    MetricPattern,
    Reading,
    Reduction,
    declared,
    value_in,
)
from tunediff.command.process import LOG, POLL_S, CommandProcess
from tunediff.core import environment, machine
from tunediff.core.outcomes import Status
from tunediff.core.point import Point
from tunediff.core.target import EVALUATIONS, TIME_TO_TARGET, Approach
from tunediff.core.trial_record import RESERVED, End

POINTS = 20
"""Points of a curve at most, at equal shares of the budget."""
GROWTH = 1.05
"""Least growth of the seconds from point to point where no budget ends the run."""


class Curve:
    """Takes every value as it comes, and gives out the points that are complete.

    With a limit its seconds have `POINTS` equal shares: the last value in a share is its point, so
    that curves of several runs have points at the same indices. Without one the points thin out
    with time. In both the last value of a run is its last point.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._pending: Point | None = None
        self._ready: list[Point] = []
        self.last_s = 0.0
        """Seconds of the last point that was complete."""
        self.latest: Point | None = None

    def resume(self, latest: Point | None, last_s: float) -> None:
        """Go on where an earlier process had this value and this last complete point."""
        self.latest, self.last_s = latest, last_s
        self._pending = latest if latest is not None and latest.train_s > last_s else None

    def add(self, point: Point) -> None:
        """Take the next value, as a point whose index and fraction are set here."""
        index, fraction = point.steps, 1.0
        if self._limit_s is not None:
            index = min(POINTS, 1 + int(point.train_s / self._limit_s * POINTS))
            fraction = index / POINTS
        if self._pending is not None and self._pending.index != index:
            self._complete()
        self._pending = self.latest = dataclasses.replace(point, index=index, fraction=fraction)

    def _complete(self) -> None:
        point, self._pending = self._pending, None
        assert point is not None
        if self._limit_s is not None or point.train_s >= GROWTH * self.last_s:
            self._ready.append(point)
            self.last_s = point.train_s

    def take(self, elapsed_s: float) -> list[Point]:
        """Return the points to whose share nothing can be added any more, each once."""
        point = self._pending
        if point is not None and self._limit_s is not None and point.index < POINTS:
            share_ends_s = point.fraction * self._limit_s
            if elapsed_s >= share_ends_s:
                self._complete()
        ready, self._ready = self._ready, []
        return ready

    def last(self) -> Point | None:
        """Return the last value as the point at the end of the run; None: there was no value."""
        if self.latest is None or self._limit_s is None:
            return self.latest
        return dataclasses.replace(self.latest, index=POINTS, fraction=1.0)


OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "Cannot allocate memory", "MemoryError")


@dataclasses.dataclass(frozen=True)
class State:
    """What is known of a run at a checkpoint, and what another process needs to go on."""

    train_s: float = 0.0
    values: int = 0
    """How many values there were."""
    reduced: Sequence[str] = ()
    """Those that the reduction still needs; NaN among them is no number of JSON."""
    point: Mapping[str, Any] | None = None
    """The last value as a point; None: there was no finite one."""
    curve_s: float = 0.0
    """Seconds of the last point of the curve before it."""
    position: int = 0
    """Characters of the file of metrics that were read."""
    started: bool = False
    """Whether the clock began at a line."""
    pauses: bool = False
    unit: str | None = None
    """What the values are printed in; None: there was no value."""
    split: str | None = None
    """The word before the name of the metric; see `metrics.SPLIT`."""
    approach: Mapping[str, Any] | None = None
    """See `Approach.state`; None: there is no target."""


@dataclasses.dataclass(frozen=True)
class CommandRun:
    """What one run needs; `folder` is its own, and stays with its results."""

    definition: CommandDefinition
    values: Mapping[str, Any]
    """Parameters by name."""
    seed: int
    folder: Path
    budget_s: float | None
    devices: Sequence[str] = ()
    """GPUs that it sees, as `CUDA_VISIBLE_DEVICES` names them; none: what the environment says."""
    threads: int | None = None
    enough: int | None = None
    """How many values are enough, as for a check; None: no number of them ends the run."""
    timeout_s: float | None = None
    """Seconds of the process after which it has failed; None: no limit."""
    cache: Path | None = None
    """Folder of compiled code that it shares with other runs; None: it has an empty one."""
    resumed: State | None = None
    """What was known at the checkpoint that it goes on from; None: it begins anew."""

    @property
    def limit_s(self) -> float | None:
        """Return the seconds after which the judge ends it; None: it runs to its own end."""
        return None if self.definition.outcome == "final" else self.budget_s

    def argv(self, port: int) -> list[str]:
        """Return the command line of this run."""
        places = {
            "seed": self.seed,
            "folder": self.folder,
            "port": port,
            "gpus": len(self.devices) or None,
            "budget_s": self.budget_s,
        }
        known = {name: value for name, value in places.items() if value is not None}
        return self.definition.template.render(self.values, known)

    def environment(self, port: int) -> dict[str, str]:
        """Return the environment of this run."""
        cache = self.cache or self.folder / "cache"
        added: dict[str, Any] = {
            **worktrees.environment(self.folder),
            "TUNEDIFF_SEED": self.seed,
            "TUNEDIFF_FOLDER": self.folder,
            "TUNEDIFF_BUDGET_S": self.budget_s,
            "TUNEDIFF_RESUME": int(self.resumed is not None),
            "MASTER_PORT": port,
            "PYTHONUNBUFFERED": 1,  # a process that is killed would lose its last lines
            # equally cold for every run, or equally warm: else it would favour what comes later
            "TORCHINDUCTOR_CACHE_DIR": cache / "inductor",
            "TRITON_CACHE_DIR": cache / "triton",
        }
        if self.threads is not None:
            added |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), self.threads)
        if self.devices:
            added[machine.VISIBLE] = ",".join(self.devices)
        added = {name: str(value) for name, value in added.items() if value is not None}
        return environment.of_user() | added


CHECKPOINT, CLOCK = "checkpoint", "clock"
"""Events of a command's journal: a line `CHECKPOINT path`, with what is known there, or a line
`ARTIFACT path`; and once, before the end, which seconds counted, and the unit of the values."""
Note = Callable[..., None]
"""Takes the name of such an event and its content."""


def _unnoted(event: str, **content: Any) -> None:
    """Take no note."""


class RunReader:
    """Reads the lines of a run, and the file of its metrics; knows nothing of processes."""

    def __init__(self, run: CommandRun, begun: float, note: Note = _unnoted) -> None:
        """`begun`: when the process was started, on a monotonic clock; `note`: see `execute`."""
        definition, state = run.definition, run.resumed or State()
        self.run, self.clock, self.curve = run, definition.clock(begun), Curve(run.limit_s)
        self.clock.resumed_s, self.clock.pauses = state.train_s, state.pauses
        self.clock.waits = state.started
        self._pattern = MetricPattern(definition.objective, definition.pattern, "pattern")
        self._reduction = Reduction(definition.reduce, "reduce")
        self._reduction.values.extend(map(float, state.reduced))
        self._reduction.skipped *= not state.values
        self._target, self._approach = definition.condition, None
        if self._target is not None:
            # Values that the user has reduced are means already, or meant as they are
            count = EVALUATIONS if definition.reduce == "last" else 1
            self._approach = Approach(self._target, count, **(state.approach or {}))
        self._file: MetricFile | None = None
        if definition.metrics is not None:
            path = Path(definition.folder) / definition.metrics.format(folder=run.folder)
            self._file = MetricFile(path, state.position, run.folder)
        self._note = note
        self.unit, self.split = state.unit, state.split
        self.fault = ""
        """Why its values cannot be read."""
        self.values, self.value = state.values, self._reduction.value
        """How many values there were, and the one that counts so far."""
        self.first_at: float | None = None
        self.target_met = False
        self.out_of_memory = False
        self.curve.resume(None if state.point is None else Point.of(state.point), state.curve_s)
        metrics = self.curve.latest.metrics if self.curve.latest is not None else {}
        self._others = {k: v for k, v in metrics.items() if k != self._pattern.name}

    def _state(self, now: float) -> State:
        """Return what another process needs to go on from here."""
        self.read_file(now)
        latest, approach = self.curve.latest, self._approach
        return State(
            train_s=self.clock.elapsed_s(now),
            values=self.values,
            reduced=[*map(str, self._reduction.values)],
            point=None if latest is None else latest.flat,
            curve_s=self.curve.last_s,
            position=0 if self._file is None else self._file.position,
            started=self.clock.waits or self.clock.started is not None,
            pauses=self.clock.pauses,
            unit=self.unit,
            split=self.split,
            approach=None if approach is None else approach.state,
        )

    def read(self, line: str, now: float) -> None:
        """Take note of a line."""
        self.clock.read(line, now)
        word, _, path = line.strip().partition(" ")
        # One behind the value that ends the run would be of a run that goes on
        if path and (word == "ARTIFACT" or (word == "CHECKPOINT" and not self.is_enough)):
            state = dataclasses.asdict(self._state(now)) if word == "CHECKPOINT" else None
            self._note(CHECKPOINT, path=path.strip(), state=state)
        self.out_of_memory |= any(sign in line for sign in OUT_OF_MEMORY)
        values = declared(line)
        self._others |= {
            name: value
            for name, value in values.items()
            if name not in RESERVED and math.isfinite(value)
        }
        name = self._pattern.name
        reading = Reading(values[name]) if name in values else None
        # most lines have no metric: looking for a word is faster than for a pattern
        searched = self.run.definition.pattern is not None or name in line
        if reading is None and self._file is None and searched:
            reading = self._pattern.read(line)
        self.fault = self.fault or self.clock.fault or (self._unclear(reading) if reading else "")
        if reading is not None and not self.fault:
            self._add(reading.value, now)

    def _unclear(self, reading: Reading) -> str:
        """Return why a value cannot be compared with those before; '': it can."""
        name, unit = self._pattern.name, reading.unit
        if reading.unclear:
            return (
                f"{name}: {reading.unclear!r} is no clear number; allowed: such as 1234.5, 1,234.5"
            )
        self.unit = unit if self.unit is None else self.unit
        if self.unit != unit:
            return f"{name}: its unit changes from {self.unit or 'none'} to {unit or 'none'}"
        self.split = reading.split if self.split is None else self.split
        if self.split != reading.split:
            names = [f"{split} {name}".strip() for split in (self.split, reading.split)]
            return f"{name}: is printed as {names[0]} and as {names[1]}; allowed: one of them"
        return ""

    def read_file(self, now: float) -> None:
        """Take note of what is new in the file of metrics."""
        for record in self._file.rows() if self._file is not None else ():
            value = value_in(record, self._pattern.name)
            self.clock.read_record(record, value is not None)
            self.fault = self.fault or self.clock.fault
            if value is not None:
                self._add(value, now)

    def _add(self, value: float, now: float) -> None:
        if self.clock.waits:  # it was resumed, and trains
            self.clock.start(now)
        seconds = self.clock.elapsed_s(now)
        if self.is_enough or seconds > (self.run.limit_s or math.inf):
            return
        if self._reduction.skipped:
            self._reduction.skipped -= 1
            return
        self.values += 1
        self.first_at = self.first_at or now
        self.value = self._reduction.add(value)
        if not math.isfinite(self.value):  # points hold finite numbers; the end says it
            return
        metrics = {**self._others, self._pattern.name: self.value}
        if self._approach is not None and self._target is not None:
            met_s = self._approach.add(seconds, metrics.get(self._target.metric, math.nan))
            self.target_met = met_s is not None
            if met_s is not None:
                metrics[TIME_TO_TARGET] = met_s
        self.curve.add(
            Point(
                index=0,
                train_s=seconds,
                samples=self.values,
                steps=self.values,
                device_s=seconds * max(1, len(self.run.devices)),
                samples_per_s=self.values / seconds if seconds > 0 else 0.0,
                before_first_batch_s=self.clock.start_up_s(now),
                metrics=metrics,
            )
        )

    def end_target(self) -> None:
        """Let the last value count towards the target, however soon it came after another."""
        met_s = None if self._approach is None or self.target_met else self._approach.end()
        if met_s is not None and (latest := self.curve.latest) is not None:
            self.target_met = True
            metrics = {**latest.metrics, TIME_TO_TARGET: met_s}
            self.curve.latest = dataclasses.replace(latest, metrics=metrics)

    @property
    def is_enough(self) -> bool:
        """Return whether further values do not count."""
        return self.target_met or self.values >= (self.run.enough or math.inf)

    def end(self, now: float) -> None:
        """Note which seconds counted, all of the process, and those before the clock, or else the
        first value."""
        clock, process_s = self.clock, now - self.clock.begun
        if (before_s := clock.start_up_s(now)) is None:
            before_s = (self.first_at or now) - clock.begun
        self._note(CLOCK, kind=clock.kind, process_s=process_s, start_up_s=before_s, unit=self.unit)


def execute(
    run: CommandRun,
    stopped: Callable[[], bool] = lambda: False,
    note: Note = _unnoted,
) -> Iterator[Point | End]:
    """Run a command; yield its points, and at last its end.

    Nothing of it runs any more then, nor when the iterator is closed, before which the program gets
    its grace. `stopped`: asked several times a second whether to end the run now (`pruned`).
    """
    definition = run.definition
    run.folder.mkdir(parents=True, exist_ok=True)
    argv = run.argv(port := free_port())
    # Before the program may write its file of metrics: what is there then is not its own
    reader = RunReader(run, time.monotonic(), note)
    try:
        process = CommandProcess(argv, run.folder, Path(definition.folder), run.environment(port))
    except OSError as error:
        yield End(Status.ERROR, f"{error.strerror or error}: {error.filename or argv[0]}")
        return
    reader.clock.begun = process.begun
    ending: str | None = None
    signalled_at = 0.0
    try:
        for now, line in process.lines():
            if ending is not None:  # what is printed after the budget does not count
                if now - signalled_at >= definition.grace:
                    process.signal(signal.SIGKILL)
                continue
            if line is not None:
                reader.read(line, now)
            elif (ending := _ending(reader, now, stopped())) is not None:
                signalled_at = now
                process.signal(signal.SIGTERM)
            yield from reader.curve.take(reader.clock.elapsed_s(now))
            left_s = reader.clock.remaining_s(run.limit_s or math.inf, now)
            process.wait_s = left_s if left_s > 0 and ending is None else POLL_S
        ended = signalled_at or time.monotonic()
    finally:
        # A program that was interrupted may have saved its work
        code = process.finish(definition.grace if ending is None else 0.0, reader.read)
    worktrees.refuse_others(run.folder, Path(definition.folder))
    if ending is None:
        reader.read_file(ended)
        reader.end_target()
    yield from reader.curve.take(reader.clock.elapsed_s(ended))
    if (point := reader.curve.last()) is not None:
        yield point
    reader.end(ended)
    yield _end(reader, process, ending, code, ended)


def _ending(reader: RunReader, now: float, stopped: bool) -> str | None:
    """Return why the run is to end now; None: it goes on."""
    reader.read_file(now)
    if stopped:
        return "pruned"
    if reader.fault:
        return "fault"
    if reader.is_enough:
        return "enough"
    if (limit_s := reader.run.limit_s) is not None and reader.clock.reached(limit_s, now):
        return "budget"
    if now - reader.clock.begun >= (reader.run.timeout_s or math.inf):
        return "timeout"
    return None


def _end(
    reader: RunReader, process: CommandProcess, ending: str | None, code: int, now: float
) -> End:
    """Return how a run ended: that it printed no value is a failure, never a value."""
    definition, log = reader.run.definition, reader.run.folder / LOG
    status, reason = Status.OK, ""
    if ending == "pruned":
        status = Status.PRUNED
    elif reader.fault:
        status, reason = Status.ERROR, reader.fault
    elif ending == "timeout":
        status = Status.TIMEOUT
        reason = f"it had not ended after {reader.run.timeout_s:.0f} s; allowed: a longer --timeout"
        reason += _last_lines(process)
    elif ending is None and code != 0:
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        reason = f"{how}: {process.failure or ' / '.join(process.latest) or f'see {log}'}"
        status = Status.OOM if reader.out_of_memory else Status.ERROR
    elif reader.values == 0:
        named = f"{MetricPattern.named_in(log, definition.objective)}; allowed: another objective"
        where = definition.metrics or f"what it printed ({log}){named}, or --pattern"
        if ending == "budget":
            where += f", or more than the {reader.run.limit_s:g} s after which it was ended"
        reason = f"no value of {definition.objective} in {where}{_last_lines(process)}"
        status = Status.ERROR
    elif (target := definition.condition) and not reader.is_enough:
        within = f" within {reader.run.limit_s:g} s (--budget)" if ending == "budget" else ""
        status, reason = Status.MISSED, target.missed + within
    elif not math.isfinite(reader.value):
        status, reason = Status.NAN, f"{definition.objective} is {reader.value}"
    trained_s = reader.clock.elapsed_s(now)
    seconds = {"setup": max(0.0, now - process.begun - trained_s), "train": trained_s}
    return End(status, reason, seconds, reader.values)


def _last_lines(process: CommandProcess) -> str:
    lines = "".join(f"\n  {line}" for line in process.latest)
    return f"; its last lines:{lines}" if lines else ""


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
