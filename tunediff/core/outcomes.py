"""The words by which results are known in journals, JSON, CSV files, ledgers and proof folders.

They are identifiers: sentences for people are made from them, and are no values anywhere.
"""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """What a comparison with the baseline, or with A, has shown of a candidate."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    """The interval lies inside the difference that does not matter."""
    NO_DIFFERENCE = "no_difference"
    """No difference that is larger than the noise."""
    NOT_SHOWN = "quality_not_shown"
    """It takes fewer seconds, and its values are not shown to be good enough."""
    ONE_RUN = "one_run_repeated"
    """All runs of a side are one run, so that the noise of a training is not known."""
    FAILED = "failed"
    """A run failed, which ended the comparison."""
    OPEN = "open"
    """The comparison goes on."""
    TOO_FEW = "too_few_runs"
    """There are too few runs for a test."""
    FAILS = "fails"
    """It failed on some seeds, so it is not tested."""
    BASELINE = "baseline"
    """It is what the others are compared with."""


class Status(StrEnum):
    """How a trial ended."""

    OK = "ok"
    PRUNED = "pruned"
    """Stopped early by the scheduler."""
    OOM = "oom"
    """Out of device or host memory."""
    NAN = "nan"
    """Loss or weights were not finite."""
    TIMEOUT = "timeout"
    """Past its deadline."""
    MISSED = "missed"
    """It ended, or its budget did, before it met its target."""
    ERROR = "error"
    """Anything else, with a reason."""
    SKIPPED = "skipped"
    """Never run, because another trial has shown that it would fail."""
    UNFINISHED = "unfinished"
    """It has not ended: of counts of trials, never of an end."""


class CaptureOutcome(StrEnum):
    """Whether a training's step is captured as a whole and replayed, where that was to be tried."""

    CAPTURED = "captured"
    REFUSED = "refused"


class Ruling(StrEnum):
    """What early stopping decided of a trial."""

    STOPPED = "stopped"
    BETTER_HALF = "better_half"
    """It is not worse than the median."""
    WITHIN_NOISE = "within_noise"
    """It is worse than the median, and within the noise of the best."""
    RUNS_THROUGH = "runs_through"
    """It is the baseline, or a configuration that is repeated: others are compared with it."""
    LAST_POINT = "last_point"
    """It ends by itself."""


class State(StrEnum):
    """How far a sequential test is."""

    OPEN = "open"
    """More rounds are needed."""
    DECIDED = "decided"
    """One rival is better, or all are worse."""
    EQUAL = "equal"
    """No difference is larger than the given one."""
    HOPELESS = "hopeless"
    """More rounds would show only a difference that is unlikely by the values so far."""
    SPENT = "spent"
    """There are no more rounds."""
