"""What a comparison over seeds and confirming runs say, in words: for the terminal, for Markdown and for the page."""

from __future__ import annotations

from tunediff.analysis import Results, disturbed, evidence
from tunediff.analysis.comparison import Comparison, Group
from tunediff.analysis.confirmation import Confirmation
from tunediff.analysis.evidence import UNTOLD, Evidence
from tunediff.analysis.noise import Noise, unmoved
from tunediff.analysis.statistics import BETTER, SAME, TOO_FEW, WORSE
from tunediff.core.text import number, pluralize
from tunediff.report.words import OPEN, interval, percent, rounded, speedup, times, verdict, with_sd


def comparison_table(compared: Comparison, compact: bool = False) -> list[list[str]]:
    """Headings and rows of the columns in which anything stands; `compact`: those that decide."""
    rows = []
    for group, row in zip(compared.groups, compared.table().astype(object).to_dict("records"), strict=True):
        cells = {
            "configuration": group.name,
            "verdict": verdict(group.difference) if compact else group.difference.verdict,
            "runs": f"{len(group.done)} of {compared.seeds}",
            f"{compared.found.quantity(compared.found.label).label}, mean ± sd": with_sd(group.values(compared.metric)),
            f"{compared.effect} (95 % interval)": interval(group.difference, compared.ratios),
            "p (Holm)": "" if compact else rounded(row["p_holm"]),
            "speed-up": speedup(compared.speedup(group), cell=True),
            f"{compared.found.unit}/s": "" if compact else rounded(row["samples_per_s"]),
            "cost": times(row["cost"]),
            **{compared.found.quantity(name).label: with_sd(group.values(name)) for name in compared.found.judged},
        }
        rows.append(cells)
    names = [name for name in (rows[0] if rows else {}) if any(cells[name] for cells in rows)]
    return [names, *([cells[name] for name in names] for cells in rows)]


def conclusions(compared: Comparison) -> list[str]:
    """Which differences from the baseline are larger than the noise and which are not, in sentences."""
    tested, said = sum(group.difference.p is not None for group in compared.others), []
    if tested:
        many = f"{tested} comparisons" if tested > 1 else "1 comparison"
        basis = f"({compared.seeds} seeds, {many}, at most 5 % chance of any false alarm)"
        told_apart = any(group.difference.verdict in (BETTER, WORSE) for group in compared.others)
        which = "Some differences from the baseline are" if told_apart else "No difference from the baseline is"
        said.append(f"{which} larger than the noise {basis}.")
    for kind, words in (
        (BETTER, "Better than the baseline"),
        (WORSE, "Worse than the baseline"),
        (SAME, "No significant difference from the baseline"),
        (TOO_FEW, "Too few runs to tell"),
    ):
        if groups := [group.name for group in compared.others if group.difference.verdict == kind]:
            said.append(f"{words}: {'; '.join(groups)}.")
    if (least := compared.resolution) is not None:
        words = f"{100 * least:.2g} %" if compared.ratios else f"{number(least)} {compared.found.label}"
        said.append(f"A single difference would have to be about {words} to be told from the noise.")
    return said


# --------------------------------------------------------------------------------------------------------------- noise
NEAR = "≈"
"""Marks what is behind the best by no more than the noise."""
APART = "farther from the baseline than the noise of one run; how much of it is luck only new seeds tell"


def noise_words(of: Noise, label: str) -> str:
    """`3.1 % of one run (sd, from 2 runs of the baseline: a rough estimate)`; `label`: of the objective."""
    size = f"{number(100 * of.sd)} %" if of.ratios else f"{number(of.sd)} {label}"
    what = "the baseline" if of.configurations == 1 else f"{of.configurations} configurations"
    return f"{size} of one run (sd, from {of.runs} runs of {what}{': a rough estimate' * of.rough})"


def noise_block(known: Evidence) -> dict[str, str]:
    """`key: value` for the end of a search: its noise, and what that leaves undecided."""
    if known.noise is None or known.best is None:
        return {}
    said = {"noise": noise_words(known.noise, known.found.label)}
    said[evidence.NEAR] = ", ".join(trial.name for trial in known.near) or "none"
    better = known.better(known.best) if known.told is None else None
    return said if better is None else {**said, "versus_noise": APART if better else UNTOLD}


# ------------------------------------------------------------------------------------------------------------- remarks
DISTURBED, OTHERS = "†", "others used the machine meanwhile"
"""Marks a trial during which others used the machine, and what that means."""


def disturbed_words(known: Evidence) -> str:
    """Return how many trials others disturbed, and whether the best and the baseline are among them; '' for none."""
    trials, chosen = known.found.trials, {"the best": known.best, "the baseline": known.baseline}
    names = {trial.name for trial in trials if disturbed(trial)}
    among = [what for what, trial in chosen.items() if trial is not None and trial.name in names]
    among = ["the baseline"] if known.best is known.baseline and among else among
    who = f" ({' and '.join(among)} among them)" if among else ""
    return _disturbed(len(names), f"{pluralize(len(trials), 'trial')}{who}")


