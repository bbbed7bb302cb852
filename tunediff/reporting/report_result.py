"""Sections of the report: what won and by how much, over time, why, and how its images look."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tunediff import config as cfg
from tunediff.cli import knobs, number
from tunediff.record import TrialRecord
from tunediff.report import study_figure, study_table
from tunediff.reporting import confirmation, figures, report_figures, report_numbers
from tunediff.reporting.comparison import BETTER, SAME, Comparison
from tunediff.reporting.confirmation import Confirmation, Estimate
from tunediff.reporting.report_html import Html, el, join, picture, table
from tunediff.reporting.report_numbers import PARTS, Why, batch_size, compile_s, rate, step_parts
from tunediff.reporting.report_subject import Files, Subject, changes, group_of
from tunediff.reporting.report_words import duration, is_known, percent, rounded, secs, shown, some, times, with_sd
from tunediff.study import MEASURED, quantity

LARGEST_IMAGE = 1024
"""Pixels per side of an image grid inside the page."""


# ------------------------------------------------------------------------------------------------------------ what won
def won(subject: Subject, files: Files) -> Html | None:
    """The answer: confirmed where it was, else as far as one run each goes."""
    winner = subject.stars.winner
    if winner is None:
        return _nothing_won(subject)
    parts: list[object] = []
    if subject.told is not None:
        first, *more = subject.told.sentences()
        parts += [el("p", first, class_="lead"), *(el("p", sentence) for sentence in more)]
        parts += [_key_figures(subject, winner), _confirmation(subject.told, files)]
    elif subject.compared is not None:
        parts += [el("p", *_best_of_seeds(subject, subject.compared, winner), class_="lead")]
        parts += [_key_figures(subject, winner)]
    else:
        parts += [el("p", *_single(subject, winner), class_="lead"), _key_figures(subject, winner)]
        parts += [el("p", _luck(subject), class_="note")]
        files.csv("won", pd.DataFrame([_row(subject, trial, what) for trial, _, what in subject.stars.pairs()]))
    if subject.confirming:
        parts.append(el("p", subject.confirming, class_="note"))
    base = subject.stars.baseline
    if (changed := changes(subject.found, winner)) and base is not None and base.name != winner.name:
        parts += [el("h3", f"What {subject.leader} changes"), _changed(subject, winner, changed)]
    return join(parts)


def _nothing_won(subject: Subject) -> Html:
    trials, budget_s = subject.found.trials, subject.found.space.budget.per_trial_s
    begun = [trial for trial in trials if not trial.finished]
    ended = len(trials) - len(begun)
    if not trials:
        said = "No trial has begun yet."
    elif not begun:
        said = (
            f"Nothing won: none of the {some(ended, 'trial')} that ended has a result; the reasons are under failures."
        )
    else:
        seconds = {trial.name: trial.points[-1]["train_s"] if trial.points else 0.0 for trial in begun}
        name = max(seconds, key=lambda name: seconds[name])
        said = f"No trial has a result yet: {some(len(begun), 'trial is', 'trials are')} under way"
        said += f", {name} farthest, at {number(seconds[name])} of {duration(budget_s)}" if seconds[name] else ""
        said += f", and {ended} ended without one." if ended else "."
    return el("p", said, class_="lead")


def _single(subject: Subject, winner: TrialRecord) -> list[object]:
    """The result of a search with one run per configuration."""
    metric, base = subject.found.metric, subject.stars.baseline
    value, of_base = winner.value(metric) or 0.0, base.value(metric) if base is not None else None
    others = len(subject.found.ranked) - 1
    mine = el("span", winner.name, class_="winner")
    if base is not None and winner.name == base.name:
        itself = el("span", f"The baseline ({base.name})", class_="baseline")
        if not others:
            return [itself, f" is the only trial with a result so far: {subject.label} {number(value)}."]
        rest = "the other trial does not beat" if others == 1 else f"none of {others:,} other trials beats"
        return [itself, f" itself is best: {rest} its {subject.label} of {number(value)}."]
    after = (
        f"after {number(float(winner.points[-1]['train_s']))} training seconds its {subject.label} is {number(value)}"
    )
    said: list[object] = [mine, f" is best: {after if subject.by_frechet else f'{rounded(value)} images/s'}"]
    if base is None or not of_base:
        yet = " yet" if base is None or not base.finished else ""
        return [*said, f"; the baseline has no result{yet} to compare it with."]
    itself = el("span", f"the baseline ({base.name})", class_="baseline")
    if not subject.by_frechet:
        return [*said, f", {number(value / of_base)} times the {rounded(of_base)} of ", itself, "."]
    said += [f", {percent(1 - value / of_base)} below the {number(of_base)} of ", itself, "."]
    if subject.crossing_s:
        ratio = base.points[-1]["train_s"] / subject.crossing_s
        when = f"after {secs(subject.crossing_s)}: {number(ratio)}"
        if subject.crosses_before_first:
            when = f"before its first evaluation, at {secs(subject.crossing_s)}: more than {number(ratio)}"
        said.append(f" It is as good as the baseline at its end {when} times faster.")
    return said


def _best_of_seeds(subject: Subject, compared: Comparison, winner: TrialRecord) -> list[object]:
    group = group_of(compared, winner)
    values = [value for trial in group.done if (value := trial.value(compared.metric)) is not None]
    said: list[object] = [el("span", group.name, class_="winner" if group.changed else "baseline")]
    said.append(f" has the best mean over {some(len(values), 'seed')}: {subject.label} {with_sd(values)}")
    if not group.changed:
        return [*said, ". It is the baseline itself."]
    difference = group.difference
    if difference.low is not None and difference.high is not None and difference.estimate is not None:
        what = "times the baseline's" if compared.ratios else "more than the baseline's"
        ends = f"95 % interval {number(difference.low)} … {number(difference.high)}"
        said.append(f", {number(difference.estimate)} {what} ({ends})")
    if difference.verdict == BETTER:
        return [*said, ". That is larger than the noise, all comparisons counted."]
    if difference.verdict == SAME:
        return [*said, ". That is no difference larger than the noise."]
    return [*said, f" ({difference.verdict})."]


def _luck(subject: Subject) -> str:
    ended = len(subject.found.ranked)
    said = "One run each: nothing here says how much of that is chance"
    said += f", and the best of {ended:,} is partly the luckiest. " if ended > 2 else ". "
    if subject.confirming:
        return said
    if subject.found.space.kind == "search" and subject.by_frechet:
        return said + "A search file with confirm: runs the best again on new seeds and says whether they still win."
    return said + "A search file with seeds: runs every point several times and compares by the noise between them."


def _key_figures(subject: Subject, winner: TrialRecord) -> Html:
    """A few numbers that a reader wants first."""
    base, last = subject.stars.baseline, winner.points[-1]
    if base is not None and base.name == winner.name:
        base = None
    of_base: Mapping[str, Any] = base.points[-1] if base is not None and base.points else {}
    entries = list(_confirmed(subject.told) if subject.told is not None else _searched(subject, winner, base))
    if subject.by_frechet:
        entries.append(_beside("images/s", last.get("images_per_s"), of_base.get("images_per_s")))
    entries.append(_beside("peak memory", last.get("peak_memory_mib"), of_base.get("peak_memory_mib"), " MiB"))
    return el(
        "dl",
        *(el("div", el("dt", what), el("dd", value), el("dd", beside)) for what, value, beside in entries if value),
        class_="keys",
    )


def _confirmed(told: Confirmation) -> Iterator[tuple[str, str, str]]:
    """(what, value, beside it) of the confirming runs."""
    group, base = told.winner or told.leader, told.compared.baseline
    if group is None:
        return
    beside = f"baseline {with_sd(told.values(base))}" if base is not None else ""
    yield f"{told.label}, new seeds", with_sd(told.values(group)), beside
    if (paired := told.paired(group)) is not None:
        yield "difference to the baseline", _signed(paired.mean), _interval(paired)
    speedup, reached = told.speedup(group)
    if speedup is not None:
        runs = f"in {reached} of {some(len(group.done), 'run')}"
        yield (
            "as good as the baseline",
            f"{times(speedup.mean)} faster",
            ", ".join(filter(None, (_interval(speedup), runs))),
        )


def _searched(subject: Subject, winner: TrialRecord, base: TrialRecord | None) -> Iterator[tuple[str, str, str]]:
    """(what, value, beside it) of a search that has no confirming runs."""
    metric = subject.found.metric
    if subject.compared is not None:
        mine, first = group_of(subject.compared, winner).done, subject.compared.baseline
        values = [value for trial in mine if (value := trial.value(metric)) is not None]
        others = (
            [value for trial in first.done if (value := trial.value(metric)) is not None] if first is not None else []
        )
        beside = f"baseline {with_sd(others)}" if base is not None and others else ""
        yield f"{subject.label}, mean of {some(len(values), 'seed')}", with_sd(values), beside
    else:
        yield _beside(subject.label, winner.value(metric), base.value(metric) if base is not None else None)
    if base is None or not subject.by_frechet or base.value(metric) is None:
        return
    end_s, crossing_s = float(base.points[-1]["train_s"]), subject.crossing_s
    if crossing_s:
        less, when = ("> ", "before") if subject.crosses_before_first else ("", "after")
        seconds = f"{when} {secs(crossing_s)} instead of {secs(end_s)}"
        yield "as good as the baseline", f"{less}{times(end_s / crossing_s)} faster", seconds
    else:
        yield "as good as the baseline", "never", "within its budget"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{number(estimate.low)} … {number(estimate.high)} (95 %)".replace("-", "−")


def _beside(what: str, own: float | None, of_base: float | None, unit: str = "") -> tuple[str, str, str]:
    if own is None:
        return what, "", ""
    ratio = f": {times(own / of_base)}" if of_base else ""
    return what, f"{rounded(own)}{unit}", f"baseline {rounded(of_base)}{unit}{ratio}" if of_base is not None else ""


def _signed(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{number(abs(value))}"


def _confirmation(told: Confirmation, files: Files) -> Html:
    """The confirming runs as a table."""
    files.csv("won", pd.DataFrame(confirmation.table(told)))
    rows, marks, best = list[list[object]](), list[str](), told.winner or told.leader
    for group in told.compared.groups:
        speedup, reached = told.speedup(group) if group.changed else (None, 0)
        paired = told.paired(group) if group.changed else None
        often = "" if reached == len(group.done) else f", in {reached} of {some(len(group.done), 'run')}"
        never = "never as good" if group.changed and group.done and told.search.metric == "frechet" else ""
        rows.append(
            [
                knobs(group.changed),
                group.difference.verdict,
                f"{len(group.done)} of {told.compared.seeds}",
                with_sd(told.values(group)),
                str(paired) if paired is not None else "",
                f"{speedup}{often}" if speedup is not None else never,
            ]
        )
        marks.append("baseline" if not group.changed else "winner" if group is best else "")
    header = ("configuration", "verdict", "runs", f"{told.label}, mean ± sd", "difference to the baseline", "speed-up")
    note = (
        "Runs made after the choice, on seeds that had no part in it. Differences are paired by seed, brackets hold "
        "95 % intervals, and the verdict counts all comparisons. "
    )
    return join(
        [
            el("h3", "On new seeds"),
            table(header, rows, marks, words=2),
            el("p", note, files.links("won"), class_="note"),
        ]
    )


def _changed(subject: Subject, winner: TrialRecord, changed: Mapping[str, Any]) -> Html:
    base, order = cfg.flat(subject.found.space.baseline), subject.by_weight()
    rows = []
    for name in sorted(changed, key=lambda name: order.index(name) if name in order else len(order)):
        idle = winner.not_effective.get(name)
        mine = el("span", shown(changed[name]), class_="winner")
        note = f" (changes nothing here: {idle})" if idle else ""
        before = shown(base[name]) if name in base else "–"
        rows.append([el("code", name), el("span", before, class_="baseline"), join([mine, note])])
    return table(["knob", "baseline", subject.stars.winner_is], rows, words=3)


def _row(subject: Subject, trial: TrialRecord, what: str) -> dict[str, Any]:
    last = trial.points[-1] if trial.points else {}
    names = ("train_s", "images", "images_per_s", "peak_memory_mib")
    value = {"what": what, "trial": trial.name, subject.found.metric: trial.value(subject.found.metric)}
    return {**{name: last.get(name) for name in names}, **value, "speedup": subject.found.speedup(trial)}


# ---------------------------------------------------------------------------------------------- several seeds, studies
def seeds(subject: Subject, files: Files) -> Html | None:
    """Every configuration of a search with several seeds, and which differences are noise."""
    if (compared := subject.compared) is None:
        return None
    frame, best = compared.table(), subject.stars.winner
    files.csv("comparison", frame)
    effect = "ratio" if compared.ratios else "difference"
    rows, marks = list[list[object]](), list[str]()
    for group, row in zip(compared.groups, frame.astype(object).to_dict("records"), strict=True):
        values = [value for trial in group.done if (value := trial.value(compared.metric)) is not None]
        known = [float(row[key]) for key in (effect, f"{effect}_low", f"{effect}_high") if is_known(row[key])]
        rows.append(
            [
                group.name,
                group.difference.verdict,
                f"{len(group.done)} of {compared.seeds}",
                with_sd(values),
                f"{known[0]:.3f} ({known[1]:.3f} … {known[2]:.3f})" if len(known) == 3 else "",
                number(float(row["p_holm"])) if is_known(row["p_holm"]) else "",
                times(row["speedup"]),
                rounded(row["images_per_s"]),
            ]
        )
        mine = best is not None and any(trial.name == best.name for trial in group.runs)
        marks.append("baseline" if not group.changed else "winner" if mine else "")
    header = ["configuration", "verdict", "runs", f"{subject.label}, mean ± sd", f"{effect} (95 %)", "p (Holm)"]
    said = compared.conclusions() or ["Nothing can be compared yet."]
    figure = None
    if subject.by_frechet and any(len(group.curve(compared.metric)) > 1 for group in compared.groups):
        figure = files.drawn(
            "comparison",
            lambda path: figures.comparison(subject.found, compared, path),
            "objective against training seconds, mean and standard deviation over seeds",
            "Mean over the seeds, and ± one standard deviation.",
        )
    return join(
        [
            el("p", said[0], class_="lead"),
            figure,
            table([*header, "speed-up", "images/s"], rows, marks, words=2),
            el("p", said[-1]) if compared.resolution is not None else None,  # what lies between is in the table
            el("p", files.links("comparison"), class_="note"),
        ]
    )


def study(subject: Subject, files: Files) -> Html | None:
    """The table and the figure of a search file's `study:` section."""
    found = subject.found
    if found.space.study is None or not found.trials:
        return None
    try:
        told = study_table.table(found)
        lines = iter(told.records())
    except (
        KeyError,
        TypeError,
        ValueError,
        ZeroDivisionError,
    ) as error:  # journals of another version, or a stranger's
        return el("p", f"The study's table cannot be made of these journals: {type(error).__name__}: {error}")
    files.csv("study", told.frame())
    rows = list[list[object]]()
    for row in told.rows:
        for _ in range(max(1, len(row.operations)) if told.study.of_operations else 1):
            line = next(lines)
            cells = [study_table.shown(column, line[column]) for column in told.columns]
            rows.append([f"{cells[0]} {told.marks(row)}".rstrip(), *cells[1:]])
    figure = None
    if told.study.has_figure:
        figure = files.drawn(
            "study",
            lambda path: study_figure.draw(told, figures.measured_on(found), path),
            "the figure of the study",
            "The study's own figure.",
        )
    return join(
        [
            el("p", told.study.title or "The study's own table and figure.", class_="lead"),
            figure,
            table([quantity(column).heading for column in told.columns], rows),
            *(el("p", note, class_="note") for note in told.notes()),
            el("p", files.links("study"), class_="note"),
        ]
    )


