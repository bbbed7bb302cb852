"""The table of a grid that was searched once: a curve for every point."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff import search_space as spaces
from tunediff.config import ConfigError, Systems
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.trial_record import TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.search_space.model import combinations

TABLE, BASELINE = "table.csv", "baseline.yaml"


@dataclasses.dataclass(frozen=True)
class Curve:
    """What a trial of one point measured."""

    knobs: dict[str, Any]
    """Every searched knob that applies, by dotted name."""
    config: dict[str, Any]
    """Every knob by dotted name."""
    fingerprint: str
    points: tuple[tuple[float, float], ...]
    """(training seconds, objective) of every evaluation, in order."""
    status: str
    spent_s: float
    """Training seconds of the whole trial."""

    @property
    def value(self) -> float | None:
        """The objective at the end; None: it failed."""
        return self.points[-1][1] if self.status == "ok" else None


class Table:
    """A recorded grid: the curve of every point, the baseline first."""

    def __init__(self, space: SearchSpace, curves: Sequence[Curve], budget_s: float) -> None:
        self.space, self.curves, self.budget_s = space, tuple(curves), budget_s
        self._by_fingerprint = {curve.fingerprint: curve for curve in curves}
        losses = [self.loss(curve.value) for curve in curves if curve.value is not None]
        self.best, self.worst = min(losses), max(losses)
        """Of the finished curves, as `loss` has them."""
        self.ratios = space.mode == "min" and all(value > 0 for curve in curves for _, value in curve.points)
        """Whether values are compared by their ratios."""
        self.total_s = sum(curve.spent_s for curve in curves)

    def loss(self, value: float) -> float:
        """The objective turned so that smaller is better."""
        return value if self.space.mode == "min" else -value

    def regret(self, loss: float) -> float:
        """How far that is from the best: in parts of the best, or of the way from the best to the worst."""
        if self.ratios:
            return loss / self.best - 1
        return (loss - self.best) / ((self.worst - self.best) or 1.0)

    def at(self, values: Mapping[str, Any]) -> Curve | None:
        """The curve of a drawn point; None: its knobs contradict each other."""
        try:
            return self._by_fingerprint[cfg.fingerprint(self.space.config(values))]
        except ConfigError:
            return None


def load(path: Path, out: Path | None = None) -> Table:
    """The table of a search's folder, of a folder that holds table.csv, or of such a file.

    That of a search is written to `out`/table.csv first. Raises `ConfigError` if there is none or a curve is missing.
    """
    file = path / TABLE if path.is_dir() else path
    if (path / "trials").is_dir():
        file = (out or path) / TABLE
        space, trials = _recorded(path)
        write(file, path, space.metric, trials)
        if not (baseline_path := file.with_name(BASELINE)).exists():
            baseline_path.write_text(cfg.dump(space.baseline), encoding="utf-8")
    if not file.is_file():
        raise ConfigError(f"{path}: no table there; record one with `python -m tunediff.search replay_digits`")
    return _read(file)


def _recorded(folder: Path) -> tuple[SearchSpace, list[TrialRecord]]:
    """A search and its trials, one for each point of its grid. Raises `ConfigError` if some are missing."""
    space = spaces.load(spaces.of_search(folder))
    if space.kind != "grid" or space.seeds > 1 or not space.evaluates or space.early_stopping != "none":
        needed = f"a grid: of one seed, objective {space.workload.objective.name}, nothing stopped"
        raise ConfigError(f"{folder.name}: no table: it needs {needed}")
    trials = record.read_trials(folder)
    done = {trial.fingerprint for trial in trials if trial.finished}
    missing = [point for point in space.candidates if cfg.fingerprint(space.config(point)) not in done]
    full = len(list(combinations(space.dimensions))) - len(space.skipped)
    if missing or len(space.candidates) < full:
        raise ConfigError(
            f"{folder.name}: {full - len(space.candidates) + len(missing)} of {full} points are not recorded; "
            f"python -m tunediff.search --resume {folder.name} --trials {full}"
        )
    return space, trials


def measured(metric: str) -> tuple[str, str, str]:
    """Columns of a table beside its knobs: training seconds, objective, how the trial ended (`record.STATUSES`)."""
    return "train_s", metric, "status"


def write(path: Path, folder: Path, metric: str, trials: Sequence[TrialRecord]) -> None:
    """Write the table of a search's trials: one row per evaluation, one more without a value where a trial failed."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.drawn))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*names, *measured(metric)])
        for trial in trials:
            knobs = [_cell(trial.drawn[name]) if name in trial.drawn else "" for name in names]
            for point in trial.points:
                rows.writerow([*knobs, f"{point.train_s:.4f}", f"{point[metric]:.6g}", trial.status])
            if trial.status != "ok":
                rows.writerow([*knobs, f"{_cost_s(folder / 'trials' / trial.name, trial):.4f}", "", trial.status])


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cost_s(folder: Path, trial: TrialRecord) -> float:
    """Training seconds of a trial that failed. Its journal has them at its last point; from there on, wall-clock."""
    reached_s = trial.points[-1].train_s if trial.points else 0.0
    since = max([trial.started, *(line["time"] for line in record.events(folder) if line["event"] == "point")])
    return min(reached_s + max(0.0, trial.ended - since), max(reached_s, trial.budget_s or math.inf))


