"""Say in one sentence what a search has shown: the first line of its report, of its console output
and of its JSON."""

from __future__ import annotations

from tunediff.analysis import Results, journals, last
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.confirmation import Confirmation
from tunediff.analysis.evidence import NOT_SIGNIFICANT, Evidence
from tunediff.analysis.outcome import failed, without_seed
from tunediff.analysis.statistics import BETTER
from tunediff.core.text import knobs, number, pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report.words import OPEN, duration, interval, noted, percent, rounded, secs, with_sd

Part = tuple[str, str]
"""A part of the sentence: its text, and the role of what it names, `baseline` or `winner`; '' for
plain text."""


def headline(evidence: Evidence) -> str:
    """Return the sentence as text."""
    results = evidence.results
    over = journals.over(results, journals.sessions(results.folder))
    return "".join(text for text, _ in parts(evidence, over))


def parts(evidence: Evidence, over: bool) -> list[Part]:
    """Return the parts of the sentence, from the strongest evidence: confirming runs, several
    seeds, one run each.

    over: whether the search has ended.
    """
    if evidence.best is None:
        return [(_no_result(evidence.results), "")]
    if evidence.confirmation is not None:
        return [(of_confirmation(evidence.confirmation), "")]
    if evidence.compared is not None:
        return _best_of_seeds(evidence, evidence.compared, evidence.best)
    base = evidence.baseline_of_best
    if base is not None and base.name == evidence.best.name:
        return _baseline_is_best(evidence, base, over)
    return _one_run_each(evidence, evidence.best, base)


def unfinished(results: Results) -> str:
    """Return how trials without a result ended: `4 trials were stopped early, 1 failed.`; '' if
    none did."""
    early, bad = (
        sum(trial.status == "pruned" for trial in results.trials),
        sum(map(failed, results.trials)),
    )
    words = [f"{pluralize(early, 'trial was', 'trials were')} stopped early"] * bool(early)
    words += [f"{bad:,} failed" if words else f"{pluralize(bad, 'trial')} failed"] * bool(bad)
    return f"{', '.join(words)}." if words else ""


def _no_result(results: Results) -> str:
    begun = [trial for trial in results.trials if not trial.finished]
    ended = len(results.trials) - len(begun)
    if not results.trials:
        return "No trial has begun yet."
    if not begun:
        none_of = f"none of the {pluralize(ended, 'trial')} that ended has a result"
        return f"No result: {none_of}; the reasons are under Failures in the report."
    farthest = max(begun, key=lambda trial: last(trial, trial.along) or 0.0)
    sentence = (
        f"No trial has a result yet: {pluralize(len(begun), 'trial is', 'trials are')} under way"
    )
    if seconds := last(farthest, farthest.along):
        sentence += (
            f", {farthest.name} farthest, at {duration(seconds)} of"
            f" {duration(results.space.budget.per_trial_s)}"
        )
    return f"{sentence}, and {ended} ended without one." if ended else f"{sentence}."


def of_confirmation(confirmation: Confirmation) -> str:
    """Return the verdict of the confirming runs."""
    if (group := confirmation.leader) is None:
        return (
            f"No finalist {'ran' if confirmation.over else 'has run'} to its end: nothing is"
            " confirmed."
        )
    seeds = len(confirmation.values(group))
    if (
        confirmation.winner is None
    ):  # The verdict rests on the complete rounds; the leader may have failed before them.
        ran = max(len(confirmation.values(finalist)) for finalist in confirmation.compared.others)
        seeds = min(confirmation.look.rounds or ran, ran)
    noise = f"better than the baseline by more than the noise on {pluralize(seeds, 'new seed')}"
    if confirmation.winner is not None:
        return f"{group.name} wins: {noise}."
    primary = confirmation.primary or group
    ahead = f"{primary.name} was the best finalist in the search."
    if lost := next(filter(failed, primary.runs), None):
        ended = f"ended as {lost.status} on the new seed {lost.config['seed']}"
        ahead = f"{primary.name}, the best finalist in the search, {ended}."
    if (failure := confirmation.baseline_failure) is not None and not confirmation.settled:
        seed = failure.config["seed"]
        return (
            f"Nothing is confirmed: the baseline ended as {failure.status} on the new seed {seed}."
            f" {ahead}"
        )
    if not confirmation.settled:
        return f"Not decided yet: no finalist is {noise}. {ahead}"
    return f"No finalist is {noise}: the baseline stays. {ahead}"


def _best_of_seeds(evidence: Evidence, compared: Comparison, best: TrialRecord) -> list[Part]:
    group = compared.of(best)
    values, difference = group.values(compared.metric), group.difference
    over = pluralize(len(values), "seed")
    reached = noted(f"{compared.results.title} {with_sd(values)} over {over}", group.outcome)
    aside = _set_aside(evidence)
    if not group.changed:
        none = "No configuration is shown to be better than the "
        return [(none, ""), (group.name, "baseline"), (f": {reached}.{aside}", "")]
    parts = [(group.name, "winner"), (f" is best: {reached}", "")]
    if difference.verdict != BETTER:
        return [*parts, (f" ({difference.verdict}).{aside}", "")]
    if (effect := interval(difference, compared.ratios)) != OPEN:
        parts.append((f", {effect} {'times' if compared.ratios else 'beside'} the baseline's", ""))
    every = "comparisons and looks" if evidence.judged is not None else "comparisons"
    significant = (
        f"The difference from the baseline is significant at 5 %, corrected for all {every}."
    )
    return [*parts, (f". {significant}{aside}", "")]