# -------------------------------------------------------------------------------------------------------------- curves
def curves(subject: Subject, files: Files) -> Html | None:
    """The objective of all trials against training seconds."""
    found, base = subject.found, subject.stars.baseline
    crossing = subject.crossing_s
    ring = " The dashed line is the baseline at its end." if crossing else ""
    ring += f" The ring: {subject.leader} is as good." if crossing and not subject.crosses_before_first else ""
    if any(trial.points for trial in found.trials):
        frame = found.curves()
        wide = [name for name in frame.columns if any(isinstance(value, list | dict) for value in frame[name])]
        files.csv("curves", frame.drop(columns=wide))
    figure = files.chart(
        "curves",
        lambda: report_figures.curves(found, subject.stars, crossing),
        f"{subject.label} against training seconds, all trials",
        f"Grey: the other trials; dotted: those that failed, were stopped, or are under way.{ring}",
    )
    if figure is None:
        return None
    of_base, ranked = base.value(found.metric) if base is not None else None, found.ranked
    others = [trial for trial in ranked if base is None or trial.name != base.name]
    if of_base is None:
        said = f"{some(len(ranked), 'trial has', 'trials have')} a result; the baseline has none to compare them with."
    elif not others:
        said = "Only the baseline has a result so far."
    else:
        better = sum((trial.value(found.metric) or 0.0) < of_base for trial in others)
        said = f"{better:,} of {some(len(others), 'other trial')} with a result "
        said += "ends below the baseline." if better == 1 else "end below the baseline."
    return join([el("p", said, class_="lead"), figure])


