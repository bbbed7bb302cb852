"""What failures teach: a configuration that needs at least as much memory as one that ran out will run out too."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunediff import config as cfg
from tunediff.config import Values
from tunediff.core.record import End, TrialRecord

UNKNOWN = 1e9
"""Worse than any objective is likely to be: of a perplexity, thousands are a result."""
_BYTES = {"none": 4, "bf16": 2, "fp16": 2}
"""Of an activation, by `precision.amp`."""
_MEMORY_FREE = (
    *("seed", "loader.batch_size", "loader.accumulation", "loader.workers", "loader.prefetch_factor"),
    *("loader.persistent_workers", "loader.pin_memory", "loader.non_blocking", "loader.transfer", "loader.resident"),
    *(
        "precision.amp",
        "precision.matmul",
        "precision.conv_tf32",
        "parallel.workers",
        "parallel.bucket_mib",
        "parallel.gradients",
        "evaluation.",
    ),
)
"""Knobs of every workload that are compared below, or that change no more than a few MiB of device memory. A workload
names its own; a name that ends in a dot stands for a section."""


def samples_at_once(config: Mapping[str, Any]) -> int:
    """Samples of one forward pass on one worker."""
    return int(config["loader.batch_size"]) // (int(config["loader.accumulation"]) * int(config["parallel.workers"]))


def needs_at_least(config: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `config` certainly needs as much device memory as `other` on each worker; both by dotted knob names.

    A partial order: as many samples at once, of as many bytes, with nothing more in the lists of what saves memory,
    with the data set on the device if the other has it there; everything else that matters must be equal.
    """
    if config["workload"] != other["workload"] or samples_at_once(config) < samples_at_once(other):
        return False
    if _BYTES[config["precision.amp"]] < _BYTES[other["precision.amp"]]:
        return False
    own = cfg.find(config["workload"]).declared
    saving = getattr(own, "MEMORY_SAVING", ())
    if any(not set(config[name]) <= set(other[name]) for name in saving if name in config and name in other):
        return False
    if other["loader.resident"] and not config["loader.resident"]:
        return False
    more = config["parallel.workers"] - other["parallel.workers"]  # gradient buckets; on a CPU all share one memory
    if more < 0 or (more > 0 and config.get("parallel.strategy", "ddp") != "ddp"):  # others divide the model
        return False

    free = (*_MEMORY_FREE, *saving, *getattr(own, "MEMORY_FREE", ()))
    sections = tuple(name for name in free if name.endswith("."))

    def rest(config: Mapping[str, Any]) -> Values:
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in config.items()
            if name not in free and not name.startswith(sections)
        }

    return rest(config) == rest(other)


def predicted_mib(config: Mapping[str, Any], records: Iterable[TrialRecord]) -> float | None:
    """Peak device memory (MiB) it would need, from trials that differ in batch and precision only; None: no such trial.

    Activations grow with samples at once times bytes; what remains at no samples is the least that was seen to fit. An
    estimate for people: nothing is ruled out by it.
    """
    measured: list[tuple[float, float]] = []
    for record in records:
        if not record.points or not math.isfinite(record.points[-1].peak_memory_mib or math.nan):
            continue
        alike, mine = ({**knobs, "loader.batch_size": 1, "loader.accumulation": 1} for knobs in (record.config, config))
        for knobs in (alike, mine):
            knobs["precision.amp"] = "none"
            if knobs.get("parallel.strategy", "ddp") == "ddp":
                knobs["parallel.workers"] = 1  # each has the whole model
        if needs_at_least(alike, mine) and needs_at_least(mine, alike):
            size = samples_at_once(record.config) * _BYTES[record.config["precision.amp"]]
            measured.append((float(size), record.points[-1].peak_memory_mib))
    if not measured:
        return None
    size = samples_at_once(config) * _BYTES[config["precision.amp"]]
    (small, low), (large, high) = min(measured), max(measured)
    if large == small:
        return high * max(1.0, size / large)
    slope = max(0.0, (high - low) / (large - small))
    return high + slope * (size - large)


def used(trial: TrialRecord, cost: str) -> list[float]:
    """What a trial is known to have used of a cost (`space.cost`), however it ended; empty: nothing is known."""
    end = trial.end or End("error")
    seconds = sum(end.seconds.get(part, 0.0) for part in ("train", "data_wait"))
    values = [point.get(cost) for point in trial.points] + [end.peak.get(cost)]
    values += [seconds * int(trial.config["parallel.workers"])] if cost == "device_s" else []
    return [float(value) for value in values if value is not None and 0 < value < math.inf]


def smaller_oom_trial(config: Mapping[str, Any], records: Iterable[TrialRecord]) -> TrialRecord | None:
    """A trial that ran out of memory by its own needs and needed no more than `config` does; None: there is none."""
    return next((trial for trial in records if teaches_memory(trial) and needs_at_least(config, trial.config)), None)


def teaches_memory(record: TrialRecord) -> bool:
    """Whether a trial ran out of memory by its own needs, and not because other processes held it."""
    return record.end is not None and record.end.status == "oom" and not record.end.crowded_out


def ruled_out(config: Mapping[str, Any], records: Iterable[TrialRecord]) -> str:
    """Why there is no point in running `config`, given the trials so far; empty: there may be."""
    records = list(records)
    if (trial := smaller_oom_trial(config, records)) is None:
        return ""
    estimate_mib, unit = predicted_mib(config, records), cfg.find(config["workload"]).unit
    words = f", about {estimate_mib:,.0f} MiB" if estimate_mib is not None else ""
    return (
        f"not run: {samples_at_once(config)} {unit} at once in {config['precision.amp']} precision need at "
        f"least as much memory{words} as {trial.name}, which ran out of it"
    )


def penalty(results: Sequence[float], mode: str) -> float:
    """What a failure is told as: as bad as the worst result and then some, and finite; without any, `UNKNOWN`."""
    sign = 1.0 if mode == "min" else -1.0
    worst = max(sign * value for value in results) if results else UNKNOWN
    return sign * min(worst + (abs(worst) or 1.0), sys.float_info.max)
