"""What a report says in numbers beyond those of `results`, `comparison` and `confirmation`: importance and effect of
knobs, trade-offs, why the winner wins, when compilation pays, what failed.

Objectives are compared by their logarithms where all of them are positive: effects and noise of a Fréchet distance and
of a throughput are proportional.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import special  # scipy.stats takes seconds to import

from tunediff.cli import number
from tunediff.record import TrialRecord
from tunediff.report import study_table
from tunediff.reporting.comparison import LEVEL, holm
from tunediff.reporting.report_words import shown
from tunediff.reporting.results import Results
from tunediff.space import Dimension
from tunediff.study import Study

ENOUGH = 8
"""Trials from which a forest is fitted."""
TREES, DEPTH = 32, 8
"""Of the forest. Deeper ones take minutes at 1,000 trials and change no share by more than 0.01."""
FAIR = 0.3
"""R² from which on what a forest says is more than a guess."""
BINS = 5
"""Parts of a range, each with about as many trials."""
PARTS = ("data_wait", "host_to_device", "sampler", "forward", "backward", "optimizer", "ema", "other")
"""Of a step, in the order in which they happen: `step_forward_s`, … of a point."""
ABOVE, WITHIN, TOO_FEW = "larger than the noise", "within the noise", "too few trials"


def searched(found: Results) -> list[Dimension]:
    """The knobs of the search, in the order of its file; the seed repeats, it is not searched."""
    return [dimension for dimension in found.space.dimensions if dimension.name != "seed"]


def rate(trial: TrialRecord) -> float | None:
    """Images per second at the last evaluation."""
    value = trial.points[-1].get("images_per_s") if trial.points else None
    return float(value) if value else None


# --------------------------------------------------------------------------------------------------------- importance
@dataclasses.dataclass(frozen=True)
class Importance:
    """How much of a target's variance a forest puts down to each knob by itself."""

    shares: dict[str, float]
    """By knob, the largest first. What is missing to 1 belongs to combinations of knobs. A knob with `when:` has its
    share among the trials that have it."""
    fit: float | None
    """R² of such a forest for trials that it was not fitted to: at most 1; 0 or less, it predicts nothing."""
    trials: int
    unvaried: list[str]
    """Knobs with one value in all trials."""


def importance(found: Results, target: Callable[[TrialRecord], float | None]) -> Importance | None:
    """fANOVA (Hutter, Hoos, Leyton-Brown, ICML 2014) over the trials that have the target; None: too few of them.

    The study is made of the journals: the one in study.db holds penalties for failures, which are no measurements.
    """
    known = [(trial, value) for trial in found.trials if (value := target(trial)) is not None]
    logs = all(value > 0 for _, value in known)
    rows = [(trial.drawn, math.log(value) if logs else value) for trial, value in known]
    names = [dimension.name for dimension in searched(found)]
    by_name = {dimension.name: dimension for dimension in searched(found)}
    values = {name: {shown(drawn[name]) for drawn, _ in rows if name in drawn} for name in names}
    varied = [name for name in names if len(values[name]) > 1]
    if len(rows) < ENOUGH or not varied or len({value for _, value in rows}) < 2:
        return None
    always = [name for name in varied if all(name in drawn for drawn, _ in rows)]
    shares = _fanova(rows, [by_name[name] for name in always], always)
    # A knob that does not always apply is judged where it does, beside all that apply there as well.
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in varied:
        if name not in always:
            groups.setdefault(tuple(i for i, (drawn, _) in enumerate(rows) if name in drawn), []).append(name)
    for places, wanted in groups.items():
        part = [rows[i] for i in places]
        if len(part) >= ENOUGH and len({value for _, value in part}) > 1:
            beside = [name for name in varied if all(name in drawn for drawn, _ in part)]
            shares |= _fanova(part, [by_name[name] for name in beside], wanted)
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return Importance(
        ordered, _fit(rows, [by_name[n] for n in always]), len(rows), [n for n in names if n not in varied]
    )