# ----------------------------------------------------------------------------------------------------------------- why
CAVEAT = (
    "Shares are of the logarithm of the distance. Equal images are read from curves in the middle of a training, "
    "between two evaluations; learning rate and EMA follow the budget, so that a training that was meant to end there "
    "would end lower."
)


def why(subject: Subject, files: Files) -> Html | None:
    """Baseline and winner beside each other: is it speed, or is it learning per image?"""
    base, winner = subject.stars.baseline, subject.stars.winner
    if base is None or winner is None or base.name == winner.name or not base.points:
        return None
    told, figure = report_numbers.why(base, winner) if subject.by_frechet else None, None
    if told is not None:
        figure = files.chart(
            "why_curves",
            lambda: report_figures.why_curves(subject.found, subject.stars, told),
            "baseline and winner against training seconds, and against images",
            "Left: what the clock sees. Right: the same curves by the images they have seen. A gap on the right is "
            "learning per image; what the left has beyond it is speed.",
        )
    said = explain(told, subject.label, _trust(subject)) if told is not None else faster(base, winner)
    rows = _side_by_side(subject, base, winner, told)
    files.csv("why", pd.DataFrame(rows, columns=["quantity", "baseline", "winner"]))
    header = ["", f"baseline ({base.name})", f"{subject.stars.winner_is} ({winner.name})", "ratio"]
    cells = [
        [name, _cell(theirs), _cell(mine), times(mine / theirs) if theirs and mine is not None else ""]
        for name, theirs, mine in rows
    ]
    note = join([f"{CAVEAT} " if told is not None else "", files.links("why")])
    return join(
        [
            el("p", said, class_="lead"),
            figure,
            table(header, cells),
            el("p", note, class_="note"),
            _steps(subject, files, base, winner),
        ]
    )


