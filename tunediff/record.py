"""What one trial left behind: an append-only JSONL journal, and the `TrialRecord` read from it.

The journal in the experiment folder is the truth that `--resume`, the report and the export read. A line is written,
flushed and synced before anybody is told about it, so a kill at any moment loses nothing that was measured. Lines:
`start` (once per attempt), `worker` (who trains it), `about` (data and model), `anew` (it begins at its first step,
although an earlier attempt had come further), `unread` (knobs that its training never looked at),
`point` (one evaluation), `final` (one more of the finished model, at
full protocol), `end`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff import environment
from tunediff.clock import UNITS, UnitName
from tunediff.config import ConfigError, Configuration, Quantity, Values, Workload, code

STATUSES = ("ok", "pruned", "oom", "nan", "timeout", "error", "skipped")
"""How a trial ends. `pruned`: stopped early by the scheduler; `oom`: out of device or host memory; `nan`: loss or
weights not finite; `timeout`: past its deadline; `error`: anything else, with its reason; `skipped`: never run, since
another trial has shown that it would fail."""

JOURNAL, CHECKPOINT = "journal.jsonl", "checkpoint.pt"
Line = dict[str, Any]
"""A line of a journal, or a part of one."""


class NotFiniteError(ValueError):
    """A training that diverged: its loss, or what it has learned, is NaN or infinite. The status `nan`."""


# ------------------------------------------------------------------------------------------------------------- points
def _required(label: str, unit: str, meaning: str, scale: float = 1.0, **default: Any) -> Any:
    return dataclasses.field(metadata={"quantity": Quantity(label, unit, meaning, scale)}, **default)


_measured = functools.partial(_required, default=None)
"""What our own points always hold, unless its type says otherwise; a damaged or foreign journal may lack it."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One evaluation: how far a training has come, how fast it was since the one before, and what it can do.

    `point[name]`, `point.get(name)` and `name in point` look a value up by the flat name under which the journal and
    every table have it: a field, `step_<phase>_s`, or what the workload's evaluation found.
    """

    index: int
    """1, 2, …: its place on the curve."""
    train_s: float = _required("training", "s", "training seconds of the run")
    samples: int = _required("samples", "", "samples that the run trained")
    steps: int = _required("steps", "", "optimizer steps of the run")
    fraction: float = _measured("of the budget", "%", "fraction of the budget at which it lies", 100.0)
    device_s: float = _measured("device-seconds", "s", "training seconds × devices")
    samples_per_s: float = _measured("samples/s", "", "samples trained per second, without compilation")
    samples_per_s_sd: float = _measured("± samples/s", "", "standard deviation of it within the run")
    data_wait_share: float = _measured("waiting for data", "%", "share of the training time", 100.0)
    first_step_s: float = _measured("first step", "s", "the first step of the run, which compiles and loads kernels")
    peak_flops_per_s: float = _measured("peak TFLOP/s", "", "of a square matrix product, measured, all workers", 1e-12)
    cpu_share: float = _measured("CPU cores used", "", "CPU seconds of the training process per second")
    load_average: float = _measured("load average", "", "of the machine, over the last minute")
    other_load_share: float = _measured("others' load", "%", "share of the machine's cores that others used", 100.0)
    core_wait_share: float = _measured("waiting for a core", "%", "share of its running time", 100.0)
    disturbed: bool = False
    """Whether others took cores that this training wanted: its seconds are not its own alone."""
    loss: float = _measured("loss", "", "mean training loss since the evaluation before")
    peak_memory_mib: float = _measured("memory", "MiB", "most memory allocated on the device; on a CPU by the process")
    peak_host_memory_mib: float = _measured("host memory", "MiB", "most memory of the training process on the host")
    peak_reserved_mib: float | None = _measured(
        "memory reserved", "MiB", "most memory that torch's allocator held on the device before the first evaluation"
    )
    step_s: float | None = _measured("step", "ms", "one optimizer step", 1000.0)
    flops_per_sample: float | None = _measured("GFLOP/sample", "", "arithmetic of a training step per sample", 1e-9)
    peak_share: float | None = _measured(
        "of peak", "%", "share of the FLOP/s that a matrix product reaches here", 100.0
    )
    energy_j: float | None = _measured("energy", "J", "energy since the evaluation before: of the GPUs, or of the CPUs")
    energy_wh: float | None = _measured("energy", "Wh", "energy of the training: of the GPUs, or of the whole CPUs")
    price: float | None = _measured("price", "", "of the device-seconds, by that of a device-hour")
    samples_per_j: float | None = _measured("samples/J", "", "samples trained per joule")
    compiled_graphs: int | None = _measured("compiled graphs", "", "graphs that torch.compile made")
    expected_graphs: int | None = _measured("graphs expected", "", "different calls of what torch.compile compiled")
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the mean step by its parts; flat: `step_<phase>_s`."""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of the clock so far, by its parts."""
    found: Line = dataclasses.field(default_factory=dict)
    """What the workload's evaluation returned and what it noted, by name."""

    @functools.cached_property
    def flat(self) -> Line:
        """Everything by its flat name, but what is not known. Not to be changed."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in _NESTED}
        steps = {f"step_{name}_s": seconds for name, seconds in self.phases_s.items()}
        known = {name: value for name, value in own.items() if value is not None}
        return {**known, **steps, "seconds": self.seconds, **self.found}

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Point:
        """The point that `flat` came from. Raises `TypeError` if it lacks a place: index, seconds, samples, steps."""
        fields = {field.name for field in dataclasses.fields(cls)} - {"phases_s", "found"}
        own = {name: value for name, value in flat.items() if name in fields}
        rest = {name: value for name, value in flat.items() if name not in fields}
        phases = {name[5:-2]: value for name, value in rest.items() if re.fullmatch(r"step_\w+_s", name)}
        found = {name: value for name, value in rest.items() if not re.fullmatch(r"step_\w+_s", name)}
        return cls(**own, phases_s=phases, found=found)

    def get(self, name: str, default: Any = None) -> Any:
        """A value by its flat name."""
        return self.flat.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.flat[name]

    def __contains__(self, name: str) -> bool:
        return name in self.flat


_NESTED = ("phases_s", "seconds", "found")
_STEP = {
    "data_wait": ("waiting for data", "waiting for its samples"),
    "host_to_device": ("copy to device", "copying its samples to the device and scaling them"),
    "forward": ("forward", "the forward pass"),
    "backward": ("backward", "the backward pass, averaging over workers included"),
    "optimizer": ("optimizer", "unscaling, clipping and the update"),
    "other": ("other", "the rest"),
}
QUANTITIES: dict[str, Quantity] = {
    **{field.name: field.metadata["quantity"] for field in dataclasses.fields(Point) if "quantity" in field.metadata},
    **{f"step_{part}_s": Quantity(label, "ms", f"of a step: {of}", 1000.0) for part, (label, of) in _STEP.items()},
}
"""What every point holds, by name; a workload adds its own."""


def one_of(unit: str) -> str:
    """The singular of what samples are called: `image`, `query`."""
    return f"{unit[:-3]}y" if unit.endswith("ies") else unit.removesuffix("s")


def in_units(known: Mapping[str, Quantity], unit: str) -> dict[str, Quantity]:
    """The same quantities in the words of a workload: `images/s` instead of `samples/s`."""
    words = {"samples": unit, "sample": one_of(unit)}

    def said(text: str) -> str:
        return re.sub(r"\bsamples?\b", lambda found: words[found[0]], text)

    of = known.items()
    return {name: dataclasses.replace(one, label=said(one.label), meaning=said(one.meaning)) for name, one in of}


def quantities(workload: Workload) -> dict[str, Quantity]:
    """What the points of a workload hold, by name: what all have, its objective, and what it names itself."""
    own = workload.objective
    judged = {own.name: Quantity(own.label or own.name)}
    return in_units(QUANTITIES, workload.unit) | judged | dict(workload.quantities)


@dataclasses.dataclass(frozen=True)
class End:
    """How a trial ended, and what it took."""

    status: str
    """One of `STATUSES`."""
    reason: str = ""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of the worker's clock, by its parts."""
    steps: int = 0
    peak: dict[str, float] = dataclasses.field(default_factory=dict)
    """Peak memory in MiB, by the names of `Point`."""


