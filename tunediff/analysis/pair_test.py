"""Judge pairs of runs by what their journals say, and by nothing else.

`tunediff compare` reads its verdict here, and `tunediff verify` computes it again from a folder of
somebody else's: no configuration or code of the sides is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tunediff.analysis.outcome import failed
from tunediff.analysis.sequential import Look, Rules, look
from tunediff.analysis.targets import (
    QualityGate,
    ended_at_target,
    equal_gate,
    margin_gate,
    seconds_of,
    target_gate,
)
from tunediff.core import trial_record
from tunediff.core.outcomes import State, Status, Verdict
from tunediff.core.target import Target
from tunediff.core.trial_record import TrialRecord
from tunediff.experiment.model import Better, Counted, Experiment, Mode

RENEWED, SHARED, ONE_EACH = "renewed in every pair", "shared by both sides", "one for each side"
BEFORE_THE_PAIRS = {
    "seeds": SHARED,
    "data that are kept in memory or on disk": SHARED,
    "process from which runs are forked, and its generators": SHARED,
    "what a file asks the system for while it is imported (default_rng())": RENEWED,
    "order of both runs": RENEWED,
    "device, with --parallel": RENEWED,
    "seconds of compiling, and the folder of what was compiled": RENEWED,
    "path of the code's copy or worktree": ONE_EACH,
    "Python's hash seed, with --address": ONE_EACH,
}
"""What is fixed before a comparison's first pair, and what is done about it: what one draw fixes for
a side is in all of its pairs, where a paired test takes it for a difference."""
JUDGE, HOLDOUT = "judge.py", "holdout.py"
"""Copies of what judges a comparison's runs, and judges them again: `judge.locked_judge`."""
Runs = list[tuple[TrialRecord | None, TrialRecord | None]]
"""(A, B) of every pair that has begun."""


@dataclasses.dataclass(frozen=True)
class PairTest:
    """The runs of a comparison and the rules by which they are judged."""

    runs: Runs
    metric: str
    """Name of the deciding metric in points."""
    mode: Mode
    max_pairs: int
    within: float | None
    """The difference that does not matter, as a share of A's falling value; None: not given."""
    rules: Rules
    better: Better = "value"
    """What is compared: the metric, or the seconds, for which the metric has to be good enough."""
    target: Target | None = None
    margin: float | None = None
    """How much worse than A's the metric of B may be, in its units."""
    counted: Counted = "end"
    """Which seconds of a run count."""
    at_once: int = 1
    """Runs at the same time."""
    equal: bool = False
    """Whether both sides are the same, and differ in their seeds alone."""
    same_seed: bool = False
    """Whether the sides take no seed: their runs may be one, repeated."""
    objective: str = ""
    """Name of the metric as runs and judges print it: that of points where a run judges itself."""

    @classmethod
    def read(cls, folder: Path, experiment: Experiment) -> PairTest:
        """Return the test of the comparison in a folder."""
        test, objective = experiment.test, experiment.objective
        target = experiment.limit.target
        return cls(
            read_runs(folder),
            objective if experiment.judge is None else f"final_{objective}",
            experiment.mode,
            test.pairs,
            test.within,
            Rules(test.level, test.one_sided, test.fixed),
            test.better,
            Target.of(target, "target") if target is not None else None,
            test.margin,
            test.counted,
            experiment.devices,
            test.equal,
            experiment.same_seed,
            objective,
        )

    @property
    def begun(self) -> list[TrialRecord]:
        """Return all runs that have begun."""
        return [run for pair in self.runs for run in pair if run is not None]

    @property
    def lower_is_better(self) -> bool:
        """Return whether smaller values of the metric are better."""
        return self.mode == "min"

    @property
    def by_time(self) -> bool:
        return self.better == "time"

    @property
    def values(self) -> NDArray[np.float64]:
        """Return what is compared of every run [2, pairs]: value or seconds; NaN: it failed."""
        if self.by_time:
            return self._of_runs(lambda run: seconds_of(run, self.target, self.counted))
        return self.qualities

    @property
    def qualities(self) -> NDArray[np.float64]:
        """Return the metric of every run that ended ok [2, pairs]; NaN: there is none."""
        return self._of_runs(lambda run: run.value(self.metric))

    def _of_runs(self, read: Callable[[TrialRecord], float | None]) -> NDArray[np.float64]:
        values = np.full((2, len(self.runs)), np.nan)
        for column, pair in enumerate(self.runs):
            for row, run in enumerate(pair):
                value = read(run) if run is not None else None
                values[row, column] = np.nan if value is None else value
        return values

    @property
    def look(self) -> Look:
        """Return the sequential test of the pairs so far."""
        values, lower = self.values, self.lower_is_better or self.by_time
        margin = None if self.by_time else self.within
        # Values that are not positive are compared by differences, see `look`
        if margin is not None and lower and bool((values <= 0).any()):
            # The share was meant of A's values: without ratios it becomes a difference in units
            margin *= abs(float(np.nanmean(values[0])))
        return look(
            values,
            self.max_pairs,
            lower,
            ratios=lower,
            margin=margin,
            rules=self.rules,
        )

    @property
    def gates(self) -> list[QualityGate]:
        """Return what has to be shown of B's values for its seconds to count; see `targets`."""
        if not self.by_time:
            return []
        values = self.qualities
        # Pairs: margins and equality are tests of differences on equal seeds
        a, b = values[:, np.isfinite(values).all(axis=0)]
        gates = []
        if self.target is not None and not all(map(ended_at_target, self.begun)):
            gates.append(target_gate(b, self.target, self.max_pairs, self.rules))
        if self.margin is not None:
            lower = self.lower_is_better
            gates.append(margin_gate(a, b, self.margin, lower, self.max_pairs, self.rules))
        if self.within is not None:
            within = self.within * abs(float(a.mean())) if self.lower_is_better else self.within
            gates.append(equal_gate(a, b, within, self.max_pairs, self.rules))
        return gates

    @property
    def target_p(self) -> float | None:
        """Return the one-sided p-value of a single test that the mean of B meets the target."""
        if self.target is None:
            return None
        b = self.qualities[1]
        return target_gate(b[np.isfinite(b)], self.target, self.max_pairs, self.rules).p

    @property
    def failure(self) -> TrialRecord | None:
        """Return the first run that failed or missed the target, which ends the comparison."""
        return next((run for run in self.begun if failed(run) or self.missed(run)), None)

    def missed(self, run: TrialRecord) -> bool:
        """Return whether a run ended ok and did not meet the target, whose seconds count."""
        if not self.by_time or self.counted != "first" or run.status != Status.OK:
            return False
        return seconds_of(run, self.target, self.counted) is None

    @property
    def is_one_run(self) -> bool:
        """Return whether all runs of a side are one run, repeated: without a seed the noise of a
        training is not known, whatever the two sides differ by."""
        values = self.values[:, np.isfinite(self.values).all(axis=0)]
        if not self.same_seed or values.shape[1] < 2:
            return False
        repeated = (values == values[:, :1]).all(axis=1)
        exact = [_has_many_digits([row[0]]) for row in values.tolist()]  # equal, and not by chance
        return bool(repeated.all() or (repeated & exact).any())

    @property
    def over(self) -> bool:
        """Return whether no further pair is needed."""
        if self.failure is not None or self.is_one_run:
            return True
        look = self.look
        # Fewer seconds are no gain yet: pairs go on until the quality is shown, or the last one
        if look.differences[0].verdict == Verdict.BETTER and look.rounds < self.max_pairs:
            return look.over and all(gate.shown for gate in self.gates)
        return look.over

    @property
    def verdict(self) -> Verdict:
        """Return how B compares with A; `open`: the comparison is not over."""
        if self.failure is not None:
            return Verdict.FAILED
        if self.is_one_run:
            return Verdict.ONE_RUN
        if not self.over:
            return Verdict.OPEN
        look = self.look
        verdict = look.differences[0].verdict
        if verdict == Verdict.BETTER and not all(gate.shown for gate in self.gates):
            return Verdict.NOT_SHOWN
        if verdict in (Verdict.BETTER, Verdict.WORSE):
            return verdict
        return Verdict.EQUIVALENT if look.state == State.EQUAL else Verdict.NO_DIFFERENCE