def _trust(subject: Subject) -> str:
    if subject.told is not None and subject.told.winner is None:
        return "the confirming runs do not show that the gain is more than noise"
    disturbed = any(point.get("disturbed") is True for trial, _, _ in subject.stars.pairs() for point in trial.points)
    runs = (
        "these two are runs of one seed" if subject.told is not None or subject.compared is not None else "one run each"
    )
    return f"{runs}, and others used the machine meanwhile" if disturbed else runs


def explain(told: Why, label: str, trust: str = "") -> str:
    """The decomposition as one sentence; `trust`: what is to be said about its noise."""
    (base, winner), end = told.at_seconds, f"; {trust}." if trust else "."
    ratio = told.images[1] / told.images[0] if told.images[0] else 1.0
    many = "as many images" if abs(ratio - 1) < 0.02 else f"{number(ratio)} times as many images"
    at_end = f"{label} {number(winner)} instead of {number(base)} at {number(told.seconds)} training seconds"
    if told.learning is None or told.throughput is None or told.at_images is None:
        return (
            f"{at_end}; how much of that is speed cannot be told, for at {told.equal_images:,} images, the most that "
            f"both have seen, one of them had not been evaluated yet{end}"
        )
    same = f"{number(told.at_images[1])} instead of {number(told.at_images[0])} at {told.equal_images:,} images"
    if told.total >= 0:
        return f"No gain: {at_end}, {same}, with {many} in the same seconds{end}"
    learning, throughput = told.learning / told.total, told.throughput / told.total
    learned, sped = f"learning more from each image ({same})", f"speed ({many} in the same seconds)"
    if learning >= 0.02 and throughput >= 0.02:
        return f"Of the gain, {at_end}, {percent(learning)} is {learned} and {percent(throughput)} is {sped}{end}"
    if throughput <= -0.02:
        return f"All of the gain, {at_end}, is {learned}; in speed it loses ({many} in the same seconds){end}"
    if learning <= -0.02:
        return f"All of the gain, {at_end}, is {sped}; from each image it learns less ({same}){end}"
    if learning > 0.5:
        return f"Practically all of the gain, {at_end}, is {learned}, with {many} in the same seconds{end}"
    return f"Practically all of the gain, {at_end}, is {sped}; from each image both learn as much ({same}){end}"