def _set_aside(evidence: Evidence) -> str:
    """Return which configuration would be ahead of the best if its failures did not count; '' if
    none would."""
    if not (aside := evidence.set_aside):
        return ""
    first, space = aside[0], evidence.results.space
    name = (
        knobs(space.changed(without_seed(first.trial.drawn)))
        if space.seeds > 1
        else first.trial.name
    )
    more = f"; {len(aside) - 1} more that would be ahead failed, too" if aside[1:] else ""
    return f" {name}, with {number(first.value)}, {first.failure_note}{more}."


def _baseline_is_best(evidence: Evidence, base: TrialRecord, over: bool) -> list[Part]:
    """Return the result of a search with one run each in which no trial is ahead of the
    baseline."""
    results, others = evidence.results, len(evidence.results.ranked) - 1
    itself, value = (f"The baseline ({base.name})", "baseline"), base.value(results.metric) or 0.0
    if not others:
        so_far = "" if over else " so far"
        alone = f" is the only trial with a result{so_far}: {results.title} {number(value)}."
        return [itself, (f"{alone} {unfinished(results)}".rstrip(), "")]
    rest = (
        "the other trial does not beat" if others == 1 else f"none of {others:,} other trials beats"
    )
    outcome = evidence.outcome(base)
    runs = "" if outcome.value == value else " (mean of its runs)"
    beaten = noted(f"{rest} its {results.title} of {number(outcome.value)}{runs}", outcome)
    return [itself, (f" itself is best: {beaten}.{_set_aside(evidence)}", "")]


def _one_run_each(evidence: Evidence, best: TrialRecord, base: TrialRecord | None) -> list[Part]:
    """Return the value of the leading trial, compared with the baseline as far as the noise of one
    run allows it."""
    results, better = evidence.results, evidence.better(best)
    outcome, base_outcome = (
        evidence.outcome(best),
        evidence.outcome(base) if base is not None else None,
    )
    runs, value, aside = len(outcome.values), outcome.value or 0.0, _set_aside(evidence)
    of_base, over_runs = base.value(results.metric) if base is not None else None, ""
    runs_of_base = len(base_outcome.values) if base_outcome is not None else 0
    behind = of_base is not None and results.loss(value) >= results.loss(
        of_base
    )  # though it is ahead of the mean
    if base_outcome is not None:
        if runs_of_base > 1 and (runs > 1 or behind):
            of_base, over_runs = base_outcome.value, f", the mean of {runs_of_base} runs"
        over_runs += f", {base_outcome.failure_note}" if base_outcome.failures else ""
    spent = f"{number(float(best.points[-1][best.along]))} {results.clock.seconds}"
    mean = f", the mean of {runs} runs" if runs > 1 else ""
    reached = f"after {spent} its {results.title} is {number(value)}{mean}"
    reached = noted(f"{rounded(value)} {results.unit}/s" if results.by_rate else reached, outcome)
    parts = [(best.name, "winner"), (f" is {'best' if better else 'ahead'}: {reached}", "")]
    if none := results.no_baseline(best):
        unknown = "how much better or faster that is than the baseline is not determined"
        return [*parts, (f"; {unknown}: {none}.{aside}", "")]
    if base is None or of_base is None or (results.ratios and not of_base):
        return [*parts, (f"; the baseline's result has no ratio to compare it with.{aside}", "")]
    itself = (f"the baseline ({base.name})", "baseline")
    if not better:
        which = (
            NOT_SIGNIFICANT if better is False else "whether that is more than noise is not known"
        )
        return [
            *parts,
            (f" beside the {rounded(of_base)} of ", ""),
            itself,
            (f"{over_runs}: {which}.{aside}", ""),
        ]
    if results.by_rate:
        times = f", {number(value / of_base)} times the {rounded(of_base)} of "
        return [*parts, (times, ""), itself, (f"{over_runs}.{aside}", "")]
    by = percent(abs(1 - value / of_base)) if results.ratios else number(abs(value - of_base))
    beside = f", {by} {'below' if value < of_base else 'above'} the {number(of_base)} of "
    return [
        *parts,
        (beside, ""),
        itself,
        (f"{over_runs}.{_crossing(evidence, best, base)}{aside}", ""),
    ]


def _crossing(evidence: Evidence, best: TrialRecord, base: TrialRecord) -> str:
    """Return how many times sooner the best trial is as good as the baseline at its end; '' if
    undetermined."""
    if not (seconds := evidence.seconds_to_baseline(best)):
        return ""
    ratio = base.points[-1][base.along] / seconds
    when = f"after {secs(seconds)}: {number(ratio)}"
    if evidence.results.at_first(best):  # it may have been that good before
        when = f"before its first evaluation, at {secs(seconds)}: at least {number(ratio)}"
    return f" It is as good as the baseline at its end {when} times faster."
