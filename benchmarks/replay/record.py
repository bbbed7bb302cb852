"""Record a table of real curves: `python -m benchmarks.replay.record SEARCH_FILE --out TABLE.csv [knob=value …]`.

Draws configurations of a search file at random, the baseline first, and trains each once per seed, in this process and
with one thread, judged at equally spaced points of its budget. The clock of a training is the CPU time of the process,
so that other load on the machine moves neither budgets nor seconds. One row per training is appended when it has ended;
the same command again goes on where it was.

    OMP_NUM_THREADS=1 python -m benchmarks.replay.record digits --budget 5 --out table.csv evaluation.images=300
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import torch

from tunediff import cli, search_space
from tunediff import config as cfg
from tunediff.config import ConfigError, Values
from tunediff.core.clock import Budget, Clock
from tunediff.core.point import Point
from tunediff.core.trial_record import NotFiniteError
from tunediff.distributed import alone
from tunediff.search_space import Draw, SearchSpace
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import run

COLUMNS = ("number", "seed", "status", "train_s", "values", "knobs")
"""Of a table: a configuration has the same number on all seeds; `train_s` and `values` of all points, with semicolons
between them; `knobs` as JSON."""


class Points(Observer):
    """Keeps the points of a training, also of one that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[Point] = []

    def point(self, point: Point) -> bool:
        """Keep a point."""
        self.points.append(point)
        return True


def configurations(space: SearchSpace, many: int) -> list[Values]:
    """Draw so many different configurations of a space, by its seed, after the baseline."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=space.seed))
    draw, found = (
        Draw(space.dimensions),
        {cfg.fingerprint(space.baseline): dict(space.candidates[0])},
    )
    while len(found) < many:
        values = draw(study.ask())
        try:
            found.setdefault(cfg.fingerprint(space.config(values)), values)
        except ConfigError:  # knobs that contradict each other
            continue
    return list(found.values())


def train(
    space: SearchSpace, values: Values, seed: int, points: int
) -> tuple[str, list[tuple[float, float]]]:
    """Train once and return how it ended and (CPU seconds of training, objective) of every point."""
    config = cfg.override(
        space.config(values), {"seed": space.baseline.seed + seed, "evaluation.points": points}
    )
    budget, observer, status = Budget(space.budget.per_trial_s), Points(), "ok"
    try:
        run(
            Engine(
                config, budget, alone("cpu"), observer, clock=Clock(budget, now=time.process_time)
            )
        )
    except NotFiniteError:
        status = "nan"
    return status, [(point.train_s, float(point[space.metric])) for point in observer.points]


def record(args: argparse.Namespace) -> None:
    """Train what the table lacks; `args`: see `arguments`."""
    space = search_space.load(
        search_space.find(args.search), args.words, {"per_trial": f"{args.budget}s"}
    )
    if not args.out.exists():
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(",".join(COLUMNS) + "\n")
    with open(args.out, newline="") as file:
        done = {(int(row["number"]), int(row["seed"])) for row in csv.DictReader(file)}
    for number, values in enumerate(configurations(space, args.configs)):
        for seed in range(args.seeds):
            if (number, seed) in done:
                continue
            began = time.process_time()
            status, points = train(space, values, seed, args.points)
            seconds, objectives = (
                ";".join(f"{value:.5g}" for value in column) for column in _columns(points)
            )
            with open(args.out, "a", newline="") as file:
                row = [number, seed, status, seconds, objectives, json.dumps(values)]
                csv.writer(file, lineterminator="\n").writerow(row)
            print(
                number,
                seed,
                status,
                objectives,
                f"{time.process_time() - began:.1f} CPU s",
                flush=True,
            )


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [seconds for seconds, _ in points], [value for _, value in points]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "search", metavar="SEARCH_FILE", help="search file, or a workload's own file"
    )
    parser.add_argument("words", nargs="*", metavar="knob=value")
    parser.add_argument(
        "--configs", type=int, default=64, help="configurations (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=2, help="trainings of each (default: %(default)s)"
    )
    parser.add_argument(
        "--points", type=int, default=8, help="evaluations of a training (default: %(default)s)"
    )
    parser.add_argument(
        "--budget", type=float, default=5.0, help="CPU seconds of a training (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="TABLE.csv")
    return parser.parse_intermixed_args(argv)


@cli.guarded
def main(argv: Sequence[str] | None = None) -> Any:
    """Record; see `--help`."""
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    record(arguments(argv))
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