def _disturbed(count: int, of: str) -> str:
    said = f"During {count:,} of {of} others used the machine"
    return f"{said}: their speed, and what they learned in their seconds, may be too low." if count else ""


def unmoved_words(found: Results) -> str:
    """Return a warning if the objective moved in no trial; '' otherwise."""
    if not unmoved(found):
        return ""
    return (
        "The objective did not move in any trial with a result: from the first evaluation to the last it changed by no "
        "more than the noise. Either nothing is learned within the budget, as where a warm-up is longer than that, or "
        "all is learned before the first evaluation."
    )


# -------------------------------------------------------------------------------------------------------- confirmation
INTERVALS = (
    "Brackets hold 95 % intervals that allow for all finalists and for every time the runs were looked at "
    "(Dunnett's comparison with the baseline, its error spent in equal parts over the looks)"
)


def block(told: Confirmation) -> dict[str, str]:
    """`key: value` for the end of a search."""
    said, group, baseline = {"confirmed": "yes" if told.winner else "no"}, told.leader, told.compared.baseline
    if group is None:
        return said
    said["winner" if told.winner else "finalist"] = group.name
    said[f"confirmed_{told.label}"] = with_sd(told.values(group)) or "none"
    if baseline is not None:
        said[f"confirmed_baseline_{told.label}"] = with_sd(told.values(baseline)) or "none"
    if group.difference.low is not None:
        said[f"confirmed_{told.compared.effect}"] = interval(group.difference, told.compared.ratios)
    if (bias := told.bias(group)) is not None:
        said["selection_bias"] = f"{number(bias[0])} in the search, {with_sd(bias[1])} on new seeds"
    return said


def sentences(told: Confirmation) -> list[str]:
    """The result in words, the plain answer first."""
    if (group := told.leader) is None:
        return ["No finalist ran to its end: nothing is confirmed."]
    noise = f"better than the baseline by more than the noise on {len(told.values(group))} new seeds"
    if told.winner is None:
        stays = ": the baseline stays" if told.settled else ""
        said = [f"No finalist is {noise}{stays}. {group.name} was ahead of the others in the search."]
        said += _undecided(told)
    elif group is told.primary:
        said = [f"{group.name} wins: {noise}."]
    else:
        own = "" if told.primary is None else f"It was not the finalist ahead in the search, {told.primary.name}, "
        picked = "but picked by these very seeds: its interval allows for that, its mean flatters it"
        said = [f"{group.name} wins: {noise}.", f"{own}{picked}."]
    runs = told.compared.found.trials
    if remark := _disturbed(sum(map(disturbed, runs)), pluralize(len(runs), "confirming run")):
        said.append(remark)
    if (bias := told.bias(group)) is None:
        return said
    chosen = f"Its {told.compared.found.label} was {number(bias[0])} when the search chose it as one of its best"
    return [*said, f"{chosen}, and is {with_sd(bias[1])} on new seeds."]


def _undecided(told: Confirmation) -> list[str]:
    """Why no more seeds were run, and what those that were could tell; [] while it goes on."""
    look = told.look
    if look.resolution is None:
        return []
    least = percent(look.resolution) if look.ratios else f"{number(look.resolution)} {told.label}"
    said = {
        "hopeless": f"more seeds, up to {look.most}, would most likely not tell them apart either",
        "spent": f"all {look.most} seeds are used",
        "decided": "all are worse",
    }
    why = f"; {said[look.state]}" if look.state in said else ""
    return [f"{pluralize(look.rounds, 'seed')} can tell differences of about {least}{why}."]


def so_far(told: Confirmation) -> list[str]:
    """Each finalist beside the baseline: `lr=0.003 0.62 (0.41 … 0.93) better`."""
    ratios = told.compared.ratios
    return [f"{group.name} {_beside(group, ratios)}{verdict(group.difference)}" for group in told.compared.others]


def confirmation_table(told: Confirmation, compact: bool = True) -> list[list[str]]:
    """Headings and rows; `compact`: for a terminal."""
    effect = f"{told.compared.effect} to the baseline"
    header = ["configuration", "verdict", "runs", f"{told.label}, mean ± sd", effect, "speed-up"]
    lines = [header]
    for group in told.compared.groups:
        said = verdict(group.difference) if compact else group.difference.verdict
        runs = f"{len(group.done)} of {len(group.runs)}"
        difference = interval(group.difference, told.compared.ratios)
        sooner = speedup(told.compared.speedup(group), cell=True) if group.done else ""
        lines.append([group.name, said, runs, with_sd(told.values(group)) or "none", difference, sooner])
    return lines


def _beside(group: Group, ratios: bool) -> str:
    known = interval(group.difference, ratios)
    return f"{known}{' × baseline' * ratios}, " if known not in ("", OPEN) else ""
