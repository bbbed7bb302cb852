"""Say what a result shows: the one module of sentences, for text, JSON, page, console and CSV.

Everything here is made of facts: a `Result`, a decision of early stopping, verdicts and statuses.
Nothing reads a sentence back.
"""

from __future__ import annotations

import math

import numpy as np

from tunediff.analysis import divergence
from tunediff.analysis.outcome import failure_note
from tunediff.analysis.speed import Why
from tunediff.analysis.statistics import is_wide
from tunediff.core import text
from tunediff.core.clock import PROCESS, ClockSummary
from tunediff.core.outcomes import Ruling, State, Status, Verdict
from tunediff.core.point import one_of
from tunediff.core.target import APART, EVALUATIONS
from tunediff.core.text import number, pluralize
from tunediff.core.trial_record import Decision, TrialRecord
from tunediff.report.result import Candidate, Effect, Ledger, NoiseOfRun, Result, SpeedUp

OPEN = "not determined"
VERDICTS = {
    Verdict.NO_DIFFERENCE: "no significant difference",
    Verdict.NOT_SHOWN: "quality not shown",
    Verdict.ONE_RUN: "one run repeated",
    Verdict.TOO_FEW: "too few runs",
    Verdict.FAILS: "fails on some seeds",
    Verdict.OPEN: "not decided yet",
}
"""What verdicts are called that are no words."""
OTHERS = "others used the machine meanwhile"
FEW_STEPS = 50
"""Optimizer steps below which a result says how few there were."""
NOTHING_TO_CONFIRM = "Nothing to confirm: no configuration but the baseline ended ok on every seed."
INTERVALS = (
    "Brackets: 95 % confidence intervals that account for all candidates and for every interim"
    " analysis, by the noise of each candidate's own differences from the baseline."
)


def verdict(value: Verdict | None) -> str:
    """Return a verdict for a table: `no significant difference`; '' for none."""
    return "" if value is None else VERDICTS.get(value, str(value))


# ---- numbers of a candidate
def interval(effect: Effect | None) -> str:
    """Return a ratio as `0.503 (0.471 … 0.537)` or a difference as `+0.01 (−0.02 … +0.04)`.

    A ratio has as many decimals as its interval needs. Without an interval: the estimate alone, or
    ''. If the interval of a ratio is too wide to be useful: the bound on the side of 1, such as
    `below 0.874`, or `not determined` if 1 lies in it.
    """
    if effect is None or effect.value is None:
        return ""
    middle, low, high, is_ratio = effect.value, effect.low, effect.high, effect.kind == "ratio"
    if is_ratio and is_wide(low, high):
        if high is not None and high < 1:
            return f"below {high:.{_decimals(high, 3)}f}"
        return f"above {low:.3f}" if low is not None and low > 1 else OPEN
    values = [middle] if low is None or high is None else [middle, low, high]
    width = max(values) - min(values)
    # A smaller width is an error of rounding.
    digits = _decimals(width, 2) if width > 1e-9 * middle else _decimals(middle, 3)
    shown = [f"{value:.{digits}f}" if is_ratio else text.signed(value) for value in values]
    return shown[0] if len(shown) == 1 else f"{shown[0]} ({shown[1]} … {shown[2]})"


def _decimals(value: float, significant: int) -> int:
    """Return how many decimals show so many significant digits, at least three."""
    return max(3, significant - 1 - math.floor(math.log10(value))) if value > 0 else 3


def speedup(value: SpeedUp | None) -> str:
    """Return `1.85 (1.61 … 2.12)`, `at least 4`, or `not determined`."""
    if value is None:
        return OPEN
    if value.value is None:
        return f"at least {number(value.at_least)}"
    ends = "" if value.low is None else f" ({number(value.low)} … {number(value.high)})"
    return f"{number(value.value)}{ends}"


def value_of(one: Candidate) -> str:
    """Return a value with its noise and failures: `1.44 ± 0.12, failed on 2 of 5 seeds`."""
    if one.missed:
        middle = "no median" if one.value is None else f"median {number(one.value)}"
        return f"{middle}, {one.missed} of {one.runs} missed"
    notes = [text.with_sd(one.values) or "none", failure_note(one.failures, len(one.values))]
    return ", ".join(filter(None, notes))


