"""Sections of the report: which knobs matter, what each of them does, trade-offs, and when compilation pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from tunediff.cli import number
from tunediff.reporting import report_figures, report_numbers
from tunediff.reporting.report_html import Html, el, folded, join, table
from tunediff.reporting.report_numbers import ABOVE, FAIR, TOO_FEW, WITHIN, Importance, Mean, searched
from tunediff.reporting.report_subject import Files, Subject
from tunediff.reporting.report_words import duration, is_known, percent, rounded, secs, shown, some, times

FIGURE_KNOBS, AXES, ROWS = 8, 8, 20
"""Knobs in the figure of effects and axes of parallel coordinates: those that matter most. Rows of compilations."""


def _is_ladder(subject: Subject) -> bool:
    """A ladder changes its knobs together, one more with every rung: what one of them does is in its own table."""
    return subject.found.space.kind == "ladder"


# ---------------------------------------------------------------------------------------------------------- importance
def importance(subject: Subject, files: Files) -> Html | None:
    """How much of the differences between trials each knob explains: of quality, and of throughput."""
    if not searched(subject.found) or not subject.found.ranked or _is_ladder(subject):
        return None
    known = [(label, one) for label, one in ((subject.label, subject.quality), ("images/s", subject.throughput)) if one]
    if not known:
        trials = len(subject.found.ranked)
        return el(
            "p",
            f"Shares of the knobs are given from {report_numbers.ENOUGH} trials with a result on, if a knob varies; "
            f"there {'is' if trials == 1 else 'are'} {trials}.",
            class_="lead",
        )
    columns = {"quality": subject.quality, "throughput": subject.throughput}
    verdicts = {effect.knob: effect.verdict for effect in subject.effects}
    names = list(dict.fromkeys(name for _, one in known for name in one.shares))
    files.csv(
        "importance",
        pd.DataFrame(
            [
                {"knob": name}
                | {f"{what}_share": one.shares.get(name) for what, one in columns.items() if one is not None}
                | {"effect_on_objective": verdicts.get(name, "")}
                for name in names
            ]
        ),
    )
    titles = {f"quality: {subject.label}": subject.quality, "throughput: images/s": subject.throughput}
    figure = files.chart(
        "importance",
        lambda: report_figures.importances(titles),
        "share of every knob in the variance of quality and of throughput",
        "fANOVA: the part of the variance of the logarithm that a random forest over all trials puts down to a knob "
        "alone; what is missing to 100 % belongs to combinations of knobs. A knob that does not always apply has its "
        "share where it does. Hollow bars: not to be trusted.",
    )
    unvaried = known[0][1].unvaried
    return join(
        [
            el("p", " ".join(_leading(label, one) for label, one in known), class_="lead"),
            figure,
            el("ul", *(el("li", _reliability(label, one)) for label, one in known)),
            el("p", f"One value in all trials: {', '.join(unvaried)}.", class_="note") if unvaried else None,
        ]
    )


def _leading(label: str, one: Importance) -> str:
    if one.fit is None or one.fit < FAIR:
        return f"What decides {label} can hardly be told from {some(one.trials, 'trial')}."
    top = [(name, share) for name, share in one.shares.items() if share >= 0.05][:3]
    if not top:
        return f"No knob by itself explains much of the differences in {label}."
    return f"Differences in {label} come most from {', '.join(f'{name} ({percent(share)})' for name, share in top)}."


def _reliability(label: str, one: Importance) -> str:
    if one.fit is None:
        return f"{label}: from {some(one.trials, 'trial')}; how far to trust the shares is not known."
    trust = "noise" if one.fit <= 0 else "rather a guess" if one.fit < FAIR else "fair" if one.fit < 0.7 else "good"
    return (
        f"{label}: the shares are {trust}. From {some(one.trials, 'trial')} the forest predicts those that it has not "
        f"seen with R² = {one.fit:.2f} (1: exactly; 0 and less: not at all).".replace("= -", "= −")
    )


# ------------------------------------------------------------------------------------------------------------- effects
def effects(subject: Subject, files: Files) -> Html | None:
    """What the values of each knob reached on average, with the noise of that."""
    found = subject.effects
    if not found or not subject.found.ranked or _is_ladder(subject):
        return None
    files.csv("effects", _frame(subject))
    above = [effect for effect in found if effect.verdict == ABOVE]
    said = f"No knob has an effect on {subject.label} that is larger than the noise between trials."
    if above:
        widest = max(above, key=lambda effect: effect.spread or 0.0)
        by = f", by a factor of {number(widest.spread)} from its best to its worst value" if widest.spread else ""
        said = (
            f"{len(above)} of {some(len(found), 'knob')} {'has' if len(above) == 1 else 'have'} an effect on "
            f"{subject.label} larger than the noise between trials; the largest is that of {widest.knob}{by}."
        )
    order = subject.by_weight()
    chosen = sorted(found, key=lambda effect: (effect.verdict != ABOVE, order.index(effect.knob)))[:FIGURE_KNOBS]
    figure = files.chart(
        "effects",
        lambda: report_figures.effects(subject.found, chosen, subject.stars),
        "mean objective and standard error for every value of the knobs",
        "Mean over all trials with a value, whatever their other knobs, ± its standard error; in brackets how many "
        "trials. Pale: within the noise; hollow: fewer than three trials. Squares: the values of the ",
        el("span", "baseline", class_="baseline"),
        " and of the ",
        el("span", subject.stars.winner_is, class_="winner"),
        ".",
    )
    groups = {"Within the noise": WITHIN, "Too few trials to tell": TOO_FEW}
    note = (
        "Means are geometric where all values are positive. “Larger than the noise”: an analysis of variance, p < 0.05 "
        "after Holm's correction over all knobs. The noise holds what the other knobs do; and a search draws good "
        "values together, so that a part of an effect may belong to another knob."
    )
    return join(
        [
            el("p", said, class_="lead"),
            figure,
            *(
                el("p", f"{words}: {', '.join(names)}.")
                for words, verdict in groups.items()
                if (names := [effect.knob for effect in found if effect.verdict == verdict])
            ),
            el("p", note, class_="note"),
            folded(f"All of it in numbers: {some(len(found), 'knob')}", _table(subject)),
        ]
    )


def _frame(subject: Subject) -> pd.DataFrame:
    """One row per value of each knob."""
    return pd.DataFrame(
        [
            {"knob": effect.knob, "value": level.label, "trials": len(level.members), "failed": level.failed}
            | _columns(subject.found.metric, level.objective)
            | (_columns("images_per_s", level.rate) if subject.by_frechet else {})
            | {"p": effect.p, "p_holm": effect.p_holm, "verdict": effect.verdict}
            for effect in subject.effects
            for level in effect.levels
        ]
    )


def _columns(name: str, mean: Mean | None) -> dict[str, Any]:
    values = (mean.mean, mean.low, mean.high, mean.trials) if mean is not None else (None, None, None, 0)
    return dict(zip((f"{name}_mean", f"{name}_low", f"{name}_high", f"{name}_trials"), values, strict=True))


def _table(subject: Subject) -> Html:
    rows, marks = list[list[object]](), list[str]()
    for effect in subject.effects:
        for place, level in enumerate(effect.levels):
            mean, speed = level.objective, level.rate
            known = mean is not None and mean.low is not None and mean.high is not None
            rows.append(
                [
                    effect.knob if place == 0 else "",
                    level.label,
                    len(level.members),
                    level.failed or "",
                    number(mean.mean) if mean is not None else "",
                    f"{number(mean.low)} … {number(mean.high)}" if mean is not None and known else "",
                    *([rounded(speed.mean) if speed is not None else ""] if subject.by_frechet else []),
                    effect.verdict if place == 0 else "",
                ]
            )
            marks.append("" if effect.verdict == ABOVE else "rest")
    rate = ["images/s"] if subject.by_frechet else []
    return table(
        ["knob", "value", "trials", "failed", subject.label, "± its error", *rate, "verdict"], rows, marks, words=2
    )


# ---------------------------------------------------------------------------------------------------------- trade-offs
def trade_offs(subject: Subject, files: Files) -> Html | None:
    """Pareto fronts: the objective against speed, against memory, and against the seconds of all workers."""
    found, base = subject.found, subject.stars.baseline
    if len(found.ranked) < 2:
        return None
    frame = report_numbers.trade_offs(found)
    files.csv("trade_offs", frame)
    figure = files.chart(
        "trade_offs",
        lambda: report_figures.trade_offs(found, frame, subject.stars),
        f"{subject.label} against images per second and against memory",
        "The line joins the trials that no other beats in both directions at once.",
    )
    if figure is None:
        return None
    said = []
    for column, words in (
        ("on_front_images_per_s", "images/s"),
        ("on_front_peak_memory_mib", "memory"),
        ("on_front_worker_s", "training seconds × workers"),
    ):
        if column in frame:
            names = list(frame["trial"][frame[column]])
            among = ", the baseline among them" if base is not None and base.name in names else ""
            said.append(f"{len(names):,} in {subject.label} and {words}{among}")
    whole = f"Beaten by no other of {some(len(frame), 'trial')} in both at once: {'; '.join(said)}."
    return join([el("p", whole, class_="lead"), figure])


def parallel(subject: Subject, files: Files) -> Html | None:
    """Every trial as a line through its knobs."""
    ranked = subject.found.ranked
    values = {name: {shown(t.drawn[name]) for t in ranked if name in t.drawn} for name in subject.by_weight()}
    names = [name for name in values if len(values[name]) > 1]
    chosen = names[:AXES]
    figure = files.chart(
        "parallel",
        lambda: report_figures.parallel(subject.found, subject.stars, chosen),
        "parallel coordinates of all trials",
        "Axes in the order of the search file. At the foot of an axis: the knob does not apply. Data: trials.csv.",
    )
    if figure is None:
        return None
    left = len(names) - len(chosen)
    best = report_figures.darkest(len(ranked))
    said = f"Each line is one of {some(len(ranked), 'trial')} with a result"
    said += f", the best {best} dark" if len(ranked) > best else ""
    said += f"; {some(left, 'knob that matters', 'knobs that matter')} less left out" if left else ""
    return join([el("p", f"{said}.", class_="lead"), figure])


# ------------------------------------------------------------------------------------------------------------- compile
def compiling(subject: Subject, files: Files) -> Html | None:
    """What torch.compile costs, and when it has paid; only of a search that compiled."""
    frame = report_numbers.compiled(subject.found)
    if frame.empty:
        return None
    files.csv("compile", frame)
    rows: list[dict[str, Any]] = [
        {str(key): value if is_known(value) else None for key, value in row.items()}
        for row in frame.astype(object).to_dict("records")
    ]
    pairs = [row for row in rows if row["versus_uncompiled"] is not None]
    budget_s, winner, figure = subject.found.space.budget.per_trial_s, subject.stars.winner, None
    costs = [row["compile_s"] for row in rows if row["compile_s"] is not None]
    cost = "its cost was not recorded"
    if costs:
        span = number(min(costs)) if min(costs) == max(costs) else f"{number(min(costs))} to {number(max(costs))}"
        cost = f"compiling took {span}\N{NO-BREAK SPACE}s of a budget of {duration(budget_s)}"
    if pairs:
        paid = sum(row["break_even_s"] is not None and row["break_even_s"] <= budget_s for row in pairs)
        said = (
            f"{some(len(pairs), 'configuration')} ran with and without torch.compile: within the budget it pays in "
            f"{paid} of them; {cost}."
        )
        mine = [row for row in pairs if winner is not None and row["trial"] == winner.name]
        row = max(mine or pairs, key=lambda row: float(row["versus_uncompiled"]))
        figure = files.chart(
            "compile",
            lambda: report_figures.break_even(row, budget_s),
            "images against training seconds, compiled and not",
            f"{row['trial']} and {row['uncompiled']}, which are equal but for compilation.",
        )
    else:
        said = (
            f"{some(len(rows), 'configuration')} ran under torch.compile, and none of them without it as well: when it "
            f"pays cannot be told; {cost}."
        )
    best = sorted(rows, key=lambda row: -float(row["versus_uncompiled"] or 0.0))[:ROWS]
    header = [
        "trial",
        "mode",
        "not compiled",
        "compile s",
        "images/s",
        "not compiled",
        "ratio",
        "pays after",
        "or images",
    ]
    cells = [
        [
            row["trial"],
            row["mode"],
            row["uncompiled"] or "–",
            *(rounded(row[key]) for key in ("compile_s", "images_per_s", "uncompiled_images_per_s")),
            times(row["versus_uncompiled"]),
            _pays(row),
            rounded(row["images_to_break_even"]),
        ]
        for row in best
    ]
    more = f"The first {ROWS} of {len(rows):,}. " if len(rows) > ROWS else ""
    charged = "count as" if subject.found.space.budget.compile_charged else "do not count as"
    note = f"{more}Compile seconds {charged} training seconds in this search. "
    return join(
        [
            el("p", said, class_="lead"),
            figure,
            table(header, cells, words=3),
            el("p", note, files.links("compile"), class_="note"),
        ]
    )


def _pays(row: Mapping[str, Any]) -> str:
    if row["versus_uncompiled"] is None:
        return "not known"
    return secs(row["break_even_s"]) if row["break_even_s"] is not None else "never"