def _read(path: Path) -> Table:
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    baseline_path = path.with_name(BASELINE)
    baseline = cfg.load(baseline_path) if baseline_path.is_file() else cfg.baseline("digits")
    columns = measured(cfg.of(baseline).objective.name)
    names = [name for name in (lines[0] if lines else {}) if name not in columns]
    if not names or any(column not in lines[0] for column in columns):
        raise ConfigError(f"{path}: no table; it needs columns of knobs and {', '.join(columns)}, and rows")
    for name in names:
        baseline.schema.knob(name, str(path))
    rows: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for line in lines:
        rows.setdefault(tuple(line[name] or "" for name in names), []).append(line)
    points = [{n: _value(cell) for n, cell in zip(names, cells, strict=True) if cell} for cells in rows]
    space = _space(
        points, str(path), {"base": str(baseline_path)} if baseline_path.is_file() else {"workload": "digits"}
    )
    curves = [_curve(space, point, lines, str(path)) for point, lines in zip(points, rows.values(), strict=True)]

    # Complete: a curve for every point that can be drawn, and evaluations at the same fractions in all of them.
    done = [curve for curve in curves if curve.status == "ok"]
    lengths = {len(curve.points) for curve in done}
    if len(done) < 2 or len(lengths) > 1 or any(len(curve.points) > max(lengths) for curve in curves):
        raise ConfigError(f"{path}: incomplete: {len(done)} finished curves, of {sorted(lengths)} evaluations")
    possible = {cfg.fingerprint(config): values for values, config in _configs(space)}
    if missing := [values for key, values in possible.items() if key not in {curve.fingerprint for curve in curves}]:
        raise ConfigError(
            f"{path}: incomplete: {len(missing)} of {len(possible)} points of the grid have no curve, "
            f"e.g. {text.knobs(missing[0])}"
        )
    # Evaluations lie at equal fractions of the budget, or a step later: the largest budget of which that is true.
    budget_s = min(s * len(curve.points) / i for curve in done for i, (s, _) in enumerate(curve.points, start=1))
    limits = dataclasses.replace(space.budget, per_trial_s=budget_s)
    return Table(dataclasses.replace(space, budget=limits), curves, budget_s)


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def _space(points: Sequence[dict[str, Any]], source: str, origin: Mapping[str, str]) -> SearchSpace:
    """The space that holds just these points, the first of them its baseline; what is not searched does not matter."""
    content = {**origin, "fixed": points[0], "trials": list(points), "budget": {"per_trial": "1s"}}
    space = spaces.parse(content, source)
    budget = dataclasses.replace(space.budget, trials=len(points))
    return dataclasses.replace(space, kind="search", candidates=space.candidates[:1], budget=budget)


def _curve(space: SearchSpace, point: dict[str, Any], lines: Sequence[dict[str, str]], source: str) -> Curve:
    where = f"{source}: {text.knobs(point)}"
    statuses = {line["status"] for line in lines}
    if len(statuses) > 1 or (status := statuses.pop()) not in record.STATUSES or status in ("pruned", "skipped"):
        raise ConfigError(f"{where}: incomplete: status {', '.join(sorted({line['status'] for line in lines}))}")
    try:
        seconds = [float(line["train_s"]) for line in lines]
        pairs = zip(seconds, (line[space.metric] for line in lines), strict=True)
        values = tuple((s, float(value)) for s, value in pairs if value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: train_s and {space.metric} must be numbers") from None
    if seconds != sorted(seconds) or (status == "ok" and len(values) < len(lines)):
        needed = f"rows must rise in train_s, and those of status ok have a {space.metric}"
        raise ConfigError(f"{where}: incomplete: {needed}")
    config, drawn = space.config(point), space.expand(point, where)
    return Curve(drawn, cfg.flat(config), cfg.fingerprint(config), values, status, seconds[-1])


def _configs(space: SearchSpace) -> Iterator[tuple[dict[str, Any], Systems]]:
    for values in combinations(space.dimensions):
        try:
            yield values, space.config(values)
        except ConfigError:
            continue