def compared(result: Result, one: Candidate) -> str:
    """Return how a candidate compares: `FD 0.5 (0.4 … 0.6) times the baseline's`."""
    if missed := sum(side.missed for side in result.candidates):
        runs = sum(side.runs for side in result.candidates)
        sides = zip("AB", result.candidates, strict=True)
        medians = (f"{side} {value_of(one)}" for side, one in sides)
        return (
            f"{missed} of {runs} runs missed the target; ranked by sign test ({'; '.join(medians)})"
        )
    shown, whose = interval(one.effect), "A's" if result.sides is not None else "the baseline's"
    if shown in ("", OPEN) or one.effect is None:
        return (
            f"the interval of {result.metric} is still too wide to print"
            if shown
            else f"the difference in {result.metric} is unknown"
        )
    how = "times" if one.effect.kind == "ratio" else "compared with"
    return f"{result.metric} {shown} {how} {whose}"


# ---- one trial
def of_trial(trial: TrialRecord) -> str:
    """Return why a trial ended, why it restarted and why it was not captured, as one line."""
    restarts = (
        f"started from the beginning: {reason or 'no checkpoint'}" for reason in trial.restarts
    )
    refused = f"not captured: {trial.not_captured}" if trial.not_captured else ""
    # Whoever asks for trials may end one as pruned for a reason of his own
    stopped = trial.decision if trial.status == Status.PRUNED else None
    is_early = stopped is not None and stopped.outcome == Ruling.STOPPED
    early = stopped_early(stopped) if stopped is not None and is_early else ""
    return "; ".join(filter(None, [early, trial.reason, *restarts, refused]))


def stopped_early(decision: Decision) -> str:
    """Return why early stopping ended a trial, by the numbers that the rule has compared."""
    trials = pluralize(len(decision.others), "trial")
    words = f"{decision.value:.6g} after {decision.train_s:.1f} s: worse than"
    words += f" {decision.median:.6g} (median of {trials})"
    if decision.limit is None or decision.best is None:
        return words
    near = f"{decision.limit_of} of the best, {decision.best:.6g}"
    return f"{words} and than {decision.limit:.6g} ({near})"


# ---- the verdict
def headline(result: Result) -> str:
    """Return what has been shown, with its interval, in a sentence."""
    by, best, base = result.counts, result.counts.leader, result.counts.baseline
    if (failed := by.failure) is not None and by.verdict == Verdict.FAILED:
        return f"{failed.candidate} on seed {failed.seed} failed: {failed.status}: {failed.reason}."
    if by.verdict is None:
        return _one_run_each(by)
    has_base = base is not None and bool(base.values or base.missed)
    if best is None or not (has_base or best.values):
        return "No finalist has run to its end." if result.confirmations else _no_result(by)
    who, other = best.name, "the baseline"
    if by.sides is None and not has_base:
        reached = f"{by.metric} {value_of(best)}"
        return f"{who} is ahead: {reached}; the baseline has no result to compare it with."
    if by.sides is not None:
        who, other = f"B ({best.name})", f"A ({by.candidates[0].name})"
    kinds = {"comparison": ("pair of runs", "pairs of runs"), "confirmation": ("new seed", "")}
    many = pluralize(by.rule.rounds if by.rule else 0, *kinds.get(by.kind, ("seed", "")))
    if best is base:
        return (
            f"No configuration is shown to be better than the baseline by {many}: {by.metric}"
            f" {value_of(best)}."
        )
    shown, noise = compared(by, best), f"by more than the noise of {many}"
    if (reason := _diverged(by)) and by.verdict in (Verdict.BETTER, Verdict.WORSE):
        return f"{who} is {by.verdict} than {other}. {reason}"
    within = "" if by.rule is None else text.size(by.rule.within or 0.0, _is_ratio(best))
    sentences = {
        Verdict.EQUIVALENT: f"{who} is equivalent to {other} within {within} by {many}: {shown}.",
        Verdict.NO_DIFFERENCE: f"{who} shows no significant difference from {other} by {many}:"
        f" {shown}.",
        Verdict.NOT_SHOWN: f"{who} is faster than {other} {noise}: {shown}, and not shown to be good"
        " enough.",
        Verdict.OPEN: f"Not decided yet after {many}: {shown}.",
        Verdict.TOO_FEW: f"{many} so far: too few for a test.",
        Verdict.ONE_RUN: f"{who} against {other} is one run, repeated: the noise of a training is"
        f" not known. {shown}. A command that takes {{seed}} can be judged.",
        Verdict.FAILS: f"{who} is not shown to be better than {other}: {by.metric} {value_of(best)}.",
    }
    # Where no candidate is better, each has a verdict of its own, and this sentence is of one
    found = by.verdict if by.verdict == Verdict.OPEN else best.verdict or by.verdict
    said = sentences.get(found, f"{who} is {found} than {other} {noise}: {shown}.")
    none = (Verdict.NO_DIFFERENCE, Verdict.WORSE, Verdict.FAILS)
    stays = by.kind == "confirmation" and by.verdict in none
    return f"No finalist is better: the baseline stays. {said}" if stays else said


