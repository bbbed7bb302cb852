"""Say what finished runs show, as `report.sentences` does of other experiments: from facts."""

from __future__ import annotations

from collections.abc import Iterator

from tunediff.core.outcomes import Verdict
from tunediff.core.text import number, pluralize, rounded, size
from tunediff.report.result import Candidate, Effect, Finished, FinishedSet, Result
from tunediff.report.sentences import interval

UNKNOWN = (
    "Logs do not say whether runs were made and left out, whether somebody looked before he stopped,"
    " or whether both sides had the same machine."
)
WORDS = {
    "without_value": "without a value",
    "diverged": "diverged",
    "missed": "missed the target",
    "unpaired": "without a pair",
    "short": "ended earlier than most, as a cut log does",
    "welch": "Welch's t-test",
    "paired_t": "a paired t-test",
    "one_sample_t": "a one-sample t-test",
    "z": "a z-test",
    "rank_sum": "a rank-sum test",
    "sign": "a sign test",
}
"""What is irregular, and the tests that there are."""
MOST_NAMED = 3


def summary(result: Result) -> list[str]:
    """Return the result in sentences, the verdict first."""
    known = result.finished
    assert known is not None
    both = list(zip(result.candidates, known.sets, strict=True))
    lines = [_verdict(result, known, one, of) for one, of in both[1:]]
    for one, of in both:
        lines += [f"{one.name}: {note}." for note in _notes(result, one, of)]
    unequal = {
        "evaluated unequally often: more values have more luck": {
            str(of.evaluations) for of in known.sets
        },
        "of unequal length in steps": {str(of.lengths) for of in known.sets if of.lengths},
    }
    lines += [f"The sets are {how}." for how, seen in unequal.items() if len(seen) > 1]
    return [*lines, UNKNOWN]


def _verdict(result: Result, known: Finished, one: Candidate, of: FinishedSet) -> str:
    first, metric = result.candidates[0].name, result.metric
    shown, effect = interval(one.effect), one.effect or Effect(kind="difference")
    how = "times" if effect.kind == "ratio" else "compared with"
    runs = f"{of.counted:,} and {pluralize(known.sets[0].counted, 'run')}"
    runs = runs if known.paired_by is None else pluralize(of.counted, "pair")
    by = f"by the {'ranks' if known.paired_by is None else 'signs'} of their {metric}"
    tail = f"{metric} {shown} {how} that of {first}" if shown else by
    missing = [words for name, words in _gates(result, of).items() if not of.tests[name].shown]
    said = {
        Verdict.BETTER: f"{one.name} is better than {first}",
        Verdict.WORSE: f"{one.name} is worse than {first}",
        Verdict.NOT_SHOWN: f"{one.name} takes less time than {first}, and is not shown to"
        f" {' and to '.join(missing)}",
    }.get(one.verdict or Verdict.OPEN, f"{one.name} shows no significant difference from {first}")
    return f"{said}: {tail} ({runs}, p = {rounded(effect.p_holm) or 'unknown'})."


def _gates(result: Result, of: FinishedSet) -> dict[str, str]:
    """Return what was tested of the values of a set, in words."""
    assert result.rule is not None
    words = {
        "no_worse": f"be no worse by more than {number(result.rule.margin)}",
        "meets_target": f"meet {result.target}",
    }
    return {name: said for name, said in words.items() if name in of.tests}


def _notes(result: Result, one: Candidate, of: FinishedSet) -> Iterator[str]:
    assert result.rule is not None
    level = result.rule.level / (1 if result.rule.one_sided or len(result.candidates) < 2 else 2)
    for name, words in _gates(result, of).items():
        test = of.tests[name]
        estimate = f"{interval(test)}, " if test.value is not None else ""
        shown = f"{'' if test.shown else 'not '}shown to {words}"
        yield f"{shown} ({estimate}p = {number(test.p)}, {WORDS[test.method]} at a level of {number(level)})"
    if of.runs_needed is not None:
        yield f"to show the margin in 80 % takes {of.runs_needed} runs"
    if of.p_if_repeated is not None:
        decides = one.effect or of.tests["meets_target"]
        detectable = size(decides.resolution or 0.0, decides.kind == "ratio")
        yield f"these runs find a difference of {detectable} in 80 %"
        share = number(of.p_if_repeated) if of.p_if_repeated >= 1e-4 else "below 0.0001"
        if of.p_if_repeated > (decides.p or 0.0):  # of few runs Welch's test is rarer than its p
            yield f"tested after each run from the third on, p would be {share}"
    if of.rank:
        place, low, high = of.rank
        yield f"rank {place}, {low} to {high} in 95 % of resamples"
    for what, names in of.irregular.items():
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        shown = f"{', '.join(names[:MOST_NAMED])}{more}"
        yield f"{pluralize(len(names), 'run')} {WORDS[what]}: {shown}"
