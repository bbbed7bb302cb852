"""Decide which configurations run again before the finalists of a search are chosen.

Of many runs the best is partly the luckiest. The last trials of a search therefore repeat what
leads, and configurations are compared by their means. Imports no Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tunediff.analysis import Results
from tunediff.analysis.following import Following
from tunediff.config import Values
from tunediff.core.trial_record import Role
from tunediff.search_space import SearchSpace
from tunediff.search_space.model import MOST_RUNS


def next_repeat(results: Results, begun: Sequence[Values]) -> Values | None:
    """Return the drawn values to run next: a leader below `MOST_RUNS`, on its next seed.

    `begun`: all repeats, whether they have ended or not. None: no configuration but the baseline
    has a result and runs left. Compared with other rules in `benchmarks/believe`.
    """
    for outcome in results.ranked:
        trial = outcome.trial
        runs = 1 + sum({**trial.knobs, "seed": drawn["seed"]} == drawn for drawn in begun)
        if runs < MOST_RUNS and not results.is_baseline(trial):
            return {**trial.knobs, "seed": results.space.baseline.seed + runs}
    return None


class Repeats:
    """The repeats of leading configurations that were begun, whether they have ended or not, and
    the next one. The baseline's are listed by the search file and none of them."""

    def __init__(self, space: SearchSpace, experiment: Path) -> None:
        """`experiment`: the folder of the search."""
        self._space, self._experiment, self._following = space, experiment, Following(experiment)
        self._begun: list[Values] = []

    def __len__(self) -> int:
        return len(self._begun)

    def __contains__(self, drawn: Values) -> bool:
        return drawn in self._begun

    def holds(self, role: Role, drawn: Values) -> bool:
        """Return whether a run repeats a configuration other than the baseline."""
        return role == "repeat" and not self._space.is_baseline(drawn)

    def add(self, role: Role, drawn: Values) -> None:
        """Take note of a run if it is such a repeat."""
        # The study may have it twice, see `SearchStudy`
        if self.holds(role, drawn) and drawn not in self._begun:
            self._begun.append(drawn)

    def left(self, draws: int) -> int:
        """Return how many may begin after so many new configurations: the search's share."""
        trials, reruns = self._space.budget.trials, self._space.reruns
        return min(draws * reruns // (trials - reruns), trials - draws) - len(self)

    def next(self) -> Values | None:
        """Return the drawn values to run next, by ended trials; None: no result or run left."""
        self._following.read()
        results = Results(self._experiment, self._space, self._following.trials)
        return next_repeat(results, self._begun)