def _is_ratio(one: Candidate) -> bool:
    return one.effect is not None and one.effect.kind == "ratio"


def _no_result(result: Result) -> str:
    statuses = result.search.statuses if result.search is not None else {}
    begun = statuses.get(Status.UNFINISHED, 0)
    under_way = f"{pluralize(begun, 'trial is', 'trials are')} under way" if begun else ""
    ended = f"{result.runs} ended without one, see Failures" if result.runs else ""
    return f"No result yet: {', '.join(filter(None, [under_way, ended])) or 'no trial has begun'}."


def _one_run_each(result: Result) -> str:
    """Return the value of the leading trial, and how it compares as far as the noise allows."""
    best, base, search = result.leader, result.baseline, result.search
    if best is None or search is None:
        return _no_result(result)
    unit = ClockSummary(result.clock).unit(result.budget_unit)
    runs = f" (mean of {len(best.values)} runs)" if len(best.values) > 1 else ""
    reached = f"{result.metric} {number(best.value)}{runs}"
    if result.kind == "search" and result.target and result.objective == "time_to_target_s":
        reached = f"it met {result.target} after {number(best.value)} {unit.seconds}{runs}"
    if note := failure_note(best.failures, len(best.values)):
        reached += f", {note}"
    others = search.statuses.get(Status.OK, 0) - len(best.values)
    if not best.configuration:
        rest = (
            f"none of {others:,} other trials beats it" if others else "nothing else has a result"
        )
        return f"The baseline ({best.trial}) itself is best: {reached}; {rest}."
    who = f"{best.trial} ({best.name}) is {'best' if search.better_than_noise else 'ahead'}"
    if base is None or base.value is None:
        return f"{who}: {reached}; the baseline has no result to compare it with."
    mean = f" (mean of {len(base.values)} runs)" if len(base.values) > 1 else ""
    of_base = f"the baseline's {number(base.value)}{mean}"
    how = f"{interval(best.effect)} {'times' if _is_ratio(best) else 'compared with'} {of_base}"
    if not search.better_than_noise:
        unknown = "this may be noise"
        known = "no significant difference by one run each"
        return (
            f"{who}: {reached}, {how}; {known if search.better_than_noise is False else unknown}."
        )
    sooner = ""
    if search.seconds_to_baseline is not None:
        is_bound = best.speedup is not None and best.speedup.at_least is not None
        after = "by its first evaluation, at" if is_bound else "after"
        after = f"{after} {text.secs(search.seconds_to_baseline)}"
        times = f"{speedup(best.speedup)} times sooner"
        unknown = "" if result.disturbed is not None else ", if others used the machine alike"
        sooner = f" It reaches the baseline's last value {after}: {times}{unknown}."
    return f"{who}: {reached}, {how}.{sooner}"


# ---- what stands behind it
def summary(result: Result) -> list[str]:
    """Return the result in sentences, the verdict first."""
    by = result.counts
    said = [headline(result), *_of_test(by), *_of_search(result), *_of_sides(by)]
    said += [_set_aside(result), *_of_runs(result), clock(result)]
    said += [
        f"{other.name}, of other finalists: {headline(other)}" for other in result.confirmations[1:]
    ]
    return list(filter(None, said))