@dataclasses.dataclass
class TrialRecord:
    """One trial as its journal tells it."""

    name: str
    """`t0007`: its place in the search."""
    number: int
    config: Values
    """Every knob by dotted name, and the workload."""
    drawn: Values
    """The knobs the search chose, by dotted name."""
    fingerprint: str
    budget_s: float | None = None
    unit: UnitName = "wall"  # what its search counts budgets in; `budget_s` are training seconds of its own
    attempts: int = 0
    points: list[Point] = dataclasses.field(default_factory=list)
    """The curve, in order."""
    end: End | None = None
    """None: unfinished."""
    environment: Line = dataclasses.field(default_factory=dict)
    not_effective: dict[str, str] = dataclasses.field(default_factory=dict)
    """Knobs that change nothing on this hardware or beside the others, with the reason."""
    started: float = 0.0
    """Unix time of the first attempt."""
    ended: float = 0.0
    heard: float = 0.0
    """Unix time of the last line of its journal."""

    @property
    def status(self) -> str | None:
        """One of `STATUSES`; None: unfinished."""
        return self.end.status if self.end is not None else None

    @property
    def reason(self) -> str:
        """Why it ended so."""
        return self.end.reason if self.end is not None else ""

    @property
    def finished(self) -> bool:
        """Whether it will not be run again."""
        return self.end is not None

    @property
    def configuration(self) -> Any:
        """What it trained. Raises `ConfigError` if that is no configuration any more."""
        return cfg.from_dict(cfg.nest(self.config), self.name, check=False)

    @property
    def along(self) -> str:
        """The quantity along which its curve is compared with others: training seconds, or device-seconds."""
        return UNITS[self.unit].along

    @property
    def effective(self) -> Values:
        """`config` with every knob that changed nothing here at one value: equal for two that trained alike.

        Of a workload that is gone, or knobs that are no configuration any more: `config` as it is.
        """
        try:
            return cfg.flat(cfg.neutral(self.configuration, self.not_effective))
        except ConfigError:
            return dict(self.config)

    def value(self, metric: str) -> float | None:
        """The metric at the budget, if the trial ended ok."""
        if self.status != "ok" or not self.points:
            return None
        value = self.points[-1].get(metric)
        return float(value) if value is not None and math.isfinite(value) else None


