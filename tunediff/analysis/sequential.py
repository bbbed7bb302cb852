"""Test configurations against a baseline after every round of seeds, with known error rates.

A test after every pair of runs that stops when p falls below 5 % is wrong far more often than in 5
% of all cases. Here the error is spent over the interim analyses (`error_spending`). A round is a
block: all configurations on one seed, which decides initial weights, order of the data and
everything drawn. Configurations may differ in noise, so each challenger is judged by the noise of
its own differences from the baseline, a paired t-test, at an equal share of the error (Bonferroni):
how the differences of two challengers correlate depends on the noise of all three, and no
correlation makes a false winner more likely than the sum of the shares. No kept library does that:
methods that are valid without an end (confidence sequences, e-values) are for bounded values or
need more runs (`benchmarks/believe`)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from tunediff.analysis.divergence import Divergence, divergence
from tunediff.analysis.error_spending import (
    EARLY,
    FEW,
    LATE,
    bounds,
    first_analysis,
    last_analysis,
    sign_bounds,
)
from tunediff.analysis.statistics import LEVEL, Difference, Scale, is_wide, paired_sds, value_step
from tunediff.core.outcomes import State, Verdict
from tunediff.core.target import Target
from tunediff.experiment.model import Better, Counted, Experiment

Values = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Rules:
    """How a comparison comes to its verdict, fixed before its first run."""

    max_rounds: int
    """Rounds that there can be: seeds on which all candidates run."""
    level: float = LEVEL
    """Probability of any wrong verdict if nothing differs."""
    one_sided: bool = False
    """Whether all of it is spent on `better`; then nothing is called worse."""
    fixed: bool = False
    """Whether there is one analysis, after all rounds: Student's t-test."""
    corrected: bool = False
    """Whether there is one analysis of the seeds that each candidate has, by Holm's method."""
    within: float | None = None
    """The difference that does not matter, as a share of falling values; None: not given."""
    better: Better = "value"
    """What is compared: the metric, or the seconds, for which the metric has to be good enough."""
    target: Target | None = None
    margin: float | None = None
    """How much worse than the baseline's the metric may be by time, in its units."""
    counted: Counted = "end"
    """Which seconds count: those until the target is first met, or those of the whole run."""
    equal: bool = False
    """Whether both sides are the same, and differ in their seeds alone."""
    unseeded: bool = False
    """Whether the sides take no seed: their runs may be one, repeated."""

    @classmethod
    def of(cls, experiment: Experiment) -> Rules:
        """Return the rules of a comparison of two sides."""
        target, test = experiment.limit.target, experiment.test
        return cls(
            test.pairs,
            target=Target.of(target, "target") if target is not None else None,
            unseeded=experiment.unseeded,
            **{name: value for name, value in test if name in cls.__dataclass_fields__},
        )

    @property
    def by_time(self) -> bool:
        return self.better == "time"


@dataclasses.dataclass(frozen=True)
class InterimAnalysis:
    """The result of the test after the rounds so far."""

    differences: list[Difference] = dataclasses.field(default_factory=list)
    """The difference of each challenger; the intervals hold in 1 − level of all comparisons (1 − 2
    × level for one-sided ones), for all challengers and interim analyses together."""
    rounds: int = 0
    """Rounds that count: those that the baseline and all remaining challengers have completed."""
    max_rounds: int = 0
    state: State = State.OPEN
    ratios: bool = True
    """Whether differences are ratios to the baseline."""

    @property
    def ended(self) -> bool:
        """Return whether no further round should run."""
        return self.state != State.OPEN


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """The complete rounds of the baseline and of the challengers that are still in."""

    values: Values
    """[1 + challengers, rounds], the baseline first."""
    z: Values
    """The same on the scale of the model, where noise and effects add."""
    remaining: NDArray[np.bool_]
    """Which rows of all values are still in."""
    offsets: Values
    """By how much the mean of each row of all is above the baseline's; NaN: it is out."""
    step: float
    """The smallest step of the values, see `value_step`."""

    @property
    def challengers(self) -> int:
        return len(self.z) - 1

    @property
    def count(self) -> int:
        return int(self.z.shape[1])