def faster(base: TrialRecord, winner: TrialRecord) -> str:
    """Why a throughput is higher, in a sentence."""
    speed, of_base = rate(winner), rate(base)
    if not speed or not of_base:
        return "Images per second were not measured for both."
    said = f"{rounded(speed)} images/s instead of {rounded(of_base)}, {number(speed / of_base)} times as fast"
    mine, theirs = per_thousand(winner), per_thousand(base)
    saved = {part: theirs.get(part, 0.0) - mine.get(part, 0.0) for part in PARTS if part in mine or part in theirs}
    if not mine or not theirs:
        return said + "."
    most = max(saved, key=lambda part: saved[part])
    if saved[most] <= 0:
        return said + "; no part of a step takes less time than before."
    return f"{said}: most is saved in {MEASURED[f'step_{most}_s'].label}, {secs(saved[most])} per 1,000 images."


def per_thousand(trial: TrialRecord) -> dict[str, float]:
    """Seconds of each part of the step per 1,000 images, so that trials of other batch sizes can be compared."""
    size = batch_size(trial)
    return {part: 1000 * spent / size for part, spent in step_parts(trial).items()} if size else {}


def _side_by_side(
    subject: Subject, base: TrialRecord, winner: TrialRecord, told: Why | None
) -> list[tuple[str, float | None, float | None]]:
    """(quantity, of the baseline, of the winner), without those that neither has."""

    def last(name: str, key: str, scale: float = 1.0) -> tuple[str, float | None, float | None]:
        values = [trial.points[-1].get(key) for trial in (base, winner)]
        mine, theirs = (float(value) * scale if value is not None else None for value in reversed(values))
        return name, theirs, mine

    rows: list[tuple[str, float | None, float | None]] = []
    if told is not None:
        rows.append((f"{subject.label} at equal seconds ({secs(told.seconds)})", *told.at_seconds))
        rows.append((f"{subject.label} at equal images ({told.equal_images:,})", *(told.at_images or (None, None))))
        rows.append(("images seen by then", told.images[0], told.images[1]))
    rows += [
        last("images/s", "images_per_s"),
        last("optimizer steps", "steps"),
        ("images per step", batch_size(base), batch_size(winner)),
        last("time of a step (ms)", "step_s", 1000.0),
        *(last(f"· {MEASURED[f'step_{part}_s'].label} (ms)", f"step_{part}_s", 1000.0) for part in PARTS),
        last("time waiting for images (%)", "data_wait_share", 100.0),
        last("of a matrix product's speed here (%)", "peak_share", 100.0),
        ("compiling (s)", compile_s(base), compile_s(winner)),
        last("peak memory (MiB)", "peak_memory_mib"),
        last("images per joule", "images_per_j"),
    ]
    return [row for row in rows if row[1] is not None or row[2] is not None]


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == round(value) and abs(value) >= 10 else rounded(float(value))


