"""Describe comparisons over seeds and confirming runs, for the terminal, Markdown and the page."""

from __future__ import annotations

from collections.abc import Sequence

from tunediff.analysis import confirming_runs, disturbed
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.noise import Noise
from tunediff.analysis.outcome import Candidate
from tunediff.analysis.sequential import InterimAnalysis
from tunediff.core.outcomes import State, Verdict
from tunediff.core.text import number, pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report.headline import of_confirmation
from tunediff.report.words import (
    OPEN,
    interval,
    noted,
    rounded,
    size,
    speedup,
    times,
    verdict,
    with_sd,
)

FEW_STEPS = 20
"""Steps of a training below which its budget is called too short."""

# ---- tables


def comparison_table(compared: Comparison, compact: bool = False) -> list[list[str]]:
    """Return headings and rows without empty columns; `compact`: no p-values, no speed."""
    rows = []
    for group, row in zip(
        compared.candidates, compared.table().astype(object).to_dict("records"), strict=True
    ):
        cells = {
            **_cells(compared, group),
            "p (Holm)": "" if compact else rounded(row.get("p_holm")),
            f"{compared.results.unit}/s": "" if compact else rounded(row["samples_per_s"]),
            "cost": times(row["cost"]),
        }
        for name in compared.results.judged:
            cells[compared.results.quantity(name).label] = with_sd(group.values(name))
        rows.append(cells)
    names = [name for name in (rows[0] if rows else {}) if any(cells[name] for cells in rows)]
    return [names, *([cells[name] for name in names] for cells in rows)]


def confirmation_table(confirmation: Comparison) -> list[list[str]]:
    """Return headings and rows of the confirming runs."""
    rows = [_cells(confirmation, one) for one in confirmation.candidates]
    return [list(rows[0]) if rows else [], *(list(cells.values()) for cells in rows)]


def _cells(compared: Comparison, group: Candidate) -> dict[str, str]:
    label = compared.results.quantity(compared.label).label
    return {
        "configuration": group.name,
        "verdict": verdict(group.difference),
        "runs": f"{len(group.done)} of {len(group.runs)}",
        f"{label}, mean ± sd": noted(with_sd(group.outcome.values) or "none", group.outcome),
        f"{'ratio' if compared.ratios else 'difference'} (95 % interval)": interval(
            group.difference, compared.ratios
        ),
        "speed-up": speedup(compared.speedup(group), cell=True) if group.done else "",
    }


# ---- several seeds
def conclusions(compared: Comparison) -> list[str]:
    """Return which differences are significant, and the smallest detectable one, as sentences."""
    verdicts = [group.difference.verdict for group in compared.challengers]
    tested, lines = sum(group.difference.p is not None for group in compared.challengers), []
    if tested:
        seeds, tests = f"{compared.rules.max_rounds} seeds", pluralize(tested, "comparison")
        basis = f"({seeds}, {tests}, family-wise error rate at most 5 %)"
        which = "No difference from the baseline is"
        if Verdict.BETTER in verdicts or Verdict.WORSE in verdicts:
            which = "Some differences from the baseline are"
        lines.append(f"{which} significant{'' if compared.ended else ' so far'} {basis}.")
    for kind, words in (
        (Verdict.BETTER, "Better than the baseline"),
        (Verdict.WORSE, "Worse than the baseline"),
        (Verdict.NO_DIFFERENCE, "No significant difference from the baseline"),
        (Verdict.FAILS, "Not tested, since they fail on some seeds"),
        (Verdict.TOO_FEW, "Too few runs for a test"),
        (Verdict.OPEN, "Not decided yet"),
    ):
        if kind in verdicts:
            names = (
                group.name for group in compared.challengers if group.difference.verdict == kind
            )
            lines.append(f"{words}: {'; '.join(names)}.")
    if sizes := _detectable(compared):
        lines.append(f"A single difference would have to be about {sizes} to be significant.")
    return lines


def _detectable(compared: Comparison) -> str:
    """Return the smallest significant differences, `12 %` or `12 % to 30 %`; '': unknown."""
    if not (sizes := sorted(compared.resolutions)):
        return ""
    ends = dict.fromkeys(size(value, compared.ratios) for value in (sizes[0], sizes[-1]))
    return " to ".join(ends) + ("" if compared.ratios else f" {compared.label}")


def why_stopped(test: InterimAnalysis, rounds: str, **others: str) -> str:
    """Return why no further rounds were run, as a clause.

    rounds: what they are called. others: the words for further states of `test`.
    """
    reasons = {
        State.HOPELESS: (
            f"up to {test.max_rounds} {rounds} would most likely show no significant difference"
            " either"
        ),
        State.SPENT: f"all {test.max_rounds} {rounds} have been run",
        **others,
    }
    return f"; {reasons[test.state]}" if test.state in reasons else ""


# ---- remarks
NEAR = "≈"
"""Mark of trials that are within the noise of the best."""
DISTURBED, OTHERS = "†", "others used the machine meanwhile"
"""Mark of trials during which other processes used the machine, and its meaning."""


