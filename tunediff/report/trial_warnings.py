"""Warn of trials on different hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tunediff.core import environment
from tunediff.core.trial_record import TrialRecord


class TrialWarnings:
    """Warn once of other hardware than the first trial's."""

    def __init__(self, trials: Mapping[str, TrialRecord], say: Callable[[str], None]) -> None:
        """Note the hardware of the trials so far, by display name, without a warning."""
        self._say = say
        self._first_trials: dict[str, str] = {}
        """The name of the first trial on each hardware."""
        for name, trial in trials.items():
            if used := environment.hardware(trial.environment):
                self._first_trials.setdefault(used, name)

    def look_at(self, name: str, trial: TrialRecord) -> None:
        """Print a warning if this trial is the first one that needs it."""
        used = environment.hardware(trial.environment)
        if not used or used in self._first_trials:
            return
        self._first_trials[used] = name
        first, first_name = next(iter(self._first_trials.items()))
        if used != first:
            self._say(
                f"WARNING: {first_name} ran on {first}, {name} runs on {used}: what they measure"
                " cannot be compared"
            )
