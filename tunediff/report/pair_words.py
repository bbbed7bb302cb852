"""Word the result of a comparison of two configurations; needs neither pandas nor matplotlib."""

from __future__ import annotations

import statistics

from tunediff.analysis import divergence, sides
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.outcome import failure_note
from tunediff.analysis.sides import SIDES, of_commands
from tunediff.analysis.statistics import LEVEL, mean
from tunediff.core import text
from tunediff.core.clock import own_s
from tunediff.core.outcomes import Verdict
from tunediff.core.target import APART, EVALUATIONS
from tunediff.core.text import pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report.verdicts import disturbed_of, why_stopped
from tunediff.report.words import OPEN, VERDICTS, interval, size


def sentences(pairs: Comparison) -> list[str]:
    """Return the result in sentences: verdict, reason, and what so many pairs can detect."""
    test = pairs.analysis
    if (failed := pairs.failure) is not None:
        return [failure(pairs, failed)]
    if pairs.verdict == Verdict.ONE_RUN:
        return [_one_run(pairs)]
    if (resolution := test.differences[0].resolution) is None:
        return [f"{pluralize(test.rounds, 'pair')} so far: too few for a test."]
    difference, count = _difference(pairs), f"{pluralize(test.rounds, 'pair')} of runs"
    if pairs.verdict == Verdict.OPEN:
        return [f"Not decided yet after {count}: {difference}."]
    lines = _verdict(pairs, count, difference, resolution)
    ahead = f"B was ahead in {_pairs_won(pairs)} of {test.rounds} pairs."
    a, b = pairs.complete
    if (a == b).all():
        ahead = (
            f"WARNING: both sides have the same values in all {test.rounds} pairs, though their"
            " code or configuration differs: does the change reach what runs?"
        )
    if (least := sides.one_run_detects(pairs)) is not None:
        single = f"only differences above {_size(pairs, least)} are significant"
        ahead = f"With one run each, {single}; {ahead}"
    runs = pairs.runs
    others = [
        _equal_sides(pairs),
        _evaluations(pairs),
        _quality(pairs),
        disturbed_of(runs, "run"),
        _setup(pairs),
        _rules(pairs),
        _ledger(pairs),
        _holdout(pairs),
        *without_effect(pairs),
    ]
    return list(filter(None, [*lines, ahead, *others]))


def _pairs_won(pairs: Comparison) -> int:
    a, b = pairs.complete
    return int((b < a if pairs.lower_is_better else b > a).sum())


def without_effect(pairs: Comparison) -> list[str]:
    """Return sentences on runs that are equal on different seeds, of one side or of both."""
    sentences = []
    for side, seeds, value in sides.repeated_runs(pairs):
        sentence = (
            f"{side}: seeds {seeds[0]} and {seeds[1]} gave the same values, as they were printed:"
            " has the seed an effect?"
        )
        if not side:
            sentence = (
                f"all {len(pairs.runs)} runs of A and B ended at {value}: is it a value of the"
                " training?"
            )
        sentences.append(sentence)
    return sentences


def _verdict(pairs: Comparison, count: str, difference: str, resolution: float) -> list[str]:
    test, (a, b) = pairs.analysis, pairs.names
    reason = diverged(pairs)
    by = "" if reason else f" by more than the noise of {count}: {difference}"
    lines = [f"B ({b}) is {pairs.verdict} than A ({a}){by}."]
    if pairs.verdict == Verdict.EQUIVALENT and pairs.rules.within is not None:
        lines = [
            f"B ({b}) is equivalent to A ({a}) within {size(pairs.rules.within, test.ratios)} by"
            f" {count}:"
            f" {difference}."
        ]
    if pairs.verdict == Verdict.NOT_SHOWN:
        lines = [f"B ({b}) is faster than A ({a}){by}, and not shown to be good enough."]
    if pairs.verdict == Verdict.NO_DIFFERENCE:
        why = why_stopped(test, "pairs")
        lines = [
            f"B ({b}) shows no significant difference from A ({a}) by {count}: {difference}.",
            f"They can detect differences of about {_size(pairs, resolution)}{why}.",
        ]
    return [*lines, reason] if reason else lines


def diverged(pairs: Comparison) -> str:
    """Return which runs diverged, where their count is the only difference; '' if none did."""
    test = pairs.analysis
    difference, equal = test.differences[0], 1.0 if test.ratios else 0.0
    low, high = difference.low, difference.high
    if low is None or high is None or not low <= equal <= high:
        return ""
    a, b = pairs.complete
    parts = []
    found = divergence.diverged(a, b, pairs.lower_is_better)
    for side, values, mask in zip("AB", (a, b), found, strict=True):
        which = values[mask]
        note = failure_note(len(which), len(values) - len(which), f"{side} diverged")
        parts += [f"{note}, to {', '.join(map(text.number, which))}"] if note else []
    if not parts:
        return ""
    than = f"over {divergence.FACTOR:g} times the smaller median"
    return f"{' and '.join(parts)}: {than}."


def _one_run(pairs: Comparison) -> str:
    (a, b), equal = pairs.names, pairs.values
    sides = " and ".join(
        side for side, row in zip(SIDES, equal, strict=True) if (row == row[0]).all()
    )
    return (
        f"B ({b}) against A ({a}) is one run, repeated: the noise of a training is not known."
        f" {_difference(pairs)}; all runs of {sides} are equal. A command that takes {{seed}} can"
        " be judged."
    )