def noise_words(noise: Noise, label: str) -> str:
    """Return the noise: `3.1 % of one run (sd, from 2 runs of the baseline: a rough estimate)`.

    label: display name of the objective.
    """
    scale, unit = (100, "%") if noise.ratios else (1, label)
    source = "the baseline"
    if noise.configurations > 1:
        source = f"{noise.configurations} configurations"
    details = f"sd, from {noise.runs} runs of {source}{': a rough estimate' * noise.is_rough}"
    if noise.least is not None and noise.largest is not None:
        ends = f"{number(scale * noise.least)} to {number(scale * noise.largest)} {unit}"
        details += f"; they differ, from {ends}: the largest counts"
    return f"{number(scale * noise.sd)} {unit} of one run ({details})"


def disturbed_of(runs: Sequence[TrialRecord], noun: str, more: str = "") -> str:
    """Return during how many of the runs others used the machine; '' for none."""
    if not (count := sum(map(disturbed, runs))):
        return ""
    return (
        f"During {count:,} of {pluralize(len(runs), noun)}{more} others used the machine: their"
        " speed, and so their results within the budget, may be worse for it."
    )


def disturbed_words(evidence: Evidence) -> str:
    """Return how many trials were disturbed, and whether best or baseline were; '': none."""
    trials = {"the best": evidence.best, "the baseline": evidence.baseline}
    if evidence.best is evidence.baseline:
        del trials["the best"]
    among = [role for role, trial in trials.items() if trial is not None and disturbed(trial)]
    suffix = f" ({' and '.join(among)} among them)" if among else ""
    return disturbed_of(evidence.results.trials, "trial", suffix)


def unmoved_words(evidence: Evidence) -> str:
    """Return a warning if the objective moved in no trial; '' otherwise."""
    results = evidence.results
    if not evidence.unmoved:
        return ""
    causes = [
        "the model learns nothing within the budget, for example because a warm-up is longer than"
        " the budget",
        "it has learned everything before the first evaluation",
    ]
    if any(map(disturbed, results.trials)):
        causes.insert(0, "it took few steps because others used the machine")
    last = [trial.points[-1] for trial in results.trials if trial.points]
    steps = max(point.steps for point in last)
    # Where each is one sample, they are values that a command printed, or reports
    if steps < min(FEW_STEPS, *(point.samples for point in last)):
        causes.insert(0, f"the budget is too short: it ends after {pluralize(steps, 'step')}")
    return (
        "The objective did not move in any trial with a result: from the first evaluation to the"
        f" last it changed by no more than the noise. Either {', or '.join(causes)}."
    )


# ---- confirmation
INTERVALS = (
    "Brackets: 95 % confidence intervals that account for all finalists and for every interim"
    " analysis (each finalist by the noise of its own differences from the baseline, its error"
    " spent over the analyses)"
)


def sentences(confirmation: Comparison) -> list[str]:
    """Return the result of the confirming runs: the verdict, its reason, then the numbers."""
    return [of_confirmation(confirmation), *details(confirmation)]


def details(confirmation: Comparison) -> list[str]:
    """Return what `sentences` adds to the verdict: its reason, the numbers, other verdicts."""
    lines, group, compared = list[str](), confirmation.leader, confirmation
    if group is not None:
        lines += [_reason(confirmation, group)]
        lines += [disturbed_of(compared.results.trials, "confirming run")]
        if (bias := confirming_runs.bias(confirmation, group)) is not None:
            now = noted(f"{with_sd(bias[1])} on new seeds", group.outcome)
            chosen = f"{group.name} was {number(bias[0])} when it was chosen"
            threads = _other_threads(confirmation, group)
            lines += [f"The {compared.results.label} of {chosen}, and is {now}{threads}."]
    if confirmation.at_once > 1:
        lines += [f"{confirmation.at_once} confirming runs were at the same time."]
    lines += [
        f"{other.folder.name}, with other finalists: {of_confirmation(other)}"
        for other in confirmation.others
    ]
    return [line for line in lines if line]


def _other_threads(confirmation: Comparison, group: Candidate) -> str:
    """Return that a confirming run had other threads than the trial had, as a clause; '' if not."""
    trial = confirming_runs.trial_of(confirmation, group)
    before = trial.environment.get("threads") if trial is not None else None
    now = group.runs[0].environment.get("threads")
    if before is None or now is None or before == now:
        return ""
    return f", with {pluralize(now, 'thread')} instead of {before}"


def _reason(confirmation: Comparison, group: Candidate) -> str:
    """Return what the runs could detect if none wins, or that the new seeds selected the winner."""
    test, primary = confirmation.analysis, confirmation.challengers[0]
    if confirmation.winner is None:
        if not (sizes := _detectable(confirmation)):
            return ""
        why = why_stopped(test, "seeds", decided="all finalists are worse")
        return f"{pluralize(test.rounds, 'seed')} can detect differences of about {sizes}{why}."
    if group is primary:
        return ""
    return (
        f"The best finalist in the search was {primary.name}. {group.name} was selected on these"
        " new seeds: its interval accounts for that, its mean is too optimistic."
    )


def so_far(confirmation: Comparison) -> list[str]:
    """Return the current effect of every finalist: `lr=0.003 0.62 (0.41 … 0.93) better`."""
    lines, ratios = [], confirmation.ratios
    for group in confirmation.challengers:
        effect = interval(group.difference, ratios)
        words = f"{effect}{' × baseline' * ratios}, " if effect not in ("", OPEN) else ""
        lines.append(f"{group.name} {words}{verdict(group.difference)}")
    return lines