def _fanova(
    rows: Sequence[tuple[dict[str, Any], float]], dimensions: list[Dimension], wanted: list[str]
) -> dict[str, float]:
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions = {
        dimension.name: _distribution(dimension, [drawn[dimension.name] for drawn, _ in rows])
        for dimension in dimensions
    }
    study = optuna.create_study()
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={
                    name: shown(drawn[name])
                    if isinstance(kind, optuna.distributions.CategoricalDistribution)
                    else drawn[name]
                    for name, kind in distributions.items()
                },
                distributions=distributions,
                value=value,
            )
            for drawn, value in rows
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forest = FanovaImportanceEvaluator(n_trees=TREES, max_depth=DEPTH, seed=0)
        shares = get_param_importances(study, evaluator=forest, params=list(distributions), normalize=False)
    return {name: float(shares[name]) for name in wanted if math.isfinite(shares[name])}


def _distribution(dimension: Dimension, values: list[Any]) -> Any:
    """Of the search file, widened to what the journals hold: they may be older than the file, or a stranger's."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if _is_range(dimension, values):
        low, high = min(dimension.low, *values), max(dimension.high, *values)
        return FloatDistribution(low, high, log=dimension.log and low > 0)
    return CategoricalDistribution(sorted({shown(value) for value in values}))


def _is_range(dimension: Dimension, values: list[Any]) -> bool:
    return dimension.choices is None and all(_is_number(value) for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fit(rows: Sequence[tuple[dict[str, Any], float]], dimensions: list[Dimension]) -> float | None:
    """R² out of the bag: every trial is predicted by the trees that did not see it."""
    from sklearn.ensemble import RandomForestRegressor

    columns = []
    for dimension in dimensions:
        values = [drawn[dimension.name] for drawn, _ in rows]
        if _is_range(dimension, values):
            columns.append(np.array(values, dtype=float))
        else:
            words = np.array([shown(value) for value in values])
            columns += [(words == word).astype(float) for word in sorted(set(words))]
    if not columns:
        return None
    forest = RandomForestRegressor(n_estimators=200, oob_score=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forest.fit(np.stack(columns, axis=1), np.array([value for _, value in rows]))
    return float(forest.oob_score_)


# ------------------------------------------------------------------------------------------------------------- effects
@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over trials: geometric where all values of the search are positive."""

    mean: float
    low: float | None
    """Mean minus its standard error; None: one trial."""
    high: float | None
    """Mean plus its standard error."""
    trials: int


@dataclasses.dataclass(frozen=True)
class Level:
    """One value of a knob, or one part of its range."""

    label: str
    objective: Mean | None
    """Over the trials that ended ok; None: none did."""
    rate: Mean | None
    """Images per second, over all trials that measured them."""
    failed: int
    """Trials that ended as oom, nan, timeout or error."""
    members: frozenset[str]
    """Names of all trials with it."""


@dataclasses.dataclass(frozen=True)
class Effect:
    """What the trials say about one knob, whatever the others were."""

    knob: str
    levels: list[Level]
    p: float | None
    """Of a one-way analysis of variance of the objective; None: too few trials."""
    p_holm: float | None
    """After Holm's correction over all knobs."""
    verdict: str

    @property
    def spread(self) -> float | None:
        """The largest mean over the smallest, where the smallest is above 0."""
        means = [level.objective.mean for level in self.levels if level.objective is not None]
        return max(means) / min(means) if len(means) > 1 and min(means) > 0 else None


def effects(found: Results) -> list[Effect]:
    """For every searched knob with several values, in the order of the file, what its values reached."""
    values = {trial.name: trial.value(found.metric) for trial in found.trials}
    logs = all(value > 0 for value in values.values() if value is not None)
    drafts: list[Effect] = []
    for dimension in searched(found):
        groups = _groups(dimension, [trial for trial in found.trials if dimension.name in trial.drawn])
        samples, levels = list[list[float]](), list[Level]()
        for label, trials in groups:
            ends = [value for trial in trials if (value := values[trial.name]) is not None]
            samples.append([math.log(value) for value in ends] if logs else ends)
            rates = [value for trial in trials if (value := rate(trial)) is not None]
            failed = sum(trial.status not in (None, "ok", "pruned") for trial in trials)
            names = frozenset(trial.name for trial in trials)
            levels.append(Level(label, _mean(ends, logs), _mean(rates, True), failed, names))
        if len(levels) > 1:
            drafts.append(Effect(dimension.name, levels, _anova(samples), None, TOO_FEW))
    corrected = holm([effect.p for effect in drafts])
    return [
        dataclasses.replace(effect, p_holm=p, verdict=TOO_FEW if p is None else ABOVE if p < LEVEL else WITHIN)
        for effect, p in zip(drafts, corrected, strict=True)
    ]


