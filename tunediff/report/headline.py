"""Say in one sentence what a search has shown, for its page, its console and its JSON."""

from __future__ import annotations

from tunediff.analysis import Results, journals, last
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.evidence import NOT_SIGNIFICANT, Evidence
from tunediff.analysis.outcome import Candidate, Outcome, failed
from tunediff.core.outcomes import Status, Verdict
from tunediff.core.text import knobs, number, pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report.words import (
    OPEN,
    duration,
    interval,
    noted,
    rounded,
    secs,
    size,
    verdict,
    with_sd,
)

Part = tuple[str, str]
"""A part of the sentence: its text, and its role, `baseline` or `winner`; '': plain text."""


def headline(evidence: Evidence) -> str:
    """Return the sentence as text."""
    results = evidence.results
    over = journals.over(results, journals.sessions(results.folder))
    return "".join(text for text, _ in parts(evidence, over))


def parts(evidence: Evidence, over: bool) -> list[Part]:
    """Return the sentence in parts, from the strongest evidence that there is.

    over: whether the search has ended.
    """
    best, base = evidence.best, evidence.baseline_of_best
    if best is None:
        return [(_no_result(evidence.results), "")]
    if evidence.confirmation is not None:
        return [(of_confirmation(evidence.confirmation), "")]
    end = f".{_set_aside(evidence)}"
    if evidence.compared is not None:
        sentence = _best_of_seeds(evidence, evidence.compared, best)
    elif base is None or base.name != best.name:
        sentence = _one_run_each(evidence, best, base)
    elif len(evidence.results.ranked) > 1:
        sentence = _baseline_is_best(evidence, base)
    else:
        so_far = "" if over else " so far"
        value = with_sd(evidence.results.outcome_of(base).values)
        text = f" is the only configuration with a result{so_far}: {evidence.results.title} {value}"
        sentence = [(f"The baseline ({base.name})", "baseline"), (text, "")]
        end = f". {unfinished(evidence.results)}".rstrip()
    return [*sentence, (end, "")]


def unfinished(results: Results) -> str:
    """Return how trials without a result ended: `4 trials were stopped early, 1 failed.`"""
    early = sum(trial.status == Status.PRUNED for trial in results.trials)
    bad = sum(map(failed, results.trials))
    stopped = f"{pluralize(early, 'trial was', 'trials were')} stopped early" if early else ""
    failures = f"{bad:,} failed" if early else f"{pluralize(bad, 'trial')} failed"
    words = ", ".join(filter(None, [stopped, failures if bad else ""]))
    return f"{words}." if words else ""


def _no_result(results: Results) -> str:
    begun = [trial for trial in results.trials if not trial.finished]
    ended = len(results.trials) - len(begun)
    if not results.trials:
        return "No trial has begun yet."
    if not begun:
        trials = pluralize(ended, "trial")
        return (
            f"No result: none of the {trials} that ended has a result; the reasons are under"
            " Failures in the report."
        )
    running = pluralize(len(begun), "trial is", "trials are")
    sentence = f"No trial has a result yet: {running} under way"
    farthest = max(begun, key=lambda trial: last(trial, trial.along) or 0.0)
    if seconds := last(farthest, farthest.along):
        budget = duration(results.space.budget.per_trial_s)
        sentence += f", {farthest.name} farthest, at {duration(seconds)} of {budget}"
    return f"{sentence}, and {ended} ended without one." if ended else f"{sentence}."


def of_confirmation(confirmation: Comparison) -> str:
    """Return the verdict of the confirming runs."""
    if (group := confirmation.leader) is None:
        ran = "ran" if confirmation.ended else "has run"
        return f"No finalist {ran} to its end: nothing is confirmed."
    seeds = len(group.done)
    if confirmation.winner is None:
        # The verdict rests on the complete rounds; the leader may have failed before them.
        most = max(len(other.done) for other in confirmation.challengers)
        seeds = min(confirmation.analysis.rounds or most, most)
    noise = f"better than the baseline by more than the noise on {pluralize(seeds, 'new seed')}"
    if confirmation.winner is not None:
        return f"{group.name} wins: {noise}{_effect(confirmation, group)}."
    primary = confirmation.challengers[0]
    search = f"{primary.name} was the best finalist in the search."
    if lost := confirmation.failure_of(primary):
        end = f"ended as {lost.status} on the new seed {lost.config['seed']}"
        search = f"{primary.name}, the best finalist in the search, {end}."
    if confirmation.is_conclusive:
        return f"No finalist is {noise}: the baseline stays. {search}"
    base = confirmation.baseline
    failure = confirmation.failure_of(base) if base is not None else None
    if failure is not None:
        end = f"ended as {failure.status} on the new seed {failure.config['seed']}"
        return f"Nothing is confirmed: the baseline {end}. {search}"
    return f"Not decided yet: no finalist is {noise}. {search}"


def _effect(confirmation: Comparison, group: Candidate) -> str:
    """Return how a finalist compares, `: FD 0.5 (0.4 … 0.6) times the baseline's`, or ''."""
    effect = interval(group.difference, confirmation.ratios)
    if effect in ("", OPEN):
        return ""
    how = "times" if confirmation.ratios else "compared with"
    return f": {confirmation.results.title} {effect} {how} the baseline's"


