"""Configurations of trials, as their journals have them."""

from __future__ import annotations

from typing import Any

from tunediff.config.configurations import flat, neutral
from tunediff.config.knobs import ConfigError, Values
from tunediff.config.schema import nest
from tunediff.config.workload import from_dict
from tunediff.core.trial_record import TrialRecord

CONFIG = "config.yaml"
SIDES = ("A", "B")
"""Folders inside that of a comparison, each with a configuration."""


def configuration_of(trial: TrialRecord) -> Any:
    """Return a trial's configuration. Raises `ConfigError` if its knobs are not valid (any more)."""
    return from_dict(nest(trial.config), trial.name, check=False)


def effective_knobs(trial: TrialRecord) -> Values:
    """Return a trial's knobs with ineffective ones at fixed values: equal for equal trainings.

    If workload or knobs are not valid any more, return them unchanged.
    """
    try:
        return flat(neutral(configuration_of(trial), trial.not_effective))
    except ConfigError:
        return dict(trial.config)
