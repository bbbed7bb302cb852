"""A table of real curves: configurations of a search space, each trained once on every seed."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff import search_space
from tunediff.analysis.noise import Noise, pooled
from tunediff.config import ConfigError, Values
from tunediff.core.point import Point
from tunediff.core.trial_record import STATUSES
from tunediff.search_space import SearchSpace
from tunediff.search_space.dimension import Dimension

TABLE, SEARCH = "table.csv", "search.yaml"
"""Files of a table's folder: what `benchmarks.replay.record` wrote, and the search file that it was given."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """What one training measured."""

    status: str
    points: tuple[Point, ...]


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A configuration and its curves, one for each seed."""

    knobs: Values
    config: Mapping[str, Any]
    """Every knob by dotted name."""
    fingerprint: str
    curves: tuple[Curve, ...]
    mean: float
    """Mean loss at the end over the seeds, see `Table.loss`; infinite: a training failed."""


class Table:
    """Recorded configurations, the baseline first, and the target of a search among them."""

    def __init__(
        self, space: SearchSpace, configurations: tuple[Configuration, ...], ratios: bool
    ) -> None:
        """`ratios`: losses are logarithms."""
        self.space, self.configurations, self.ratios = space, configurations, ratios
        self.points = max(len(curve.points) for one in configurations for curve in one.curves)
        ended = sorted(
            (one for one in configurations if math.isfinite(one.mean)), key=lambda one: one.mean
        )
        # Of the better half: poor configurations differ more from run to run, and compete with nobody
        half = ended[: (len(ended) + 1) // 2]
        groups = [
            [self.loss(curve.points[-1][space.metric]) for curve in one.curves] for one in half
        ]
        if (noise := pooled(groups, False, True)) is None:
            raise ConfigError("no configuration of the table ended well on two seeds")
        self.noise: Noise = noise
        self.target = min(one.mean for one in configurations) + noise.sd
        """The mean loss that a search wants: the table's best, give or take the noise of one run."""

    @property
    def good(self) -> int:
        """Return how many configurations reach the target."""
        return sum(one.mean <= self.target for one in self.configurations)

    def loss(self, value: float) -> float:
        """Return the objective with its sign or scale changed so that less is better and differences compare."""
        return loss(self.space, self.ratios, value)

    def nearest(self, values: Values, among: list[int]) -> int:
        """Return the configuration that is nearest to drawn values, of those with these places."""
        return min(
            among, key=lambda place: self._distance(values, self.configurations[place].knobs)
        )

    def _distance(self, first: Values, second: Values) -> float:
        """Return the sum of squared differences: of a range, in parts of it; of choices that differ, 1."""
        total = 0.0
        for dimension in self.space.dimensions:
            name = dimension.name
            if name in first and name in second and dimension.choices is None:
                total += (position(dimension, first[name]) - position(dimension, second[name])) ** 2
            else:
                total += first.get(name) != second.get(name)
        return total


def position(dimension: Dimension, value: float) -> float:
    """Return where a value lies in its range, from 0 to 1."""
    scale = math.log if dimension.log else float
    return float(
        (scale(value) - scale(dimension.low)) / (scale(dimension.high) - scale(dimension.low))
    )


def loss(space: SearchSpace, ratios: bool, value: float) -> float:
    """Return the objective so that less is better; its logarithm for `ratios`."""
    return math.log(value) if ratios else value if space.mode == "min" else -value


def load(folder: Path) -> Table:
    """Return the table of a folder. Raises `ConfigError` if it has none, or one with gaps."""
    path = folder / TABLE
    if not path.is_file() or not (folder / SEARCH).is_file():
        raise ConfigError(
            f"{folder}: no {TABLE} and {SEARCH}; record one with python -m benchmarks.replay.record"
        )
    space = search_space.load(folder / SEARCH)
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if {row["status"] for row in rows} - set(STATUSES):
        raise ConfigError(f"{path}: status: allowed: {', '.join(STATUSES)}")
    ratios = space.mode == "min" and all(
        float(value) > 0 for row in rows for value in row["values"].split(";") if value
    )
    by_number: dict[int, list[dict[str, str]]] = {}
    for row in rows:
        by_number.setdefault(int(row["number"]), []).append(row)
    seeds = max(map(len, by_number.values()), default=0)
    if seeds < 2 or [*by_number][:1] != [0]:
        raise ConfigError(
            f"{path}: incomplete: the baseline comes first, and each has two seeds or more"
        )
    complete = tuple(
        _configuration(space, ratios, one) for one in by_number.values() if len(one) == seeds
    )
    return Table(
        dataclasses.replace(space, noise=1, candidates=space.candidates[:1]), complete, ratios
    )


def _configuration(space: SearchSpace, ratios: bool, rows: list[dict[str, str]]) -> Configuration:
    knobs = json.loads(rows[0]["knobs"])
    curves = []
    for row in rows:
        pairs = (
            zip(row["train_s"].split(";"), row["values"].split(";"), strict=True)
            if row["values"]
            else ()
        )
        points = [
            Point(i, float(seconds), i, i, metrics={space.metric: float(value)})
            for i, (seconds, value) in enumerate(pairs, 1)
        ]
        curves.append(Curve(row["status"], tuple(points)))
    ends = [
        loss(space, ratios, one.points[-1][space.metric]) for one in curves if one.status == "ok"
    ]
    mean = sum(ends) / len(ends) if len(ends) == len(curves) else math.inf
    config = space.config(knobs)
    return Configuration(knobs, cfg.flat(config), cfg.fingerprint(config), tuple(curves), mean)