def _equal_sides(pairs: Comparison) -> str:
    """Return what a comparison of equal sides says of the comparison; '' of another one."""
    if not pairs.rules.equal:
        return ""
    what = "Both sides are the same code and configuration, on different seeds"
    if pairs.verdict not in (Verdict.BETTER, Verdict.WORSE):
        return f"{what}: that nothing is found is right."
    share = f"{100 * pairs.rules.level:g} %"
    fixed = ", ".join(
        name for name, what in sides.BEFORE_THE_PAIRS.items() if what == sides.ONE_EACH
    )
    return (
        f"{what}: this difference is none. {share} of such comparisons may find one. Each side has"
        f" its own: {fixed}."
    )


def _evaluations(pairs: Comparison) -> str:
    """Return that one side was evaluated more often on its way to the target; '' if it was not."""
    if pairs.rules.counted != "first" or not all(run and run.points for run in pairs.rounds[0]):
        return ""
    sides = [
        [run.points for run in side if run is not None and run.points]
        for side in zip(*pairs.rounds, strict=True)
    ]
    prints = of_commands(pairs.folder)  # of their points not all are kept
    a, b = (
        statistics.median(points[-1].samples if prints else len(points) for points in side)
        for side in sides
    )
    if max(a, b) < 1.5 * min(a, b):
        return ""
    return (
        f"Runs of A have {a:g} evaluations, runs of B {b:g}: the mean of the last {EVALUATIONS} that lie"
        f" {APART:.0%} of the seconds apart has to meet the target."
    )


def _quality(pairs: Comparison) -> str:
    """Return what is shown of the values that allow the seconds to count; '' where nothing is."""
    parts = []
    for gate in pairs.gates:
        p = "" if gate.p is None else f" (p = {gate.p:.2g} by one t-test of these pairs)"
        parts.append(f"that {gate.statement} is {'' if gate.shown else 'not '}shown{p}")
    return f"Quality: {'; '.join(parts)}." if parts else ""


def _holdout(pairs: Comparison) -> str:
    """Return what the second judge says; '' without one."""
    holdout = sides.content(pairs.folder, sides.HOLDOUT_VALUES)
    a, b = (mean(holdout.get(side, [])) for side in SIDES)
    if a is None or b is None:
        why = holdout.get("failure", "")
        return f"The second judge, which decides nothing, failed: {why}." if why else ""
    return (
        f"The second judge, which decided nothing: {pairs.objective} {text.number(a)} for A,"
        f" {text.number(b)} for B."
    )


def _ledger(pairs: Comparison) -> str:
    """Return the place of the comparison in its ledger, and what is due; '' without one."""
    if not (ledger := sides.content(pairs.folder, sides.LEDGER)):
        return ""
    place = (
        f"Comparison {ledger['number']} of the ledger, at a level of {ledger['level']:.2g}:"
        f" {pluralize(ledger['kept'], 'change')} kept so far, of which {ledger['budget']:.0%} may"
        " be none."
    )
    if not ledger["recheck_due"]:
        return place
    kept, commit = ledger["kept_since_confirmed"], str(ledger["confirmed"])[:12]
    return (
        f"{place} {kept} were kept since {commit} was confirmed: compare the head with it, with"
        " --ledger --confirm."
    )


def _rules(pairs: Comparison) -> str:
    """Return a sentence on rules that are not the usual ones."""
    rules = pairs.rules
    if (rules.level, rules.one_sided, rules.fixed) == (LEVEL, False, False):
        return ""
    sided = "one-sided: nothing is called worse" if rules.one_sided else "two-sided"
    when = f"once, after {rules.max_rounds} pairs" if rules.fixed else "after every pair"
    return f"Tested at a level of {100 * rules.level:g} %, {sided}, {when}."


def _setup(pairs: Comparison) -> str:
    """Return a sentence on seconds before the first batch that differ by over 2 % of the budget."""
    (a_s, b_s), budget = sides.setup_s(pairs), sides.limits(pairs)
    devices = max(config.devices for config in pairs.configs)
    shortest_s = own_s(budget.per_trial_s, budget.unit, devices)
    if not budget.per_trial_s or sides.clocked(pairs).start_up_share is not None:  # commands
        return ""
    if a_s is None or b_s is None or abs(a_s - b_s) <= 0.02 * shortest_s:
        return ""
    spent = f"B spends {text.seconds(b_s)} and A {text.seconds(a_s)}"
    return f"Before its first batch {spent}, which the budget does not count."


def failure(pairs: Comparison, run: TrialRecord) -> str:
    """Return which side failed, and why."""
    side = run.drawn["side"]
    why, target = f"{run.status}: {run.reason}", pairs.rules.target
    if pairs.missed(run) and target is not None:
        why = f"{target} was not reached"
    return f"{side} ({pairs.names[SIDES.index(side)]}) failed: {why}"


def so_far(pairs: Comparison) -> str:
    """Return the line that is printed after every pair."""
    tested = pairs.analysis.differences[0].resolution
    undecided = "not decided yet" if tested else "too few for a test"
    is_open = pairs.verdict == Verdict.OPEN
    verdict = undecided if is_open else VERDICTS[pairs.verdict]
    what = diverged(pairs).removesuffix(".") or _difference(pairs)
    return f"after {pluralize(pairs.analysis.rounds, 'pair')}: {what}: {verdict}"


def _difference(pairs: Comparison) -> str:
    """Return the effect of B relative to A with its interval."""
    effect = interval(pairs.analysis.differences[0], pairs.analysis.ratios)
    if effect in ("", OPEN):
        return f"the difference in {sides.outcome_label(pairs)} is {effect or 'unknown'}"
    how = "times" if pairs.ratios else "compared with"
    return f"{sides.outcome_label(pairs)} {effect} {how} A's"


def _size(pairs: Comparison, value: float) -> str:
    """Return a difference, marked as rough if it rests on few pairs."""
    words = size(value, pairs.analysis.ratios)
    if not pairs.noise_is_rough:
        return words
    return f"{words} (a rough estimate, from {pluralize(pairs.analysis.rounds, 'pair')})"
