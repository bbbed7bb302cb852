"""The configurations that a search has tried, so that none runs twice."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable

from tunediff import config as cfg
from tunediff import search_space as spaces
from tunediff.config import ConfigError, Systems
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.search_space.dimension import combinations

LISTED = 500
"""Points of a space that are looked at one by one to know when it is used up: a second."""


class Tried:
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
        self._died: set[str] = set()
        """`_identity` of the configurations whose processes died in this session."""
        for trial in records:
            if trial.external_cause:
                continue
            self._exact[trial.fingerprint] = trial.name
            with contextlib.suppress(ConfigError):  # of a workload that has changed since
                self._equivalent.setdefault(self._identity(trial.configuration), trial.name)
                self.note_refusal(trial)

    def note_refusal(self, trial: TrialRecord) -> None:
        """Remember the configuration as which a trial trained whose steps could not be captured."""
        if "compile.capture" in trial.not_effective:
            eager = cfg.neutral(trial.configuration, ["compile.capture"])
            self._equivalent.setdefault(self._identity(eager), trial.name)

    def add(self, config: Systems, name: str) -> None:
        """Remember that a configuration was tried, and by which trial."""
        self._exact.setdefault(cfg.fingerprint(config), name)
        self._equivalent.setdefault(self._identity(config), name)

    def forget(self, config: Systems, name: str) -> None:
        """Forget a trial whose processes died: its configuration may be drawn again.

        That is once in a session: the second time is likely the configuration's fault, which would
        be drawn until all trials are used up.
        """
        if (identity := self._identity(config)) in self._died:
            return
        self._died.add(identity)
        for names in (self._exact, self._equivalent):
            for fingerprint in [key for key, other in names.items() if other == name]:
                del names[fingerprint]

    def exact(self, config: Systems) -> str | None:
        """Return the trial of this very configuration; None: there is none."""
        return self._exact.get(cfg.fingerprint(config))

    def equivalent(self, config: Systems) -> str | None:
        """Return a trial that trains equally; None: there is none."""
        return self._equivalent.get(self._identity(config))

    def is_baseline(self, config: Systems) -> bool:
        """Return whether a configuration trains like the baseline of the space."""
        return self._identity(config) == self._identity(self._space.baseline)

    def used_up(self) -> bool:
        """Return whether all points, or their equivalents, were run. False for a large space."""
        if len(self._exact) - self._space.noise + 1 >= spaces.size(self._space):
            return True
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
        if spaces.size(self._space) > LISTED or any(
            dimension.choices is None for dimension in dimensions
        ):
            return None
        for point in combinations(dimensions):
            with contextlib.suppress(ConfigError):  # knobs that contradict each other
                identities.add(self._identity(self._space.config(point)))
        return identities
