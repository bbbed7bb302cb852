"""Describe comparisons over seeds and confirming runs in words, for the terminal, Markdown and the
page."""

from __future__ import annotations

from tunediff.analysis import Results, disturbed
from tunediff.analysis.comparison import Comparison, Group
from tunediff.analysis.confirmation import Confirmation
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.noise import Noise, unmoved
from tunediff.analysis.sequential import Look
from tunediff.analysis.statistics import BETTER, FAILS, SAME, TOO_FEW, WORSE
from tunediff.core.text import number, pluralize
from tunediff.report.headline import of_confirmation
from tunediff.report.words import (
    OPEN,
    interval,
    noted,
    percent,
    rounded,
    speedup,
    times,
    verdict,
    with_sd,
)


def comparison_table(compared: Comparison, compact: bool = False) -> list[list[str]]:
    """Return headings and rows of a comparison without empty columns; `compact`: without p-values
    and speed."""
    rows = []
    for group, row in zip(
        compared.groups, compared.table().astype(object).to_dict("records"), strict=True
    ):
        value = noted(with_sd(group.outcome.values), group.outcome)
        cells = {
            "configuration": group.name,
            "verdict": verdict(group.difference) if compact else group.difference.verdict,
            "runs": f"{len(group.done)} of {compared.seeds}",
            f"{compared.results.quantity(compared.label).label}, mean ± sd": value,
            f"{compared.effect} (95 % interval)": interval(group.difference, compared.ratios),
            "p (Holm)": "" if compact else rounded(row["p_holm"]),
            "speed-up": speedup(compared.speedup(group), cell=True),
            f"{compared.results.unit}/s": "" if compact else rounded(row["samples_per_s"]),
            "cost": times(row["cost"]),
            **{
                compared.results.quantity(name).label: with_sd(group.values(name))
                for name in compared.results.judged
            },
        }
        rows.append(cells)
    names = [name for name in (rows[0] if rows else {}) if any(cells[name] for cells in rows)]
    return [names, *([cells[name] for name in names] for cells in rows)]


def conclusions(compared: Comparison) -> list[str]:
    """Return which differences from the baseline are significant, and the smallest detectable one,
    in sentences."""
    tested, lines = sum(group.difference.p is not None for group in compared.others), []
    if tested:
        many = f"{tested} comparisons" if tested > 1 else "1 comparison"
        basis = f"({compared.seeds} seeds, {many}, family-wise error rate at most 5 %)"
        any_significant = any(
            group.difference.verdict in (BETTER, WORSE) for group in compared.others
        )
        which = (
            "Some differences from the baseline are"
            if any_significant
            else "No difference from the baseline is"
        )
        lines.append(f"{which} significant {basis}.")
    for kind, words in (
        (BETTER, "Better than the baseline"),
        (WORSE, "Worse than the baseline"),
        (SAME, "No significant difference from the baseline"),
        (FAILS, "Not tested, since they fail on some seeds"),
        (TOO_FEW, "Too few runs for a test"),
    ):
        if groups := [group.name for group in compared.others if group.difference.verdict == kind]:
            lines.append(f"{words}: {'; '.join(groups)}.")
    if least := _sizes(compared):
        lines.append(f"A single difference would have to be about {least} to be significant.")
    return lines


# ---- noise
NEAR = "≈"
"""Mark of trials that are within the noise of the best."""


def noise_words(of: Noise, label: str) -> str:
    """Return the noise of one run: `3.1 % of one run (sd, from 2 runs of the baseline: a rough
    estimate)`.

    label: display name of the objective.
    """
    sizes = [
        number(100 * sd) if of.ratios else number(sd)
        for sd in (of.sd, of.least or 0.0, of.largest or 0.0)
    ]
    unit = "%" if of.ratios else label
    source = "the baseline" if of.configurations == 1 else f"{of.configurations} configurations"
    differ = (
        ""
        if of.largest is None
        else f"; they differ, from {sizes[1]} to {sizes[2]} {unit}: the largest counts"
    )
    return (
        f"{sizes[0]} {unit} of one run (sd, from {of.runs} runs of"
        f" {source}{': a rough estimate' * of.rough}{differ})"
    )


# ---- remarks
DISTURBED, OTHERS = "†", "others used the machine meanwhile"
"""Mark of trials during which other processes used the machine, and its meaning."""


def disturbed_words(evidence: Evidence) -> str:
    """Return how many trials others disturbed, and whether the best and the baseline are among
    them; '' for none."""
    trials, chosen = (
        evidence.results.trials,
        {"the best": evidence.best, "the baseline": evidence.baseline},
    )
    names = {trial.name for trial in trials if disturbed(trial)}
    among = [role for role, trial in chosen.items() if trial is not None and trial.name in names]
    among = ["the baseline"] if evidence.best is evidence.baseline and among else among
    suffix = f" ({' and '.join(among)} among them)" if among else ""
    return disturbed_of(len(names), f"{pluralize(len(trials), 'trial')}{suffix}")


def disturbed_of(count: int, of: str) -> str:
    """Return in words that others used the machine during so many of the runs that `of` names; ''
    for none."""
    sentence = f"During {count:,} of {of} others used the machine"
    return (
        f"{sentence}: their speed, and so their results within the budget, may be worse for it."
        if count
        else ""
    )