def _steps(subject: Subject, files: Files, base: TrialRecord, winner: TrialRecord) -> Html:
    theirs, mine = per_thousand(base), per_thousand(winner)
    if not theirs or not mine:
        return el("p", "The parts of a step were not recorded for both.", class_="note")
    names = [part for part in PARTS if part in theirs or part in mine]
    columns = {"baseline_s_per_1000_images": theirs, "winner_s_per_1000_images": mine}
    files.csv("step", pd.DataFrame([{"part": p} | {name: of.get(p) for name, of in columns.items()} for p in names]))
    before, after = sum(theirs.values()), sum(mine.values())
    scale, unit = (1.0, "seconds") if before >= 5 else (1000.0, "milliseconds")
    said = f"1,000 images take {secs(after)} of training instead of {secs(before)}"
    saved = {part: theirs.get(part, 0.0) - mine.get(part, 0.0) for part in names}
    if after < 0.98 * before:
        most = max(saved, key=lambda part: saved[part])
        said += f"; most is saved in {MEASURED[f'step_{most}_s'].label}, {secs(saved[most])}"
    elif after > 1.02 * before:
        most = min(saved, key=lambda part: saved[part])
        said += f"; most is lost in {MEASURED[f'step_{most}_s'].label}, {secs(-saved[most])}"
    figure = files.chart(
        "step",
        lambda: report_figures.step(
            {part: spent * scale for part, spent in theirs.items()},
            {part: spent * scale for part, spent in mine.items()},
            f"{unit} per 1,000 images",
            subject.stars.winner_is,
        ),
        "parts of a training step, baseline and winner",
        "By images and not by steps, because batch sizes may differ; over the last evaluation interval of each.",
    )
    return join([el("h3", "Where a step goes"), el("p", f"{said}."), figure])