def _rounds(values: Values, max_rounds: int, scale: Scale) -> _Rounds:
    """Return the rounds that count. A challenger that lacks a seed before the last one is out."""
    # Without the baseline's run a seed compares nothing, whatever the challengers have on it
    is_counted = np.isfinite(values[0])
    counted = values[:, is_counted][:, :max_rounds]
    # The last round may be under way; a gap before it is a run that failed
    remaining = np.asarray(np.isfinite(counted[:, :-1]).all(axis=1))
    is_complete = np.isfinite(counted[remaining]).all(axis=0)
    complete = counted[remaining][:, is_complete]
    complete = complete[:, : last_analysis(complete.shape[1], max_rounds)]
    z = scale.to_model(complete)
    offsets = np.full(len(values), np.nan)
    if z.shape[1]:
        offsets[remaining] = z.mean(axis=1) - z[0].mean()
    # The step is that of the metric: of all values, also of runs that do not count
    return _Rounds(complete, z, remaining, offsets, value_step(values))


@dataclasses.dataclass(frozen=True)
class _Test:
    """The test of the challengers that are still in, an entry each."""

    gains: Values
    """By how much they are ahead of the baseline, in units of the model."""
    halves: Values
    """Half the widths of their intervals."""
    errors: Values
    """Standard errors of their gains."""
    counts: list[Divergence]
    share: float
    """The error that each of them has."""
    differences: list[Difference]

    @property
    def has_decided(self) -> bool:
        """Return whether one is better or all are worse."""
        verdicts = [difference.verdict for difference in self.differences]
        return Verdict.BETTER in verdicts or set(verdicts) == {Verdict.WORSE}


def _test(
    rounds: _Rounds, scale: Scale, limit: float, share: float, lower: bool, one_sided: bool
) -> _Test:
    """Return intervals and verdicts, where |t| has to exceed `limit`.

    A side that diverges more often is worse, and never better, whatever its other runs show.
    """
    sds = paired_sds(rounds.z, rounds.step, scale.ratios)
    errors = sds / math.sqrt(rounds.count)
    halves = limit * errors
    offsets = rounds.offsets[1:][rounds.remaining[1:]]
    gains = -offsets if lower else offsets
    baseline, *challengers = rounds.values
    counts = [divergence(baseline, challenger, lower) for challenger in challengers]
    differences = []
    # No gain of a side that diverges more often counts: what is left of it is the luckier part
    for offset, gain, sd, half, count in zip(offsets, gains, sds, halves, counts, strict=True):
        fewer, often = count.baseline - count.challenger, count.decided(share)
        better = (gain > half and fewer >= 0) or (often and fewer > 0)
        worse = (gain < -half and fewer <= 0) or (often and fewer < 0)
        difference = dataclasses.replace(
            scale.difference(float(offset), half),
            verdict=Verdict.BETTER
            if better
            else Verdict.WORSE
            if worse and not one_sided
            else Verdict.NO_DIFFERENCE,
            sd=scale.size(sd),
            resolution=scale.size(half),
            diverged=count,
        )
        differences.append(difference)
    return _Test(gains, halves, errors, counts, share, differences)


