"""Estimate how long the rest of a search takes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunediff.analysis import Results, confirmation, evaluating
from tunediff.core import text
from tunediff.search_space import SearchSpace
from tunediff.tuning import sessions


class RemainingTime:
    """How long the rest takes: from the trials of this session, before the first of them has ended
    from the plan."""

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
        self.planned, self._space, self._begun, self._may_end_earlier = (
            planned,
            space,
            begun,
            may_end_earlier,
        )
        self._spent_s = sessions.all_spent_s(folder)
        self._before, self._first_start = 0, 0.0
        self._last_end = 0, begun
        """How many trials have ended, and the monotonic time at which the last end was noticed."""
        self._confirming: tuple[Results, float] | None = None

    def begin(self, done: int) -> None:
        """Take note of how many trials ended before this session."""
        self._before = done

    def start(self) -> None:
        """Take note that a trial starts: the cluster is running, so that estimates exclude its
        start-up."""
        self._first_start = self._first_start or time.monotonic()

    def words(self, done: int, results: Results) -> str:
        """Return `about 4m00s left, then up to about 2m of confirming`; '' if nothing is known or
        left."""
        rest, left, space = self._seconds(done), self._space.budget.trials - done, self._space
        if rest is None:
            return ""
        words = (
            f"{'up to ' if self._may_end_earlier else ''}about {text.seconds(rest)} left"
            if left > 0
            else ""
        )
        confirming_s = (
            min(self._confirming_s(results), self._limit_left_s() - rest)
            if space.finalists
            else 0.0
        )
        then = (
            f"then up to about {text.seconds(confirming_s)} of confirming"
            if confirming_s > 0
            else ""
        )
        if left <= 0 and (why := confirmation.nothing_to_confirm(results)):
            then = f"nothing to confirm: {why}"
        return ", ".join(filter(None, [words, then]))

    def _seconds(self, done: int) -> float | None:
        """Return the seconds without confirming runs: from measured trials, else from the plan,
        within the limit."""
        # Remember when the count of ended trials last changed.
        now, budget = time.monotonic(), self._space.budget
        if done != self._last_end[0]:
            self._last_end = done, now
        spent = now - self._begun
        if (left := budget.trials - done) > 0 and done > self._before:
            ended = self._last_end[
                1
            ]  # the estimate is made when a trial ends, and counts down from there
            per_trial_s = (ended - (self._first_start or self._begun)) / (done - self._before)
            rest = max(0.0, per_trial_s * left - (now - ended))
        elif left > 0 and self.planned is not None:
            planned_s = self.planned["seconds"]
            rest = max(0.0, planned_s["wall_clock"] - planned_s["confirmation"] - spent)
        elif left > 0 or not self._space.finalists:
            return None
        else:
            rest = 0.0
        return min(rest, self._limit_left_s())

    def _limit_left_s(self) -> float:
        """Return the seconds that `budget: total` leaves; infinite without it."""
        spent_s = self._spent_s + time.monotonic() - self._begun
        return max(0.0, (self._space.budget.total_s or math.inf) - spent_s)

    def _confirming_s(self, results: Results) -> float:
        """Return the wall-clock of all confirming runs: from measured evaluations, else from the
        plan."""
        if self._confirming is None or self._confirming[0] is not results:
            planned = self.planned or {}
            judged = [
                spent
                for trial in results.trials
                if (spent := evaluating.point_s(trial)) is not None
            ]
            seconds = {
                "evaluation_s": max(judged, default=planned.get("evaluation_s")),
                "confirming_final_s": planned.get("final_evaluation_s_per_confirming_run"),
            }
            self._confirming = results, evaluating.Cost.of(self._space, seconds).confirming_s
        return self._confirming[1]