# -------------------------------------------------------------------------------------------------------------- images
def samples(subject: Subject, files: Files) -> Html | None:
    """What baseline and winner draw, at equal seconds."""
    if not subject.by_frechet or not subject.stars.pairs():
        return None
    grids, missing = list[Html](), list[str]()
    ends = [trial.points[-1]["train_s"] for trial, _, _ in subject.stars.pairs() if trial.points]
    for trial, _, what in subject.stars.pairs():
        kind = "baseline" if what == "baseline" else "winner"
        image = _grid(subject.found.folder, trial, kind)
        if image is None:
            missing.append(f"{what} ({trial.name})")
            continue
        files.keep(f"{kind}_samples.png", image)
        name = el("span", f"{what} ({trial.name})", class_=kind)
        at = f" after {secs(trial.points[-1]['train_s'])} of training. " if trial.points else ". "
        caption = el("figcaption", name, at, files.links(f"{kind}_samples"))
        grids.append(el("figure", picture("png", image, f"images by the {what}"), caption))
    none = f"No images are kept of {' and '.join(missing)}." if missing else ""
    if not grids:
        return el("p", none, class_="lead")
    protocol = subject.found.space.baseline.evaluation
    steps = f" with {protocol.steps} steps" if protocol.sampler == "ddim" else ""
    how = f"{protocol.sampler.upper()}{steps}, averaged weights, the same noise in all trials."
    equal = len(grids) == 2 and max(ends) < 1.05 * min(ends)
    said = f"The first images of the last evaluation{', after equal training seconds' if equal else ''}."
    return join(
        [el("p", said, class_="lead"), el("div", *grids, class_="pair"), el("p", f"{how} {none}", class_="note")]
    )


def _grid(folder: Path, trial: TrialRecord, kind: str) -> bytes | None:
    """The image grid of a trial, written anew: a file from elsewhere is decoded as pixels and as nothing else."""
    from PIL import Image

    places = [folder / "trials" / trial.name / "samples.png"]
    if not (folder / "trials").is_dir():  # a folder of tables keeps two of them by these names
        places.append(folder / ("baseline.png" if kind == "baseline" else "best.png"))
    for place in places:
        try:
            with Image.open(place, formats=["PNG"]) as image:
                if max(image.size) > 8192:
                    continue
                pixels = image.convert("L" if image.mode in ("1", "L") else "RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            continue
        pixels.thumbnail((LARGEST_IMAGE, LARGEST_IMAGE))
        written = io.BytesIO()
        pixels.save(written, format="PNG", optimize=True)
        return written.getvalue()
    return None
