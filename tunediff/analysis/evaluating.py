"""Estimate the wall-clock of a search from the measured seconds of one evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tunediff.search_space import SearchSpace

RUN_S, START_S, FRESH_S = 2.0, 15.0, 10.0
"""Seconds that a run takes besides training and evaluation, that a session takes before its first
run, and that processes of a run's own take; measured on two cores."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """About how many wall-clock seconds a search will take, before it begins; None: not known."""

    evaluation_s: float | None
    """One evaluation of the baseline."""
    final_s: float | None
    """The additional evaluation of a finished trial by the search's `final`; 0 without one."""
    confirming_final_s: float | None
    """The same for a confirming run."""
    space: SearchSpace
    confirming_at_once: int = 1
    """Confirming runs at the same time."""

    @classmethod
    def of(cls, space: SearchSpace, measured: Mapping[str, Any]) -> Cost:
        """Return the cost of a search; `measured`: seconds of its evaluations by field name."""
        confirm = space.confirm.final if space.confirm is not None else {}
        return cls(
            evaluation_s=measured.get("evaluation_s") if space.evaluates else 0.0,
            final_s=measured.get("final_s") if space.final else 0.0,
            confirming_final_s=measured.get("confirming_final_s") if confirm else 0.0,
            space=space,
            confirming_at_once=measured.get("confirming_at_once", 1),
        )

    @property
    def judging_s(self) -> float:
        """Return the seconds of all evaluations of one trial, as far as they are known."""
        return int(self.space.baseline.evaluation.points) * (self.evaluation_s or 0.0)

    @property
    def trial_s(self) -> float:
        """Return the seconds of one trial."""
        return self.space.longest_s + self.judging_s + (self.final_s or 0.0) + self.run_s

    @property
    def run_s(self) -> float:
        """Return the seconds that a run needs to start."""
        return RUN_S + FRESH_S * bool(self.space.baseline.compile.active)

    @property
    def confirming_s(self) -> float:
        """Return the seconds of all confirming runs that there may be, without a limit."""
        more = self.judging_s + (self.confirming_final_s or 0.0) + self.run_s
        candidates, count = self.space.finalists + 1, self.confirming_at_once
        # A round is at the same time where there are devices for all of its runs
        used = count // candidates * candidates if count >= candidates else count
        return self.space.most_confirming_runs * (self.space.longest_s + more) / used

    def within_limit(self, slots: int) -> tuple[float, float]:
        """Return the trials that each of `slots` slots runs, and the seconds of confirming runs.

        Both as far as `budget: total` has room for them; one trial runs in any case.
        """
        rounds, confirming_s = float(math.ceil(self.space.budget.trials / slots)), self.confirming_s
        total_s = self.space.budget.total_s
        if total_s is None or START_S + rounds * self.trial_s + confirming_s <= total_s:
            return rounds, confirming_s
        # Trials leave confirming runs their reserve, and take at least half of the limit.
        reserve_s = min(self.space.confirming_reserve * self.trial_s, total_s / 2)
        after_all_s, after_one_s = (total_s - START_S - many * self.trial_s for many in (rounds, 1))
        confirming_s = max(0.0, min(confirming_s, after_one_s, max(after_all_s, reserve_s)))
        return (
            min(rounds, max(1.0, (total_s - START_S - confirming_s) / self.trial_s)),
            confirming_s,
        )

    def parts(self, slots: int) -> dict[str, float]:
        """Return the seconds by purpose for `slots` trials at once; `wall_clock` is the sum."""
        rounds, confirming_s = self.within_limit(slots)
        seconds = {
            "training": rounds * self.space.longest_s,
            "evaluation": rounds * (self.judging_s + (self.final_s or 0.0)),
            "start_up": START_S + rounds * self.run_s,
            "confirmation": confirming_s,
        }
        return seconds | {"wall_clock": sum(seconds.values())}