def analyse(
    values: Values, rules: Rules, lower_is_better: bool = True, ratios: bool = True
) -> InterimAnalysis:
    """Test each row of `values` [candidates, seeds] against row 0, the baseline; NaN: no run.

    Differences are ratios if `ratios` are allowed and all values are positive: noise and effects of
    distances and rates are proportional. `rules.within` is a ratio − 1 then, else in units. A
    candidate that lacks a seed before the last one is out. Where one of two has infinite values, of
    runs that missed a target, pairs decide by their signs.
    """
    if np.isinf(values).any():
        return _by_signs(values[:, ~np.isnan(values).any(axis=0)][:, : rules.max_rounds], rules)
    scale, max_rounds = Scale.of(values, ratios), rules.max_rounds
    rounds = _rounds(values, max_rounds, scale)
    differences = [scale.difference(offset) for offset in rounds.offsets[1:]]

    def result(state: State) -> InterimAnalysis:
        return InterimAnalysis(differences, rounds.count, max_rounds, state, scale.ratios)

    if rounds.challengers < 1 or rounds.count < first_analysis(max_rounds):
        all_out = len(values) > len(rounds.z) == 1  # rather than not yet begun
        return result(State.DECIDED if all_out else State.OPEN)
    plan = LATE if rounds.challengers > 1 and max_rounds <= FEW else EARLY
    share = rules.level / rounds.challengers
    limits = bounds(share, max_rounds, plan.power, rules.one_sided, rules.fixed)
    limit, is_last = limits[rounds.count - 1], rounds.count >= max_rounds
    if math.isinf(limit):
        return result(State.SPENT if is_last else State.OPEN)
    test = _test(rounds, scale, limit, share, lower_is_better, rules.one_sided)
    for i, difference in zip(np.flatnonzero(rounds.remaining[1:]), test.differences, strict=True):
        differences[i] = difference
    # A standard error shrinks with √rounds: the bound of the last analysis in those of now
    needed = limits[-1] * math.sqrt(rounds.count / max_rounds) - plan.allowance
    return result(_state(test, rules, needed, is_last, scale.ratios))


def _state(test: _Test, rules: Rules, needed: float, is_last: bool, ratios: bool) -> State:
    """Return whether to go on, unless this is the `is_last` round.

    `needed`: gain that would be significant at the last analysis with this noise, in standard
    errors of now, less what the gain may be too small by now. With one candidate the gain of
    whichever of the two is ahead counts: stopping for that never makes a false winner. Gain and
    need are equal where nothing differs at all: without noise and without a difference more rounds
    bring nothing.
    """
    if test.has_decided:
        return State.DECIDED
    if rules.within is not None:
        within = math.log1p(rules.within) if ratios else rules.within
        if (np.abs(test.gains) + test.halves <= within).all():
            return State.EQUAL
    if is_last:
        return State.SPENT
    both_ways = len(test.gains) == 1 and not rules.one_sided
    possible = np.abs(test.gains) if both_ways else test.gains
    if (possible > needed * test.errors).any():
        return State.OPEN
    undecided = any(
        count.undecided(test.share, rules.max_rounds)
        for count in test.counts
        if both_ways or count.baseline
    )
    # A mean that happens to be near 0 says nothing where its interval is not even determined
    noisy = [one for one in test.differences if not any(one.diverged[:2])]
    wide = ratios and any(is_wide(one.low, one.high) for one in noisy)
    return State.OPEN if undecided or wide else State.HOPELESS


def _by_signs(values: Values, rules: Rules) -> InterimAnalysis:
    """Test by the sign of each pair [2, pairs] which of two sides has less, exactly.

    Pairs before the first infinite value have had the error of their t-tests. What says so is the
    same if the runs of a pair change places, which signs of equal sides do by chance.
    """
    count, most, verdict = values.shape[1], rules.max_rounds, Verdict.NO_DIFFERENCE
    if count < first_analysis(most):
        return InterimAnalysis([Difference()], count, most, ratios=False)
    lead = int((values[1] < values[0]).sum() - (values[1] > values[0]).sum())
    differing, is_last = int((values[1] != values[0]).sum()), count == most
    start = int(np.isinf(values).any(axis=0).argmax())
    if rules.fixed:
        limits = sign_bounds(rules.level, max(1, differing), math.inf, rules.one_sided)
    else:
        limits = sign_bounds(rules.level, most, EARLY.power, rules.one_sided, start)
    ahead = lead if rules.one_sided else abs(lead)
    if differing and ahead >= limits[differing - 1] and (is_last or not rules.fixed):
        verdict, state = Verdict.BETTER if lead > 0 else Verdict.WORSE, State.DECIDED
    elif is_last:
        state = State.SPENT
    else:
        # What this rate would lead to at the end, and a standard error
        needed = limits[-1] * differing / most - EARLY.allowance * math.sqrt(differing)
        state = State.HOPELESS if ahead <= needed and not rules.fixed else State.OPEN
    return InterimAnalysis([Difference(verdict=verdict)], count, most, state, ratios=False)