# ------------------------------------------------------------------------------------------------------------ journal
class Journal:
    """Appends to the journal of one trial; every line is on disk before a method returns. Raises `OSError` when the
    disk is full."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / JOURNAL

    def start(
        self, config: Configuration, drawn: Values, budget_s: float | None, number: int = 0, unit: UnitName = "wall"
    ) -> None:
        """An attempt begins; `budget_s`: training seconds of the trial itself."""
        self.write(
            "start", name=self.folder.name, number=number, config=cfg.flat(config), drawn=drawn, budget_s=budget_s,
            unit=unit, fingerprint=cfg.fingerprint(config), environment=environment.describe(), pid=os.getpid(),
        )  # fmt: skip

    def point(self, point: Point) -> bool:
        """An evaluation; False if this very measurement is there already, not merely another one of the same index."""
        told: set[tuple[int, int]] = set()
        for line in events(self.folder):
            if line["event"] == "anew":
                told.clear()
            elif line["event"] == "point":
                told.add((line["index"], line["steps"]))
        if (point.index, point.steps) in told:
            return False
        self.write("point", **point.flat)
        return True

    def anew(self) -> None:
        """The training begins at its first step: what an earlier attempt has measured is void."""
        if any(line["event"] == "point" for line in events(self.folder)):
            self.write("anew")

    def end(self, end: End) -> None:
        """The trial is over."""
        self.write("end", **dataclasses.asdict(end))

    def write(self, event: str, **content: Any) -> None:
        """Append one line."""
        line = json.dumps({"event": event, "time": time.time(), **content}, allow_nan=False, default=_plain) + "\n"
        with open(self.path, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line  # a kill tore the last line: it ends here
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} cannot be written to a journal")


def events(folder: Path) -> Iterator[Line]:
    """The lines of a trial's journal; torn lines are passed over."""
    path = folder / JOURNAL
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            yield event


