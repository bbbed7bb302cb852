"""Warn where trials that are compared with each other run on different hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tunediff.core import environment
from tunediff.core.trial_record import TrialRecord


class MixedHardware:
    """Warns once of each hardware beside that of the first trial."""

    def __init__(self, trials: Mapping[str, TrialRecord], say: Callable[[str], None]) -> None:
        """`trials`: those so far, by their names in a warning; nothing is said of them."""
        self._say = say
        self._first_names: dict[str, str] = {}
        """Name of the first trial on each hardware."""
        for name, trial in trials.items():
            if used := environment.hardware(trial.environment):
                self._first_names.setdefault(used, name)

    def look_at(self, name: str, trial: TrialRecord) -> None:
        """Print the warning if this trial is the first one on another hardware."""
        used = environment.hardware(trial.environment)
        if used and used not in self._first_names:
            self._first_names[used] = name
            (first, first_name), why = (
                next(iter(self._first_names.items())),
                "what they measure cannot be compared",
            )
            if used != first:
                self._say(f"WARNING: {first_name} ran on {first}, {name} runs on {used}: {why}")