def _best_of_seeds(evidence: Evidence, compared: Comparison, best: TrialRecord) -> list[Part]:
    group = compared.candidate_of(best)
    assert group is not None
    values, difference = group.values(compared.metric), group.difference
    value = f"{compared.results.title} {with_sd(values)} over {pluralize(len(values), 'seed')}"
    reached = noted(value, group.outcome)
    if group.is_baseline:
        none = "No configuration is shown to be better than the "
        return [(none, ""), (group.name, "baseline"), (f": {reached}", "")]
    parts = [(group.name, "winner"), (f" is best: {reached}", "")]
    if difference.verdict != Verdict.BETTER:
        return [*parts, (f" ({verdict(difference)})", "")]
    effect = interval(difference, compared.ratios)
    if effect != OPEN:
        ratio, gap = f"{effect} times the baseline's", f"a difference of {effect} from the baseline"
        parts.append((f", {ratio if compared.ratios else gap}", ""))
    tests = "comparisons and interim analyses" if evidence.judged is not None else "comparisons"
    significant = f"significant at 5 %, corrected for all {tests}"
    return [*parts, (f". The difference from the baseline is {significant}", "")]


def _set_aside(evidence: Evidence) -> str:
    """Return which configuration would be better, had it not failed on a seed; '' for none."""
    if not (aside := evidence.set_aside):
        return ""
    first, space = aside[0], evidence.results.space
    name = first.trial.name
    if space.seeds > 1:
        name = knobs(space.changed(first.trial.knobs))
    more = f"; {len(aside) - 1} more that would be ahead failed, too" if aside[1:] else ""
    return f" {name}, with {number(first.value)}, {first.failure_note}{more}."


def _baseline_is_best(evidence: Evidence, base: TrialRecord) -> list[Part]:
    results, others = evidence.results, len(evidence.results.ranked) - 1
    outcome = evidence.outcome(base)
    rest = f"none of {others:,} other trials beats" if others > 1 else "the other does not beat"
    runs = "" if outcome.value == base.value(results.metric) else " (mean of its runs)"
    beaten = noted(f"{rest} its {results.title} of {number(outcome.value)}{runs}", outcome)
    return [(f"The baseline ({base.name})", "baseline"), (f" itself is best: {beaten}", "")]


def _one_run_each(evidence: Evidence, best: TrialRecord, base: TrialRecord | None) -> list[Part]:
    """Return the value of the leading trial and, if noise allows it, how it compares."""
    results, better, outcome = evidence.results, evidence.better(best), evidence.outcome(best)
    runs, value = len(outcome.values), outcome.value or 0.0
    mean = f", the mean of {runs} runs" if runs > 1 else ""
    spent = f"{number(float(best.points[-1][best.along]))} {results.clock.seconds}"
    reached = f"after {spent} its {results.title} is {number(value)}{mean}"
    if results.by_rate:
        reached = f"{rounded(value)} {results.unit}/s"
    elif results.by_time:
        reached = f"it met {results.target} after {number(value)} {results.clock.seconds}{mean}"
    state = "best" if better else "ahead"
    parts = [(best.name, "winner"), (f" is {state}: {noted(reached, outcome)}", "")]
    if none := results.no_baseline(best):
        unknown = "how much better or faster that is than the baseline is not determined"
        return [*parts, (f"; {unknown}: {none}", "")]
    base_value, note = (None, "") if base is None else _baseline_value(evidence, base, outcome)
    if base is None or base_value is None or (results.ratios and not base_value):
        return [*parts, ("; the baseline's result has no ratio to compare it with", "")]
    baseline = (f"the baseline ({base.name})", "baseline")
    if not better:
        unknown = "whether that is more than noise is not known"
        why = f"{note}: {NOT_SIGNIFICANT if better is False else unknown}"
        return [*parts, ("; ", ""), baseline, (f" has {rounded(base_value)}{why}", "")]
    if results.by_rate:
        than = f"{number(value / base_value)} times"
    else:
        gap = abs(1 - value / base_value) if results.ratios else abs(value - base_value)
        than = f"{size(gap, results.ratios)} {'below' if value < base_value else 'above'}"
        note += _crossing(evidence, best, base)
    return [*parts, (f", {than} the {rounded(base_value)} of ", ""), baseline, (note, "")]


def _baseline_value(
    evidence: Evidence, base: TrialRecord, best: Outcome
) -> tuple[float | None, str]:
    """Return the baseline's value with a note on its runs.

    It is that of the run on the best trial's seed. It is the mean of all runs if the best ran
    several times too, or is ahead of the mean alone.
    """
    results, outcome = evidence.results, evidence.outcome(base)
    value, note, runs = base.value(results.metric), "", len(outcome.values)
    ahead = value is None or results.loss(best.value or 0.0) < results.loss(value)
    if runs > 1 and (len(best.values) > 1 or not ahead):
        value, note = outcome.value, f", the mean of {runs} runs"
    return value, f"{note}, {outcome.failure_note}" if outcome.failures else note


def _crossing(evidence: Evidence, best: TrialRecord, base: TrialRecord) -> str:
    """Return how many times sooner the best trial is as good as the baseline at its end."""
    if not (seconds := evidence.seconds_to_baseline(best)):
        return ""
    ratio = number(base.points[-1][base.along] / seconds)
    when = f"after {secs(seconds)}: {ratio}"
    if (
        found := evidence.results.speedup(best)
    ) is not None and found.at_first:  # it may have been that good before
        when = f"before its first evaluation, at {secs(seconds)}: at least {ratio}"
    return f". It is as good as the baseline at its end {when} times faster"