def _of_test(result: Result) -> list[str]:
    """Return what so many rounds can detect, why there were no more, and how candidates differ."""
    rule, best, base = result.rule, result.leader, result.baseline
    if rule is None or result.failure is not None or result.verdict in (None, Verdict.ONE_RUN):
        return []
    rounds = "pairs" if result.sides is not None else "seeds"
    effects = [one.effect for one in result.candidates if one.effect is not None]
    sizes = sorted(
        effect.resolution
        for effect in effects
        # Values that diverged give sizes without a meaning
        if effect.resolution is not None and (effect.kind != "ratio" or effect.resolution < 1e3)
    )
    said, why = list[str](), ""
    if result.state == State.HOPELESS:
        neither = "would most likely show no significant difference either"
        why = f"; up to {rule.max_rounds} {rounds} {neither}"
    elif result.state == State.SPENT:
        why = f"; all {rule.max_rounds} {rounds} have been run"
    is_open = result.verdict in (Verdict.NO_DIFFERENCE, Verdict.WORSE)
    if sizes and (is_open or result.kind == "search"):
        ends = dict.fromkeys(
            text.size(size, effects[0].kind == "ratio") for size in (sizes[0], sizes[-1])
        )
        rough = " (a rough estimate)" if result.rough else ""
        said.append(
            f"{rule.rounds} {rounds} can detect differences of about"
            f" {' to '.join(ends)}{rough}{why}."
        )
    if best is not None and best.value_when_chosen is not None:
        note = failure_note(best.failures, len(best.values))
        now = ", ".join(filter(None, [f"{text.with_sd(best.values)} on new seeds", note]))
        said.append(
            f"The {result.metric} of {best.name} was {number(best.value_when_chosen)}"
            f" when it was chosen, and is {now}."
        )
    leader = next((one for one in result.candidates if one.configuration), None)
    if result.kind == "confirmation" and best is not None and leader is not best and (
        best.verdict == Verdict.BETTER
    ):  # fmt: skip
        said.append(
            f"{best.name} was selected on these new seeds: its interval accounts for that, its"
            " mean is too optimistic."
        )
    is_usual = (rule.level, rule.one_sided, rule.fixed) == (0.05, False, False)
    if result.sides is not None and not is_usual:
        sided = "one-sided: nothing is called worse" if rule.one_sided else "two-sided"
        times = f"once, after {rule.max_rounds} pairs" if rule.fixed else "after every pair"
        said.append(f"Tested at a level of {100 * rule.level:g} %, {sided}, {times}.")
    if rule.at_once > 1:
        said.append(f"{rule.at_once} runs were at the same time.")
    if base is not None and result.verdict == Verdict.OPEN and result.kind != "comparison":
        said += so_far(result)
    return said


def so_far(result: Result) -> list[str]:
    """Return where each candidate stands: `lr=0.003 0.62 (0.41 … 0.93), not decided yet`."""
    return [
        f"{one.name} {', '.join(filter(None, [interval(one.effect), verdict(one.verdict)]))}"
        for one in result.candidates
        if one is not result.baseline
    ]


def progress(result: Result) -> str:
    """Return the line that is printed after every round."""
    unit = "pair" if result.sides is not None else "seed"
    many = pluralize(result.rule.rounds if result.rule is not None else 0, unit)
    if result.sides is None:
        return f"after {many}: {'; '.join(so_far(result)) or 'nothing to compare'}"
    shown = _diverged(result).removesuffix(".") or compared(result, result.candidates[-1])
    return f"after {many}: {shown}: {verdict(result.verdict)}"


def _diverged(result: Result) -> str:
    """Return which runs of two sides diverged, where their count is the only difference."""
    effect = result.candidates[-1].effect if result.sides is not None else None
    if effect is None or effect.low is None or effect.high is None:
        return ""
    a, b = (np.asarray(one.values) for one in result.candidates)
    if not effect.low <= (1.0 if effect.kind == "ratio" else 0.0) <= effect.high or len(a) != len(
        b
    ):
        return ""
    found, parts = divergence.diverged([a, b], result.direction == "min"), list[str]()
    for side, values, mask in zip("AB", (a, b), found, strict=True):
        note = failure_note(int(mask.sum()), int((~mask).sum()), f"{side} diverged")
        parts += [f"{note}, to {', '.join(map(number, values[mask].tolist()))}"] if note else []
    than = f"over {divergence.FACTOR:g} times the smaller median"
    return f"{' and '.join(parts)}: {than}." if parts else ""


