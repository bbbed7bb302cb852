"""Decide which configurations of a search run again on further seeds before its finalists are
chosen.

Of many runs the best is partly the luckiest. The last trials of a search therefore run what leads
again, and configurations are compared by their means. Imports no Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tunediff.analysis import Results, noise
from tunediff.analysis.following import Following
from tunediff.analysis.outcome import without_seed
from tunediff.config import Values
from tunediff.search_space import SearchSpace
from tunediff.search_space.model import MOST_RUNS


def is_baseline(space: SearchSpace, drawn: Values) -> bool:
    """Return whether drawn knobs are the baseline's, on any seed."""
    return all(knob == "seed" for knob in space.changed(drawn))


def is_rerun(space: SearchSpace, drawn: Values) -> bool:
    """Return whether drawn knobs repeat a configuration other than the baseline on another seed."""
    return space.seeds == 1 and "seed" in drawn and not is_baseline(space, drawn)


def next_rerun(results: Results, reruns: Sequence[Values]) -> Values | None:
    """Return the point to run next: what leads and has fewer than `MOST_RUNS` runs, on its next
    seed.

    `reruns`: all that were begun, whether they have ended or not. None: no configuration but the
    baseline has a result and runs left. Compared with other rules in `benchmarks/believe`.
    """
    for outcome in results.ranked:
        own = without_seed((trial := outcome.trial).drawn)
        runs = 1 + sum(without_seed(drawn) == own for drawn in reruns)
        if runs < MOST_RUNS and not noise.is_baseline(results, trial):
            return {**own, "seed": results.space.baseline.seed + runs}
    return None


class Reruns:
    """The reruns of a search that were begun, whether they have ended or not, and the next one."""

    def __init__(self, space: SearchSpace, experiment: Path) -> None:
        """`experiment`: the folder of the search."""
        self._space, self._experiment, self._following = space, experiment, Following(experiment)
        self._begun: list[Values] = []

    def __len__(self) -> int:
        return len(self._begun)

    def __contains__(self, point: Values) -> bool:
        return point in self._begun

    def add(self, point: Values) -> None:
        """Take note of a trial if it is a rerun."""
        if (
            is_rerun(self._space, point) and point not in self._begun
        ):  # the study may have it twice, see `SearchStudy`
            self._begun.append(point)

    def left(self, draws: int) -> int:
        """Return how many may begin after so many trials of new configurations: their share is that
        of the search."""
        share = draws * self._space.reruns // (self._space.budget.trials - self._space.reruns)
        return min(share, self._space.budget.trials - draws) - len(self)

    def next_point(self) -> Values | None:
        """Return the point to run next, by all trials that have ended; None: none has a result and
        runs left."""
        self._following.read()
        results = Results(self._experiment, self._space, self._following.trials)
        return next_rerun(results, self._begun)
