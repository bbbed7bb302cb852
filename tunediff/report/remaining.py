"""Estimate how long the rest of a search takes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunediff.core import text
from tunediff.search_space import SearchSpace
from tunediff.tuning import sessions


class RemainingTime:
    """How long the trials that are left take: by the mean of this session's, or by plan."""

    def __init__(
        self, folder: Path, space: SearchSpace, planned: Mapping[str, Any] | None, begun: float
    ) -> None:
        """Read what the search has spent.

        planned: see `Console`. begun: monotonic time at which this session began.
        """
        self.planned, self.ended_before = planned, 0
        self._space, self._begun = space, begun
        self._spent_before_s = sessions.all_spent_s(folder)
        self._ended, self._last_end = 0, begun
        """How many trials have ended, and the monotonic time at which the last end was noticed."""

    def words(self, ended: int) -> str:
        """Return `about 4m00s left`, within the limit of the search; '': unknown, or none."""
        now, left = time.monotonic(), self._space.budget.trials - ended
        if ended != self._ended:
            self._ended, self._last_end = ended, now
        if left <= 0:
            return ""
        if ended > self.ended_before:
            # The estimate is made when a trial ends, and counts down from there.
            per_trial_s = (self._last_end - self._begun) / (ended - self.ended_before)
            rest_s = per_trial_s * left - (now - self._last_end)
        elif self.planned is not None:
            planned_s = self.planned["seconds"]
            rest_s = planned_s["wall_clock"] - planned_s["confirmation"] - (now - self._begun)
        else:
            return ""
        limit_s = (self._space.budget.total_s or math.inf) - self._spent_before_s
        rest_s = min(rest_s, limit_s - (now - self._begun))
        return f"about {text.seconds(max(0.0, rest_s))} left"