FEW_DIGITS = 8
"""Significant digits up to which values may repeat themselves by chance, such as an accuracy."""


def without_effect(test: PairTest) -> list[str]:
    """Return sentences on runs that are equal on different seeds, of one side or of both.

    Runs whose values have few digits are named only if all of them are equal. So are final values
    that all runs of both sides have, since these may be no values of the trainings.
    """
    sentences = []
    finals = list[float | None]()
    for side in zip(*test.runs, strict=True):
        ended = [run for run in side if run is not None and run.status == Status.OK and run.points]
        # Whole curves: two ends may be equal by chance, and often are where values have few digits
        curves = [[point.get(test.metric) for point in run.points] for run in ended]
        finals += [curve[-1] for curve in curves]
        # a run that ends at its target has a value just beyond it, often the same one
        is_long = len(curves) > 2 and test.target is None
        all_equal = is_long and all(curve == curves[0] for curve in curves)
        for number, (run, curve) in enumerate(zip(ended, curves, strict=True)):
            earlier = curves.index(curve)
            first, is_telling = ended[earlier], all_equal or _has_many_digits(curve)
            if earlier < number and first.seed != run.seed and is_telling:
                sentences.append(
                    f"{run.drawn['side']}: seeds {first.seed} and {run.seed} gave the same"
                    " values, as they were printed: has the seed an effect?"
                )
                break
    if not sentences and len(finals) > 4 and test.target is None and len(set(finals)) == 1:
        sentences.append(
            f"all {len(finals)} runs of A and B ended at {finals[0]}: is it a value of the training?"
        )
    return sentences


def _has_many_digits(curve: list[float | None]) -> bool:
    digits = repr(curve[-1]).strip("-0.").replace(".", "")
    return curve[-1] is not None and len(digits) > FEW_DIGITS


def read_runs(folder: Path) -> Runs:
    """Return the runs in the folder of a comparison, pair by pair; runs no code of theirs."""
    runs = {run.number: run for run in trial_record.read_trials(folder)}
    # Numbers go by pairs; a run that was killed before it wrote leaves a gap
    first = [number for number in range(0, 2 * len(runs), 2) if {number, number + 1} & runs.keys()]
    return [(runs.get(number), runs.get(number + 1)) for number in first]
