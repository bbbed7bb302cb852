"""Configurations that a search does not run: evaluated before, or certain to run out of memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Systems, Values
from tunediff.core.outcomes import Status
from tunediff.core.trial_record import End, TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.search_space.dimension import combinations

LISTED = 500
"""Points of a space that are looked at one by one to know when it is used up: a second."""


class EvaluatedConfigurations:
    """The configurations that were tried, and by which trial.

    Two that differ in knobs without effect here train equally, as `_identity` says.
    """

    def __init__(self, space: SearchSpace, device: str, records: Iterable[TrialRecord]) -> None:
        """`device`: "cpu" or "cuda", what trials train on; `records`: of the trials so far; one
        that failed for a reason outside of it tried nothing.
        """
        self._space, self._device = space, device
        self._exact: dict[str, str] = {}
        """Names of trials by the fingerprints of their configurations."""
        self._equivalent: dict[str, str] = {}
        """Names of trials by `_identity`."""
        for trial in records:
            if trial.external_cause:
                continue
            self._exact[trial.fingerprint] = trial.name
            with contextlib.suppress(ConfigError):  # of a workload that has changed since
                self._equivalent.setdefault(self._identity(cfg.configuration_of(trial)), trial.name)
                self.note_refusal(trial)

    def note_refusal(self, trial: TrialRecord) -> None:
        """Remember the configuration as which a trial trained whose steps could not be captured."""
        if "compile.capture" in trial.not_effective:
            eager = cfg.neutral(cfg.configuration_of(trial), ["compile.capture"])
            self._equivalent.setdefault(self._identity(eager), trial.name)

    def add(self, config: Systems, name: str) -> None:
        """Remember that a configuration was tried, and by which trial."""
        self._exact.setdefault(cfg.fingerprint(config), name)
        self._equivalent.setdefault(self._identity(config), name)

    def exact(self, config: Systems) -> str | None:
        """Return the trial of this very configuration; None: there is none."""
        return self._exact.get(cfg.fingerprint(config))

    def equivalent(self, config: Systems) -> str | None:
        """Return a trial that trains equally; None: there is none."""
        return self._equivalent.get(self._identity(config))

    def used_up(self) -> bool:
        """Return whether all points, or their equivalents, were run. False for a large space."""
        if self._identities is None or not self._identities <= self._equivalent.keys():
            return False
        return all(
            self.exact(self._space.config(point)) is not None for point in self._space.candidates
        )

    def _identity(self, config: Systems) -> str:
        """Return a fingerprint that is equal for configurations that train equally here."""
        return cfg.fingerprint(cfg.effective(config, self._device))

    @functools.cached_property
    def _identities(self) -> set[str] | None:
        """Return the `_identity` of all points of a small space of choices, or None."""
        dimensions, identities = self._space.dimensions, set()
        if any(dimension.choices is None for dimension in dimensions):
            return None
        points = list(itertools.islice(combinations(dimensions, {}), LISTED + 1))
        if len(points) > LISTED:
            return None
        for point in points:
            with contextlib.suppress(ConfigError):  # knobs that contradict each other
                identities.add(self._identity(self._space.config(point)))
        return identities


UNKNOWN = 1e9
"""Penalty without any result: worse than most objectives (perplexities reach thousands)."""
_BYTES = {"none": 4, "bf16": 2, "fp16": 2}
"""Bytes of an activation, by `precision.amp`."""
_MEMORY_FREE = (
    *(
        "seed",
        "loader.batch_size",
        "loader.accumulation",
        "loader.workers",
        "loader.prefetch_factor",
    ),
    *(
        "loader.persistent_workers",
        "loader.pin_memory",
        "loader.non_blocking",
        "loader.transfer",
        "loader.resident",
    ),
    *("precision.amp", "precision.matmul", "precision.conv_tf32"),
    *("parallel.workers", "parallel.bucket_mib", "parallel.gradients", "evaluation."),
)
"""Knobs of every workload that `needs_at_least` compares by itself, or that change no more than a
few MiB of device memory. Workloads name theirs; a dot at the end: a section."""


def samples_at_once(config: Mapping[str, Any]) -> int:
    """Return the samples of one forward pass on one worker."""
    return int(config["loader.batch_size"]) // (
        int(config["loader.accumulation"]) * int(config["parallel.workers"])
    )


def _known_knobs_need_at_least(
    config: Mapping[str, Any], other: Mapping[str, Any], saving: Iterable[str]
) -> bool:
    """Return `needs_at_least` for the knobs whose effect on memory has a known direction.

    `saving`: lists that save memory with everything more that is in them.
    """
    if samples_at_once(config) < samples_at_once(other):
        return False
    if _BYTES[config["precision.amp"]] < _BYTES[other["precision.amp"]]:
        return False
    lists = [name for name in saving if name in config and name in other]
    if any(not set(config[name]) <= set(other[name]) for name in lists):
        return False
    if other["loader.resident"] and not config["loader.resident"]:
        return False
    # More workers need gradient buckets (on a CPU in one memory); all but ddp divide the model.
    more: int = config["parallel.workers"] - other["parallel.workers"]
    return more == 0 or (more > 0 and config.get("parallel.strategy", "ddp") == "ddp")


def needs_at_least(config: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether `config` certainly needs as much device memory as `other` on each worker.

    Both are by dotted knob names. A partial order: at least as many samples at once, of at least as
    many bytes, with no memory-saving option that the other lacks, with the data set on the device
    if the other has it there; all other knobs that matter must be equal.
    """
    if config["workload"] != other["workload"]:
        return False
    if cfg.is_command(str(config["workload"])):  # what its parameters mean is not known
        return {**config, "seed": 0} == {**other, "seed": 0}
    declared = cfg.find(config["workload"]).declared
    saving = getattr(declared, "MEMORY_SAVING", ())
    if not _known_knobs_need_at_least(config, other, saving):
        return False
    free = (*_MEMORY_FREE, *saving, *getattr(declared, "MEMORY_FREE", ()))
    sections = tuple(name for name in free if name.endswith("."))

    def rest(config: Mapping[str, Any]) -> Values:
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in config.items()
            if name not in free and not name.startswith(sections)
        }

    return rest(config) == rest(other)


