"""Say what finished runs show, as `report.sentences` does of other experiments: from facts."""

from __future__ import annotations

from tunediff.core.outcomes import Verdict
from tunediff.core.text import number, pluralize
from tunediff.report.result import Candidate, FinishedSet, Result
from tunediff.report.sentences import interval

UNKNOWN = (
    "Logs do not say whether runs were made and left out, whether somebody looked before he stopped,"
    " or whether both sides had the same machine."
)


def summary(result: Result) -> list[str]:
    """Return the result in sentences, the verdict first."""
    assert result.finished is not None
    first, *others = result.candidates
    sets = result.finished.sets
    lines = [_verdict(result, one, of) for one, of in zip(others, sets[1:], strict=True)]
    if not others and (target := sets[0].meets_target) is not None:
        shown = "is shown to meet" if target.shown else "is not shown to meet"
        lines = [f"The mean of {first.name} {shown} {result.target} (p = {number(target.p)})."]
    for one, of in zip(result.candidates, sets, strict=True):
        lines += _notes(one, of)
    counts = {tuple(of.evaluations) for of in sets}
    if len(counts) > 1:
        lines.append("The sets are evaluated unequally often: more values have more luck.")
    if len({tuple(of.lengths) for of in sets if of.lengths}) > 1:
        lines.append("The sets are of unequal length in steps.")
    return [*lines, UNKNOWN]


def _verdict(result: Result, one: Candidate, of: FinishedSet) -> str:
    first, metric = result.candidates[0].name, result.metric
    p = one.effect.p_holm if one.effect is not None else None
    size = interval(one.effect)
    how = "times" if one.effect is not None and one.effect.kind == "ratio" else "compared with"
    runs = f"{len(one.values)} and {len(result.candidates[0].values)} runs"
    tail = f"{metric} {size} {how} that of {first}" if size else f"by the ranks of their {metric}"
    said = {
        Verdict.BETTER: f"{one.name} is better than {first}",
        Verdict.WORSE: f"{one.name} is worse than {first}",
        Verdict.NOT_SHOWN: f"{one.name} takes less time than {first}, and its values are not shown"
        " to be good enough",
    }.get(Verdict(one.verdict or ""), f"{one.name} shows no significant difference from {first}")
    return f"{said}: {tail} ({runs}, p = {number(p) if p is not None else 'unknown'})."


def _notes(one: Candidate, of: FinishedSet) -> list[str]:
    lines = []
    for shown, what in (
        (of.no_worse, "no worse by more than the margin"), (of.meets_target, "meets the target"),
    ):  # fmt: skip
        if shown is not None:
            word = "shown" if shown.shown else "not shown"
            lines.append(f"{one.name}: {what}: {word}, p = {number(shown.p)} ({shown.method}).")
    if of.runs_needed is not None:
        lines.append(f"{one.name}: to show the margin in 80 % takes {of.runs_needed} runs.")
    if one.effect is not None and one.effect.resolution is not None:
        least = number(one.effect.resolution)
        lines.append(f"{one.name}: these runs find a difference of {least} in 80 %.")
    if of.p_if_repeated is not None:
        share = number(of.p_if_repeated) if of.p_if_repeated >= 1e-4 else "below 0.0001"
        lines.append(f"{one.name}: tested after each run from the third on, p would be {share}.")
    if of.rank:
        place, low, high = of.rank
        lines.append(f"{one.name}: rank {place}, {low} to {high} in 95 % of resamples.")
    for count, what in (
        (of.without_value, "without a value"), (of.diverged, "diverged"),
        (of.missed, "missed the target"), (of.unpaired, "without a pair"),
    ):  # fmt: skip
        if count:
            lines.append(f"{one.name}: {pluralize(count, 'run')} {what}.")
    return lines