def _of_sides(result: Result) -> list[str]:
    """Return what a comparison of two sides says besides its verdict."""
    sides, rule = result.sides, result.rule
    if sides is None or rule is None or result.failure is not None:
        return []
    a, b = result.candidates
    pairs = list(zip(a.values, b.values, strict=False))
    said = []
    if pairs and all(x == y for x, y in pairs) and not a.missed + b.missed:
        said.append(
            f"WARNING: both sides have the same values in all {len(pairs)} pairs, though their"
            " code or configuration differs: does the change reach what runs?"
        )
    elif result.verdict not in (Verdict.OPEN, Verdict.ONE_RUN):
        said.append("B was ahead in {} of {} pairs.".format(*sides.ahead))
        said += filter(None, [_diverged(result)] * (result.verdict == Verdict.NO_DIFFERENCE))
    if (least := sides.one_run_each_tells) is not None:
        said.append(
            f"With one run each, only differences above {text.size(least, _is_ratio(b))}"
            " are significant."
        )
    if rule.equal_sides:
        found = (
            f"the difference is false; a share of {rule.level:.2g} of such comparisons may find one"
        )
        is_found = result.verdict in (Verdict.BETTER, Verdict.WORSE)
        is_right = found if is_found else "no difference is the right result"
        said.append(f"Both sides are the same, on different seeds: {is_right}.")
    if a.evaluations and b.evaluations and result.target and (
        max(a.evaluations, b.evaluations) >= 1.5 * min(a.evaluations, b.evaluations)
    ):  # fmt: skip
        said.append(
            f"Runs of A have {a.evaluations:g} evaluations, runs of B {b.evaluations:g}: the mean"
            f" of the last {EVALUATIONS} that lie {APART:.0%} of the seconds apart has to meet the"
            " target."
        )
    if sides.gates:
        words = {"target": f"the mean of B meets {rule.target}"}
        words["margin"] = f"B is not worse than A by {number(rule.margin)}"
        shown = [
            f"that {words[gate.requirement]} is {'' if gate.shown else 'not '}shown"
            + ("" if gate.p is None else f" (p = {gate.p:.2g} by one t-test of these pairs)")
            for gate in sides.gates
        ]
        said.append(
            f"Quality, at a level of {rule.level / (1 if rule.one_sided else 2):.2g}:"
            f" {'; '.join(shown)}."
        )
    setup = [one.setup_s for one in (a, b) if one.setup_s is not None]
    counts = len(setup) == 2 and result.start_up_share is None and bool(result.budget_s)
    if counts and abs(setup[0] - setup[1]) > 0.02 * (result.budget_s or 0.0):
        spent = f"B spends {text.seconds(setup[1])} and A {text.seconds(setup[0])}"
        said.append(f"Before its first batch {spent}, which the budget does not count.")
    if sides.results_per_process:
        many = " to ".join(map(str, dict.fromkeys(sides.results_per_process)))
        said.append(
            f"A process makes {many} runs. Its value is their mean; pairs are of processes."
        )
    if sides.unseeded:
        said.append("The command takes no seed: pairs are of runs that follow each other.")
    if sides.ledger is not None:
        said.append(_ledger(sides.ledger))
    if a.holdout and b.holdout:
        of_a, of_b = (number(float(np.mean(one.holdout))) for one in (a, b))
        said.append(f"The second judge, which decided nothing: {of_a} for A, {of_b} for B.")
    if sides.holdout_failure is not None:
        said.append(f"The second judge, which decides nothing, failed: {sides.holdout_failure}.")
    runs = "runs on different seeds gave the same values: does the seed have an effect?"
    return [*said, *(f"{side}: {runs}" for side in sides.without_effect)]


def _ledger(ledger: Ledger) -> str:
    """Return the place of a comparison in its ledger, and what is due."""
    place = (
        f"Comparison {ledger.number} of the ledger, at a level of {ledger.level:.2g}:"
        f" {pluralize(ledger.kept, 'change')} kept so far; of all that are, at most"
        f" {ledger.budget:.0%} are expected to have no effect."
    )
    due = (
        f" {ledger.kept_since_confirmed} were kept without a recheck: compare the head with"
        f" {str(ledger.confirmed)[:12]}, with --ledger --confirm, and go back unless it is better."
    )
    return f"{place}{due * ledger.recheck_due}"