def was_lost(folder: Path) -> Line | None:
    """The last line of a journal where that tells of a lost node: nobody has taken up the trial in `folder` since."""
    told = list(events(folder))
    ended = any(event["event"] == "end" for event in told)  # workers may outlive their node by seconds, and end it
    return told[-1] if told and told[-1]["event"] == "lost" and not ended else None


def read_trial(folder: Path) -> TrialRecord | None:
    """The record of the trial in `folder`; None when its journal has not begun.

    Raises `ConfigError` for whole lines that are no journal's; torn ones are passed over.
    """
    try:
        about = (folder / JOURNAL).stat()
    except OSError:
        return None
    try:
        record = _read_trial(folder, about.st_mtime_ns, about.st_size)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder / JOURNAL}: is damaged: {type(error).__name__}: {error}") from None
    return record and dataclasses.replace(record, points=list(record.points))


@functools.lru_cache(maxsize=512)  # 12 KiB each, in every process
def _read_trial(folder: Path, mtime_ns: int, size: int) -> TrialRecord | None:
    """A journal only grows: what was read at this size is read once, however often a long search is looked at."""
    record: TrialRecord | None = None
    points: dict[int, Point] = {}
    final: Line = {}
    for event in events(folder):
        kind, when = event.pop("event"), event.pop("time")
        if record is not None:
            record.heard = when
        if kind == "start":
            if record is None:
                fields = ("name", "number", "config", "drawn", "fingerprint", "budget_s")
                own, unit = {field: event[field] for field in fields}, event.get("unit", "wall")
                record = TrialRecord(**own, unit=unit, started=when, heard=when)
                record.config["workload"] = code.near(str(record.config.get("workload")), folder)
            record.environment = event.get("environment", {})
            record.attempts += 1
        elif record is None:
            continue
        elif kind == "worker":
            where = {"device": event["device"], "threads": event["threads"]}
            record.environment |= event.get("environment", {}) | where
            record.not_effective = event.get("not_effective", {})
        elif kind == "point":  # a resumed trial may measure a point again: the later line is what training went on from
            points = {index: point for index, point in points.items() if index < event["index"]}
            points[event["index"]] = Point.of(event)
        elif kind == "unread":
            record.not_effective |= dict.fromkeys(event["knobs"], "train(trial) never reads it")
        elif kind == "anew":
            points, final = {}, {}
        elif kind == "final":
            final = event
        elif kind == "end":
            record.end, record.ended = End(**event), when
    if record is not None:
        record.points = [points[index] for index in sorted(points)]
        if record.points and record.points[-1].steps == final.pop("steps", None):
            last, found = record.points[-1], {f"final_{key}": value for key, value in final.items()}
            record.points[-1] = dataclasses.replace(last, found=last.found | found)
    return record


def by_number(name: str) -> tuple[int, str]:
    """The key that sorts names of trials by their numbers: t9999 comes before t10000."""
    return len(name), name


def read_trials(experiment: Path) -> list[TrialRecord]:
    """All trials of an experiment folder, in order of their numbers."""
    folders = sorted((experiment / "trials").glob("t*"), key=lambda folder: by_number(folder.name))
    found = [(folder.name, record) for folder in folders if (record := read_trial(folder)) is not None]
    # Names become paths, so the folder's counts: a line of a foreign journal cannot point elsewhere.
    return [dataclasses.replace(record, name=name) for name, record in found]
