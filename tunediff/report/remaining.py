"""Estimate how long the rest of a search takes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunediff.analysis import Results, confirming_runs, evaluating
from tunediff.core import text
from tunediff.search_space import SearchSpace
from tunediff.tuning import sessions


class RemainingTime:
    """How long the rest takes, from this session's trials; before one has ended, by plan."""

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        planned: Mapping[str, Any] | None,
        begun: float,
        may_end_earlier: bool,
    ) -> None:
        """Read what the search has spent.

        planned: see `Console`. begun: monotonic time at which this session began. may_end_earlier:
        whether it may be decided before all runs have run, as confirming runs are.
        """
        self.planned, self.ended_before = planned, 0
        self._space, self._begun, self._may_end_earlier = space, begun, may_end_earlier
        self._spent_before_s = sessions.all_spent_s(folder)
        self._first_start = 0.0
        self._ended, self._last_end = 0, begun
        """How many trials have ended, and the monotonic time at which the last end was noticed."""
        self._confirming: tuple[Results, float] | None = None

    def start(self) -> None:
        """Note that a trial starts: estimates exclude the start of the cluster before it."""
        self._first_start = self._first_start or time.monotonic()

    def words(self, ended: int, results: Results) -> str:
        """Return `about 4m00s left, then up to about 2m of confirming`; '': unknown, or none."""
        rest_s = self._seconds(ended)
        if rest_s is None:
            return ""
        words, more = [], self._space.budget.trials > ended
        if more:
            bound = "up to " if self._may_end_earlier else ""
            words.append(f"{bound}about {text.seconds(rest_s)} left")
        if not more and (why := confirming_runs.nothing_to_confirm(results)):
            words.append(f"nothing to confirm: {why}")
        elif self._space.finalists:
            confirming_s = min(self._confirming_s(results), self._limit_left_s() - rest_s)
            if confirming_s > 0:
                words.append(f"then up to about {text.seconds(confirming_s)} of confirming")
        return ", ".join(words)

    def _seconds(self, ended: int) -> float | None:
        """Return the seconds until the last trial ends, within the limit; None if unknown."""
        now, left = time.monotonic(), self._space.budget.trials - ended
        if ended != self._ended:
            self._ended, self._last_end = ended, now
        if left <= 0:
            return 0.0 if self._space.finalists else None
        if ended > self.ended_before:
            # The estimate is made when a trial ends, and counts down from there.
            spent_s = self._last_end - (self._first_start or self._begun)
            per_trial_s = spent_s / (ended - self.ended_before)
            rest_s = per_trial_s * left - (now - self._last_end)
        elif self.planned is not None:
            planned_s = self.planned["seconds"]
            rest_s = planned_s["wall_clock"] - planned_s["confirmation"] - (now - self._begun)
        else:
            return None
        return min(max(0.0, rest_s), self._limit_left_s())

    def _limit_left_s(self) -> float:
        """Return the seconds that `budget: total` leaves; infinite without it."""
        spent_s = self._spent_before_s + time.monotonic() - self._begun
        return max(0.0, (self._space.budget.total_s or math.inf) - spent_s)

    def _confirming_s(self, results: Results) -> float:
        """Return the wall-clock of all confirming runs, by measured evaluations or the plan."""
        if self._confirming is None or self._confirming[0] is not results:
            planned = self.planned or {}
            points_s = filter(None, map(evaluating.point_s, results.trials))
            seconds = {
                "evaluation_s": max(points_s, default=planned.get("evaluation_s")),
                "confirming_final_s": planned.get("final_evaluation_s_per_confirming_run"),
                "confirming_at_once": planned.get("confirming_at_once", 1),
            }
            self._confirming = results, evaluating.Cost.of(self._space, seconds).confirming_s
        return self._confirming[1]