def used(trial: TrialRecord, cost: str) -> list[float]:
    """Return a trial's recorded uses of a cost (`space.cost`); empty: none."""
    end = trial.end or End(Status.ERROR)
    seconds = sum(end.seconds.get(part, 0.0) for part in ("train", "data_wait"))
    values = [point.get(cost) for point in trial.points] + [end.peak.get(cost)]
    values += [seconds * int(trial.config["parallel.workers"])] if cost == "device_s" else []
    return [float(value) for value in values if value is not None and 0 < value < math.inf]


def smaller_oom_trial(
    config: Mapping[str, Any], records: Iterable[TrialRecord]
) -> TrialRecord | None:
    """Return a trial that ran out of memory and needed no more than `config`; or None."""
    return next(
        (
            trial
            for trial in records
            if trial.status == Status.OOM and needs_at_least(config, trial.config)
        ),
        None,
    )


def ruled_out(config: Mapping[str, Any], records: Iterable[TrialRecord]) -> str:
    """Return why `config` is not run, given the trials so far; empty: it may be run."""
    if (trial := smaller_oom_trial(config, records)) is None:
        return ""
    unit = cfg.find(config["workload"]).unit
    return (
        f"not run: {samples_at_once(config)} {unit} at once in {config['precision.amp']} precision"
        f" need at least as much memory as {trial.name}, which ran out of it"
    )


def penalty(results: Sequence[float], mode: str) -> float:
    """Return Optuna's value for a failure: finite, worse than the worst by its size.

    Without any results it is `UNKNOWN`; `mode`: "min" or "max".
    """
    sign = 1.0 if mode == "min" else -1.0
    worst = max(sign * value for value in results) if results else UNKNOWN
    return sign * min(worst + (abs(worst) or 1.0), sys.float_info.max)
