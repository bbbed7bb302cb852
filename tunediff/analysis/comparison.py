"""Compare candidates over seeds with a baseline, by what their journals say and by nothing else.

A comparison of two sides, the confirming runs of a search and a search with several seeds are one
thing: candidates × seeds, the baseline first, and rules that were fixed before the first run. To
judge two sides no configuration or code of theirs is needed: `tunediff verify` reads the folder of
somebody else.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunediff import config as cfg
from tunediff.analysis import RATE, Results, journals, last, reach
from tunediff.analysis.outcome import Candidate, Outcome, failed, knobs_of
from tunediff.analysis.sequential import InterimAnalysis, Rules, analyse
from tunediff.analysis.speed import inverse, mean_speedup
from tunediff.analysis.statistics import (
    ROUGH_FREEDOM,
    Difference,
    Estimate,
    differences,
    has_many_digits,
)
from tunediff.analysis.targets import QualityGate, quality_gates, seconds_of, target_gate
from tunediff.config import ConfigError
from tunediff.core import text, trial_record
from tunediff.core.outcomes import State, Status, Verdict
from tunediff.core.target import TIME_TO_TARGET
from tunediff.core.trial_record import TrialRecord
from tunediff.experiment.model import CONFIG, SIDES, Experiment, is_comparison


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Candidates × seeds, and what they show under the rules; see `read` and `over_seeds`."""

    folder: Path
    candidates: list[Candidate]
    """The baseline first, if it has begun."""
    objective: str
    """Name of the metric as runs and judges print it: that of the curves."""
    metric: str
    """Name of the deciding metric in points: the objective, or that of a final evaluation."""
    mode: str
    """Whether smaller (`min`) or larger (`max`) values of the metric are better."""
    rules: Rules
    allows_ratios: bool
    """Whether positive values are compared by ratios."""
    at_once: int = 1
    """Runs at the same time."""
    of_sides: Experiment | None = None
    """The experiment whose two sides are compared; None: a search."""
    of_search: Results | None = None
    """The search whose trials are compared; None: two sides."""
    search: Results | None = None
    """The search whose finalists run again in these trials."""
    others: Sequence[Comparison] = ()
    """The other confirmations of that search, of other finalists."""
    analysis: InterimAnalysis = dataclasses.field(default_factory=InterimAnalysis)
    """The test of the rounds so far; its differences are in the order of `challengers`."""

    @classmethod
    def read(cls, folder: Path) -> Comparison:
        """Return the comparison of two sides in a folder. Raises `ConfigError` if it is none."""
        if not is_comparison(folder):
            found = sorted(path.name for path in folder.parent.glob("*/") if is_comparison(path))
            names = ", ".join(found) or "none"
            raise ConfigError(
                f"{folder.name}: no such comparison in {folder.parent}; there are: {names}"
            )
        experiment = Experiment.read(folder)
        objective, mode, rules = experiment.objective, experiment.mode, Rules.of(experiment)
        metric = objective if experiment.judge is None else f"final_{objective}"
        records, candidates = trial_record.read_trials(folder), list[Candidate]()
        for row, side in enumerate(SIDES):
            runs = [run for run in records if run.number % len(SIDES) == row]
            rounds = {run.number // len(SIDES): run for run in runs}  # numbers go by rounds
            outcome = Outcome(runs, metric, mode == "min", rules.max_rounds)
            candidates.append(Candidate(side, {}, row == 0, outcome, rounds))
        ratios, at_once = mode == "min" or rules.by_time, experiment.devices
        comparison = cls(
            folder, candidates, objective, metric, mode, rules, ratios, at_once, experiment
        )
        return comparison.judged()

    # ---- what is compared
    @property
    def results(self) -> Results:
        """Return the search whose trials are compared; there must be one."""
        assert self.of_search is not None
        return self.of_search

    @property
    def baseline(self) -> Candidate | None:
        """Return the candidate with which the others are compared; None if it did not run."""
        return next((one for one in self.candidates if one.is_baseline), None)

    @property
    def challengers(self) -> list[Candidate]:
        """Return all candidates except the baseline."""
        return [candidate for candidate in self.candidates if not candidate.is_baseline]

    @functools.cached_property
    def rounds(self) -> list[tuple[TrialRecord | None, ...]]:
        """Return the runs of each round that has begun, in the order of the candidates."""
        numbers = sorted({number for one in self.candidates for number in one.rounds})
        return [tuple(one.rounds.get(number) for one in self.candidates) for number in numbers]

    @property
    def runs(self) -> list[TrialRecord]:
        """Return all runs that have begun, round by round."""
        return [run for run in itertools.chain(*self.rounds) if run is not None]

    @property
    def lower_is_better(self) -> bool:
        """Return whether smaller ones of the compared values or seconds are better."""
        return self.mode == "min" or self.rules.by_time

    @functools.cached_property
    def values(self) -> NDArray[np.float64]:
        """Return what is compared [candidates, rounds]: value or seconds; NaN: there is none; ∞:
        the run missed its target."""
        if self.rules.by_time:
            return self._of_runs(lambda run: seconds_of(run, self.rules))
        return self.qualities

    @functools.cached_property
    def qualities(self) -> NDArray[np.float64]:
        """Return the metric of every run that ended ok, or missed its target [candidates, rounds];
        NaN: none."""
        missed = Status.MISSED
        return self._of_runs(
            lambda run: last(run, self.metric) if run.status == missed else run.value(self.metric)
        )

    def _of_runs(self, read: Callable[[TrialRecord], float | None]) -> NDArray[np.float64]:
        values = [[run and read(run) for run in runs] for runs in self.rounds]
        return np.array(values, dtype=float).reshape(-1, len(self.candidates)).T

    # ---- the test
    def judged(self) -> Comparison:
        """Return the comparison with the difference and the verdict of each candidate."""
        tested = dataclasses.replace(self, analysis=self._analysis())
        found = iter(tested.analysis.differences)
        candidates = [
            dataclasses.replace(
                one,
                difference=Difference(verdict=Verdict.BASELINE)
                if one.is_baseline
                else tested._final(one, next(found, Difference())),
            )
            for one in self.candidates
        ]
        return dataclasses.replace(tested, candidates=candidates)

    def _analysis(self) -> InterimAnalysis:
        """Test all rounds so far; candidates that failed are out, and do not hold up the others."""
        if self.baseline is None:
            return InterimAnalysis(max_rounds=self.rules.max_rounds, ratios=self.allows_ratios)
        values, rules = self.values.copy(), self.rules
        is_out = [
            one.fails if rules.corrected else self.failure_of(one) is not None
            for one in self.candidates
        ]
        if not self.has_failed:
            values[is_out] = np.nan
        if rules.corrected:
            sessions = journals.sessions(self.results.folder)
            state = State.SPENT if journals.over(self.results, sessions) else State.OPEN
            found, ratios = differences(values, self.lower_is_better, self.allows_ratios)
            return InterimAnalysis(found, values.shape[1], rules.max_rounds, state, ratios)
        if rules.within is not None and self.lower_is_better and bool((values <= 0).any()):
            # The share was meant of A's values: without ratios it becomes a difference in units
            share = rules.within * abs(float(np.nanmean(values[0])))
            rules = dataclasses.replace(rules, within=share)
        return analyse(values, rules, self.lower_is_better, self.allows_ratios)

    def _final(self, candidate: Candidate, difference: Difference) -> Difference:
        """Return a difference with the verdict: `open` until the test has ended, if it is not
        significant, or if its seconds are fewer and its quality is not shown yet."""
        if candidate.fails:
            # The runs that survived are no sample of what it reaches
            return Difference(verdict=Verdict.FAILS)
        verdict = difference.verdict
        if self.is_one_run:
            verdict = Verdict.ONE_RUN
        elif verdict == Verdict.BETTER and not self.quality_shown:
            verdict = Verdict.NOT_SHOWN if self.ended else Verdict.OPEN
        elif verdict in (Verdict.NO_DIFFERENCE, Verdict.TOO_FEW) and not self.ended:
            verdict = verdict if self.failure_of(candidate) else Verdict.OPEN
        elif verdict == Verdict.NO_DIFFERENCE and self.state == State.EQUAL:
            verdict = Verdict.EQUIVALENT
        return dataclasses.replace(difference, verdict=verdict)

    @property
    def state(self) -> State:
        """Return how far the test is."""
        return self.analysis.state

    @property
    def ended(self) -> bool:
        """Return whether no further round is needed: decided, failed, or one run repeated."""
        if self.has_failed or self.is_one_run:
            return True
        test = self.analysis
        is_better = any(one.verdict == Verdict.BETTER for one in test.differences)
        # Fewer seconds are no gain yet: pairs go on until the quality is shown, or the last one
        waits = is_better and test.rounds < test.max_rounds
        return test.ended and not (waits and not self.quality_shown)

    @property
    def verdict(self) -> Verdict:
        """Return what the comparison has shown: of two sides, how B compares with A; of more
        candidates, whether any is better, or else what all of them are."""
        if self.has_failed:
            return Verdict.FAILED
        if self.is_one_run:
            return Verdict.ONE_RUN
        if not self.ended:
            return Verdict.OPEN
        verdicts = {one.verdict for one in self.challengers}
        if Verdict.BETTER in verdicts:
            return Verdict.BETTER
        return verdicts.pop() if len(verdicts) == 1 else Verdict.NO_DIFFERENCE

    # ---- failures
    def failure_of(self, candidate: Candidate) -> TrialRecord | None:
        """Return the first run of a candidate that failed."""
        return next((run for run in candidate.runs if failed(run)), None)

    def missed(self, candidate: Candidate) -> int:
        """Return how many runs missed the target, whose seconds are compared."""
        return int(np.isinf(self.values[self.candidates.index(candidate)]).sum())

    @property
    def challengers_failed(self) -> bool:
        """Return whether each candidate but the baseline has failed."""
        return bool(self.challengers) and all(map(self.failure_of, self.challengers))

    @property
    def has_failed(self) -> bool:
        """Return whether nothing is left to compare: the baseline has failed, or all others.

        Where there is one test of all runs, what failed ends nothing: the others are compared.
        """
        if self.rules.corrected:
            return False
        has_baseline = self.baseline is None or self.failure_of(self.baseline) is None
        return self.challengers_failed or not has_baseline

    @property
    def failure(self) -> TrialRecord | None:
        """Return the first run whose failure ended the comparison; None: it has not failed."""
        failures = filter(failed, self.runs)
        return next(failures, None) if self.has_failed else None

    @property
    def is_one_run(self) -> bool:
        """Return whether all runs of a side are one run, repeated: without a seed the noise of a
        training is not known, whatever the two sides differ by."""
        values = self.complete
        if not self.rules.unseeded or values.shape[1] < 2:
            return False
        repeated = (values == values[:, :1]).all(axis=1)
        exact = [has_many_digits(row[0]) for row in values.tolist()]  # equal, and not by chance
        return bool(repeated.all() or (repeated & exact).any())

    # ---- the gate of a comparison by time
    @functools.cached_property
    def gates(self) -> list[QualityGate]:
        """Return what has to be shown of B's values for its seconds to count; see `targets`."""
        return quality_gates(self.qualities, self.runs, self.rules, self.mode == "min")

    @property
    def quality_shown(self) -> bool:
        return all(gate.shown for gate in self.gates)

    @property
    def target_p(self) -> float | None:
        """Return the one-sided p-value of a single test that the mean of B meets the target."""
        if self.rules.target is None:
            return None
        b = self.qualities[1]
        return target_gate(b[np.isfinite(b)], self.rules.target, self.rules).p

    # ---- the winner
    @functools.cached_property
    def winner(self) -> Candidate | None:
        """Return the candidate that is significantly better than the baseline, or None.

        Of the finalists of a search that is its leader, which was chosen before, if it is better;
        then another one only if it is significantly better than the leader too.
        """
        better = [one for one in self.challengers if one.verdict == Verdict.BETTER]
        sign = 1.0 if self.lower_is_better else -1.0
        if not better:
            return None
        if self.search is None:
            return min(better, key=lambda one: sign * (one.difference.estimate or 0.0))
        best = min(better, key=lambda one: sign * float(np.mean(one.values(self.metric))))
        leader = self.challengers[0]
        return leader if leader in better and not self._beats(best, leader) else best

    def _beats(self, candidate: Candidate, leader: Candidate) -> bool:
        """Return whether a candidate is significantly better than the search's leader."""
        if candidate is leader:
            return False
        rows = [self.candidates.index(one) for one in (leader, candidate)]
        rules = dataclasses.replace(self.rules, level=self.rules.level / len(self.challengers))
        test = analyse(self.values[rows], rules, self.lower_is_better, self.allows_ratios)
        return test.differences[0].verdict == Verdict.BETTER

    @property
    def leader(self) -> Candidate | None:
        """Return the winner, or else the first candidate besides the baseline that ran."""
        return self.winner or next((one for one in self.challengers if one.done), None)

    @property
    def is_conclusive(self) -> bool:
        """Return whether the baseline stays if there is no `winner`."""
        has_ended = self.analysis.ended or self.challengers_failed
        return has_ended and self.baseline is not None and bool(self.baseline.done)

    def candidate_of(self, trial: TrialRecord) -> Candidate | None:
        """Return the candidate with the configuration of a trial, one of the search if finalists
        of one are compared."""
        if self.search is None:
            of_trial = (one for one in self.candidates if trial.name in {r.name for r in one.runs})
        else:
            knobs = knobs_of(trial)
            of_trial = (one for one in self.candidates if knobs_of(one.runs[0]) == knobs)
        return next(of_trial, None)

    # ---- how sure it is
    @property
    def noise_is_rough(self) -> bool:
        """Return whether the noise is known only to a factor of two, because of few rounds."""
        return self.analysis.rounds - 1 < ROUGH_FREEDOM

    @property
    def complete(self) -> NDArray[np.float64]:
        """Return the compared values of the rounds in which no candidate lacks one."""
        return self.values[:, np.isfinite(self.values).all(axis=0)]

    def speedup(self, candidate: Candidate) -> Estimate | None:
        """Return how many times sooner a candidate that is significantly better reaches the
        baseline's end, or the ratio of rates, or of the seconds that decided; None: unknown."""
        if candidate.verdict != Verdict.BETTER or np.isinf(self.values).any():
            return None
        if self.rules.by_time or self.objective == TIME_TO_TARGET:
            return inverse(candidate.difference) if self.ratios else None
        row = self.candidates.index(candidate)
        pairs = [(runs[0], runs[row]) for runs in self.rounds]
        found = [
            reach.SpeedUp(float(values[row] / values[0]), False)
            if self.objective == RATE
            else reach.speedup(base, run, self.objective, self.mode)
            for (base, run), values in zip(pairs, self.values.T, strict=True)
            if base and run and np.isfinite(values[[0, row]]).all()
        ]
        return mean_speedup([one for one in found if one is not None])

    # ---- tables
    @property
    def ratios(self) -> bool:
        """Return whether differences are ratios to the baseline."""
        return self.analysis.ratios

    @property
    def label(self) -> str:
        """Return the label of the deciding metric, as the measurements give it."""
        if self.of_search is None:
            declared = cfg.of(self.configs[0]).objective
            points = (point for run in self.runs for point in run.points)
            default = declared.label if declared.name == self.metric else self.metric
            return str(next((point["label"] for point in points if "label" in point), default))
        if self.metric == self.objective:
            return self.results.label
        labels = (last(run, "final_label") for run in self.runs)
        return str(next(filter(None, labels), f"final {self.results.label}"))

    @property
    def experiment(self) -> Experiment:
        """Return the experiment whose two sides are compared; there must be one."""
        assert self.of_sides is not None
        return self.of_sides

    @property
    def names(self) -> tuple[str, str]:
        """Return the two sides as the user named them."""
        a, b = (self.experiment.candidates[side] for side in SIDES)
        return a, b

    @functools.cached_property
    def configs(self) -> tuple[Any, Any]:
        """Return the configurations of both sides, which no verdict needs. Raises `ConfigError`."""
        a, b = (cfg.load(self.folder / side / CONFIG) for side in SIDES)
        return a, b


# ---- searches
def over_seeds(results: Results) -> Comparison:
    """Compare a search's configurations with its baseline, by one test of each over its seeds."""
    rules = Rules(results.space.seeds, corrected=True)
    return of_results(results, rules, results.metric, results.ratios).judged()


def of_results(results: Results, rules: Rules, metric: str, ratios: bool) -> Comparison:
    """Return all configurations of a search, the baseline first if it ran at all; not tested."""
    candidates = list[Candidate]()
    for found in results.outcomes:
        changed = results.space.changed(found.runs[0].knobs)
        outcome = dataclasses.replace(found, metric=metric)
        rounds = {run.seed: run for run in (*outcome.runs, *outcome.done)}
        candidates.append(Candidate(text.knobs(changed), changed, not changed, outcome, rounds))
    candidates.sort(key=lambda one: not one.is_baseline)
    space = results.space
    return Comparison(
        results.folder, candidates, results.metric, metric, space.mode, rules, ratios,
        space.at_once, of_search=results,
    )  # fmt: skip