def _of_search(result: Result) -> list[str]:
    """Return the noise of one run, and what is as good as the best."""
    search, said = result.search, list[str]()
    if search is None or result.leader is None:
        return said
    if search.noise is not None and not result.confirmations:
        said.append(f"Noise: {noise(search.noise, result.metric)}.")
    elif result.verdict is None:
        said.append("One run each: some of that may be chance.")
    if search.within_noise_of_best and not result.confirmations:
        names, more = search.within_noise_of_best[:8], len(search.within_noise_of_best) - 8
        rest = f" and {more} more" if more > 0 else ""
        said.append(
            f"Within the noise of the best, and so possibly as good: {', '.join(names)}{rest}."
        )
    return said


def noise(value: NoiseOfRun, label: str) -> str:
    """Return the noise: `3.1 % of one run (sd, from 2 runs of the baseline: a rough estimate)`."""
    size = f"{number(100 * value.sd)} %" if value.relative else f"{number(value.sd)} {label}"
    many = value.configurations
    source = "the baseline" if many == 1 else f"{many} configurations"
    rough = ": a rough estimate" if value.rough else ""
    return f"{size} of one run (sd, from {value.runs} runs of {source}{rough})"


def _set_aside(result: Result) -> str:
    """Return which candidate would be better, had it not failed on a seed; '' for none."""
    sign, best = 1 if result.direction == "min" else -1, result.leader
    limit = math.nan if best is None or best.value is None else sign * best.value
    for one in result.candidates:
        if one is not best and one.failures and sign * (one.value or 0.0) < limit and one.values:
            note = failure_note(one.failures, len(one.values))
            return f"{one.name}, with {number(one.value)}, {note}."
    return ""


def _of_runs(result: Result) -> list[str]:
    """Return what makes values tell less: few steps, other processes, unequal workers."""
    steps, said = result.counts.fewest_steps, list[str]()
    if steps is not None and steps < FEW_STEPS and result.counts.failure is None:
        said.append(
            f"The shortest training took {pluralize(steps, 'optimizer step')}: such early"
            " values say little about later ones. A longer --budget gives more steps."
        )
    if result.disturbed:
        said.append(
            f"During {result.disturbed:,} of {pluralize(result.runs, 'run')} others used the"
            " machine, so their speed, and their results within the budget, may be worse."
        )
    if len(result.workers) > 1:
        said.append(
            f"Workers were unequal ({'; '.join(result.workers)}): do not compare small differences."
        )
    return said


def clock(result: Result) -> str:
    """Return which seconds counted of a command; '' for workloads."""
    if result.start_up_share is None:
        return ""
    before = "their first value" if result.clock == PROCESS else "the clock began"
    share = f"{result.start_up_share:.0%} of the processes' seconds came before {before}"
    return f"The clock: {result.clock}; {share}."


def why(
    parts: Why, label: str, unit: str, seconds: str, equal_learning: bool, trust: str
) -> str:  # fmt: skip
    """Return how much of a gain is learning and how much speed; a share below 0 % is a loss.

    label, unit, seconds: names of the objective, of samples and of seconds. equal_learning: whether
    the values at equal samples differ by no more than the noise. trust: what runs these are.
    """
    (base, winner), samples, at_samples = parts.at_seconds, parts.samples, parts.at_samples
    ratio = samples[1] / samples[0] if samples[0] else 1.0
    times_as = "" if abs(ratio - 1) < 0.02 else f"{number(ratio)} times "
    many, equal = f"{times_as}as many {unit} in the same seconds", f"{parts.equal_samples:,} {unit}"
    gain = (
        f"{label} {number(winner)} instead of {number(base)} at {number(parts.seconds)} {seconds}"
    )
    if parts.learning is None or at_samples is None:
        return (
            f"{gain}; the share of speed is unknown, since one of them had no value at"
            f" {equal}; {trust}."
        )
    same = f"{number(at_samples[1])} instead of {number(at_samples[0])} at {equal}"
    if parts.total >= 0:
        return f"In these two runs it is not ahead: {gain}, {same}, with {many}; {trust}."
    if equal_learning:
        within = f"the difference at equal {unit} is within the noise of one run ({same})"
        return f"The gain is {gain}, with {many}; {within}; {trust}."
    share = round(parts.learning / parts.total, 3)
    learning = f"{text.percent(share)} is learning more from each {one_of(unit)} ({same})"
    return (
        f"Of the gain, {gain}, {learning} and {text.percent(1 - share)} is speed ({many}); {trust}."
    )