def unmoved_words(results: Results) -> str:
    """Return a warning if the objective moved in no trial; '' otherwise."""
    if not unmoved(results):
        return ""
    return (
        "The objective did not move in any trial with a result: from the first evaluation to the"
        " last it changed by no more than the noise. Either the model learns nothing within the"
        " budget, for example because a warm-up is longer than the budget, or it has learned"
        " everything before the first evaluation."
    )


# ---- confirmation
INTERVALS = (
    "Brackets: 95 % confidence intervals that account for all finalists and for every look at the"
    " runs (each finalist by the noise of its own differences from the baseline, its error spent"
    " over the looks)"
)


def sentences(confirmation: Confirmation) -> list[str]:
    """Return the result of the confirming runs in sentences: the verdict, its reason, then the
    numbers."""
    return [of_confirmation(confirmation), *details(confirmation)]


def details(confirmation: Confirmation) -> list[str]:
    """Return what `sentences` adds to the verdict of the confirming runs: its reason, the numbers,
    other verdicts."""
    others = [
        f"{one.name}, with other finalists: {of_confirmation(one)}" for one in confirmation.others
    ]
    return [*_details(confirmation), *others]


def _details(confirmation: Confirmation) -> list[str]:
    if (group := confirmation.leader) is None:
        return []
    lines, primary = list[str](), confirmation.primary
    if confirmation.winner is None:
        lines += _undecided(confirmation)
    elif group is not primary:
        # Another finalist than the search's best one wins: the new seeds have selected it
        # themselves.
        before = "" if primary is None else f"The best finalist in the search was {primary.name}. "
        selected = (
            f"{group.name} was selected on these new seeds: its interval accounts for that, its"
            " mean is too good"
        )
        lines.append(f"{before}{selected}.")
    runs = confirmation.compared.results.trials
    if remark := disturbed_of(sum(map(disturbed, runs)), pluralize(len(runs), "confirming run")):
        lines.append(remark)
    if (bias := confirmation.bias(group)) is None:
        return lines
    label = confirmation.compared.results.label
    chosen = f"The {label} of {group.name} was {number(bias[0])} when it was chosen"
    return [*lines, f"{chosen}, and is {noted(f'{with_sd(bias[1])} on new seeds', group.outcome)}."]


def _undecided(confirmation: Confirmation) -> list[str]:
    """Return the smallest detectable difference, and why no more seeds were run; [] before the
    first look."""
    look = confirmation.look
    if not (least := _sizes(confirmation.compared)):
        return []
    why = why_stopped(look, "seeds", decided="all finalists are worse")
    return [f"{pluralize(look.rounds, 'seed')} can detect differences of about {least}{why}."]


def _sizes(compared: Comparison) -> str:
    """Return the smallest significant differences, `12 %`, or `12 % to 30 %` where noise differs;
    '' if unknown."""
    words = [
        percent(least) if compared.ratios else number(least)
        for least in sorted(compared.resolutions)
    ]
    unit = "" if compared.ratios else f" {compared.label}"
    return f"{' to '.join(dict.fromkeys([words[0], words[-1]]))}{unit}" if words else ""


def why_stopped(look: Look, rounds: str, **others: str) -> str:
    """Return why no further rounds were run, as a clause; `rounds`: what they are called; `others`:
    further states."""
    reasons = {
        "hopeless": (
            f"up to {look.most} {rounds} would most likely show no significant difference either"
        ),
        "spent": f"all {look.most} {rounds} have been run",
        **others,
    }
    return f"; {reasons[look.state]}" if look.state in reasons else ""


def so_far(confirmation: Confirmation) -> list[str]:
    """Return the current effect of every finalist: `lr=0.003 0.62 (0.41 … 0.93) better`."""
    ratios = confirmation.compared.ratios
    others = confirmation.compared.others
    return [f"{group.name} {_beside(group, ratios)}{verdict(group.difference)}" for group in others]


def confirmation_table(confirmation: Confirmation, compact: bool = True) -> list[list[str]]:
    """Return headings and rows of the confirming runs; `compact`: short verdicts for a terminal."""
    effect = f"{confirmation.compared.effect} to the baseline"
    header = [
        "configuration",
        "verdict",
        "runs",
        f"{confirmation.label}, mean ± sd",
        effect,
        "speed-up",
    ]
    lines = [header]
    for group in confirmation.compared.groups:
        verdict_text = verdict(group.difference) if compact else group.difference.verdict
        runs = f"{len(group.done)} of {len(group.runs)}"
        difference = interval(group.difference, confirmation.compared.ratios)
        times_faster = (
            speedup(confirmation.compared.speedup(group), cell=True) if group.done else ""
        )
        value = noted(with_sd(group.outcome.values) or "none", group.outcome)
        lines.append([group.name, verdict_text, runs, value, difference, times_faster])
    return lines


def _beside(group: Group, ratios: bool) -> str:
    effect = interval(group.difference, ratios)
    return f"{effect}{' × baseline' * ratios}, " if effect not in ("", OPEN) else ""