def _groups(dimension: Dimension, trials: list[TrialRecord]) -> list[tuple[str, list[TrialRecord]]]:
    """Trials by the value of a knob, or by the part of its range."""
    values = [trial.drawn[dimension.name] for trial in trials]
    distinct = set(map(shown, values))
    numbers = _is_range(dimension, values)
    if not numbers or len(distinct) <= BINS + 1:
        order = [shown(value) for value in dimension.choices or (sorted(values) if numbers else values)]
        labels = [word for word in dict.fromkeys([*order, *map(shown, values)]) if word in distinct]
        return [(word, [t for t, v in zip(trials, values, strict=True) if shown(v) == word]) for word in labels]
    parts = max(2, min(BINS, len(values) // 4))
    edges = np.unique(np.quantile(values, np.linspace(0, 1, parts + 1)))
    places = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    found = []
    for place in range(len(edges) - 1):
        inside = [trial for trial, at in zip(trials, places, strict=True) if at == place]
        if inside:
            drawn = [trial.drawn[dimension.name] for trial in inside]
            found.append((f"{number(min(drawn))} … {number(max(drawn))}", inside))
    return found


def _mean(values: Sequence[float], logs: bool) -> Mean | None:
    if not values:
        return None
    sample = np.log(values) if logs else np.asarray(values, dtype=float)
    back: Callable[[float], float] = math.exp if logs else float
    mean = float(sample.mean())
    if len(values) < 2:
        return Mean(back(mean), None, None, 1)
    error = float(sample.std(ddof=1)) / math.sqrt(len(values))
    return Mean(back(mean), back(mean - error), back(mean + error), len(values))


def _anova(samples: Sequence[Sequence[float]]) -> float | None:
    """p-value of the F test that all groups with at least two values have the same mean; None: it cannot be made."""
    groups = [np.asarray(sample) for sample in samples if len(sample) > 1]
    everything = np.concatenate(groups) if groups else np.empty(0)
    between, within = len(groups) - 1, len(everything) - len(groups)
    if between < 1:
        return None
    explained = sum(len(group) * float(group.mean() - everything.mean()) ** 2 for group in groups)
    left = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    if left <= 0:  # values that repeat exactly
        return 0.0 if explained > 0 else 1.0
    return float(special.fdtrc(between, within, (explained / between) / (left / within)))


# ---------------------------------------------------------------------------------------------------------- trade-offs
def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points are beaten by no other: another one that is at most as large in both, and smaller in one."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    on, best = [False] * len(points), math.inf
    before: tuple[float, float] | None = None
    for i in order:
        on[i] = points[i][1] < best or points[i] == before
        if points[i][1] < best:
            best, before = points[i][1], points[i]
    return on


def trade_offs(found: Results) -> pd.DataFrame:
    """One row per trial that ended ok: objective, images/s, memory, and on which fronts it lies.

    Of a search with training seconds times workers as its second objective, that as well.
    """
    down = 1.0 if found.space.mode == "min" else -1.0
    signs = {"images_per_s": -1.0, "peak_memory_mib": 1.0}
    if found.space.cost is not None:
        signs[found.space.cost] = 1.0
    signs.pop(found.metric, None)
    rows = []
    for trial in found.ranked:
        last = trial.points[-1]
        values = {name: rate(trial) if name == "images_per_s" else last.get(name) for name in signs}
        rows.append({"trial": trial.name, found.metric: trial.value(found.metric), **values})
    frame = pd.DataFrame(rows, columns=["trial", found.metric, *signs])
    for name, sign in signs.items():
        known = frame[name].notna()
        pairs = [(down * a, sign * b) for a, b in zip(frame[found.metric][known], frame[name][known], strict=True)]
        frame[f"on_front_{name}"] = False
        if pairs:  # journals of another version, or a stranger's, may lack one of them throughout
            frame.loc[known, f"on_front_{name}"] = front(pairs)
    return frame


# ----------------------------------------------------------------------------------------------------------------- why
@dataclasses.dataclass(frozen=True)
class Why:
    """The winner beside the baseline: how much of the difference is speed, and how much is learning per image."""

    seconds: float
    """Training seconds at which both are compared."""
    at_seconds: tuple[float, float]
    """Objective of (baseline, winner) then."""
    images: tuple[int, int]
    """Images that they have seen by then."""
    equal_images: int
    """The smaller of the two."""
    at_images: tuple[float, float] | None
    """Objective of both when they had seen so many; None: one of them was not evaluated early enough."""

    @property
    def learning(self) -> float | None:
        """Part of log(winner / baseline) at equal seconds that is there at equal images already."""
        return math.log(self.at_images[1] / self.at_images[0]) if self.at_images is not None else None

    @property
    def total(self) -> float:
        """log(winner / baseline) at equal seconds; below 0, the winner is better."""
        return math.log(self.at_seconds[1] / self.at_seconds[0])

    @property
    def throughput(self) -> float | None:
        """The rest: what the winner made of its further images, or lacks for having seen fewer."""
        return self.total - self.learning if self.learning is not None else None


def why(baseline: TrialRecord, winner: TrialRecord, metric: str = "frechet") -> Why | None:
    """The decomposition; None without positive values of both.

    Curves are read between their evaluations: straight in training seconds or images, the objective on a logarithmic
    scale. Before its first evaluation nothing is known of a curve.
    """
    curves = [[point for point in trial.points if (point.get(metric) or 0.0) > 0] for trial in (baseline, winner)]
    if not all(curves):
        return None
    ends = [curve[-1] for curve in curves]
    # Trainings overshoot their budget by a part of a step: that close, their ends count as the same second.
    seconds = min(end["train_s"] for end in ends)
    alike = max(end["train_s"] for end in ends) <= 1.02 * seconds
    at = [
        (float(end[metric]), float(end["images"]))
        if alike
        else (_between(curve, "train_s", seconds, metric), _between(curve, "train_s", seconds, "images"))
        for curve, end in zip(curves, ends, strict=True)
    ]
    if any(value is None or images is None for value, images in at):
        return None
    values, images = [float(value or 0) for value, _ in at], [float(seen or 0) for _, seen in at]
    fewer = min(images)
    same = [
        value if seen == fewer else _between(curve, "images", fewer, metric)
        for value, seen, curve in zip(values, images, curves, strict=True)
    ]
    known = (float(same[0]), float(same[1])) if same[0] is not None and same[1] is not None else None
    return Why(seconds, (values[0], values[1]), (round(images[0]), round(images[1])), round(fewer), known)


def _between(curve: Sequence[dict[str, Any]], along: str, place: float, key: str) -> float | None:
    xs = [float(point[along]) for point in curve]
    if not xs[0] <= place <= xs[-1]:
        return None
    ys = [float(point[key]) for point in curve]
    if key == "images":
        return float(np.interp(place, xs, ys))
    return math.exp(float(np.interp(place, xs, np.log(ys))))


def step_parts(trial: TrialRecord) -> dict[str, float]:
    """Seconds of each part of a step over the last evaluation interval; {} where they were not recorded."""
    last = trial.points[-1] if trial.points else {}
    return {part: float(last[f"step_{part}_s"]) for part in PARTS if f"step_{part}_s" in last}


def batch_size(trial: TrialRecord) -> int | None:
    """Images per optimizer step."""
    size = trial.config.get("loader.batch_size")
    return size if isinstance(size, int) and size > 0 else None


# ------------------------------------------------------------------------------------------------------------- compile
def compiled(found: Results) -> pd.DataFrame:
    """One row per configuration under torch.compile: its cost, and when it has paid, where it also ran without.

    `break_even_s`: training seconds, compilation included, after which it has seen as many images as the same
    configuration without compilation. By `study_table`, which compares equal configurations only.
    """
    groups: dict[str, list[TrialRecord]] = {}
    for trial in found.trials:
        if "parallel.workers" in trial.config:
            groups.setdefault(_uncompiled(trial), []).append(trial)
    compared = ("versus_uncompiled", "images_to_break_even", "break_even_s")
    columns = ("configuration", "compile_s", "images_per_s", *compared)
    space = dataclasses.replace(found.space, study=Study("", columns), kind="trials", operations=0)
    lines = []
    for trials in groups.values():
        plain = next((trial for trial in trials if not _compiles(trial)), None)
        rows: list[tuple[TrialRecord, dict[str, Any]]] = []
        if plain is None:  # nothing to compare with
            rows = [(trial, {"compile_s": compile_s(trial), "images_per_s": rate(trial)}) for trial in trials]
        elif any(map(_compiles, trials)):
            table = study_table.table(dataclasses.replace(found, space=space, trials=trials))
            rows = [(row.runs[0], dict(row.values)) for row in table.rows if _compiles(row.runs[0])]
        for trial, values in rows:
            lines.append(
                {
                    "trial": trial.name,
                    "mode": trial.config["compile.mode"],
                    "uncompiled": plain.name if plain is not None else None,
                    "uncompiled_images_per_s": rate(plain) if plain is not None else None,
                    "compile_s": values.get("compile_s"),
                    "images_per_s": values.get("images_per_s"),
                    **{name: values.get(name) for name in compared},
                }
            )
    return pd.DataFrame(lines)


def compile_s(trial: TrialRecord) -> float | None:
    """Seconds of compiling and of the warm-up step; None where there was no compiling."""
    spent = trial.end.get("seconds") or (trial.points[-1].get("seconds") if trial.points else None) or {}
    return float(spent["compile"]) if spent.get("compile") else None


def _compiles(trial: TrialRecord) -> bool:
    return bool(trial.config.get("compile.mode", "none") != "none")


def _uncompiled(trial: TrialRecord) -> str:
    """What a trial is apart from compilation and seed, as a key."""
    kept = {name: value for name, value in trial.config.items() if not name.startswith("compile.") and name != "seed"}
    return json.dumps(kept, sort_keys=True, default=str)


# ------------------------------------------------------------------------------------------------------------ failures
def failures(found: Results) -> pd.DataFrame:
    """One row per kind of end other than ok: status, how often, why (of the first such trial), which trials."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for trial in found.trials:
        if trial.status in (None, "ok"):
            continue
        reason = trial.reason if trial.status != "pruned" else "stopped early by the scheduler"
        # Numbers differ from one trial to the next: without them the same cause reads the same.
        key = (str(trial.status), re.sub(r"\d+(\.\d+)?", "#", reason)[:80])
        row = rows.setdefault(key, {"status": trial.status, "trials": 0, "reason": reason, "names": []})
        row["trials"] += 1
        row["names"].append(trial.name)
    lines = sorted(rows.values(), key=lambda row: -row["trials"])
    frame = pd.DataFrame(lines, columns=["status", "trials", "reason", "names"])
    frame["names"] = [" ".join(names) for names in frame["names"]]
    return frame


def suspects(found: Results, effects: Sequence[Effect], most: int = 5) -> list[tuple[str, str, int, int]]:
    """Values of knobs with which trials fail more often than without: (knob, value, failed, trials), the worst first.

    At least two failures and twice the rate of the other trials; a hint, no proof.
    """
    failed = sum(trial.status not in (None, "ok", "pruned") for trial in found.trials)
    ended = sum(trial.finished for trial in found.trials)
    found_: list[tuple[float, tuple[str, str, int, int]]] = []
    for effect in effects:
        for level in effect.levels:
            others, inside = ended - len(level.members), len(level.members)
            if level.failed < 2 or others < 1:
                continue
            here, there = level.failed / inside, (failed - level.failed) / others
            if here >= 2 * there:
                found_.append((here - there, (effect.knob, level.label, level.failed, inside)))
    return [suspect for _, suspect in sorted(found_, key=lambda item: -item[0])[:most]]
