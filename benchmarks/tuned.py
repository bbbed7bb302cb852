"""How far each timestep sampler gets once it is tuned: `python benchmarks/tuned.py --measure digits_tune --out T.csv`,
then `python benchmarks/tuned.py T.csv …`.

Every method gets the same number of trials of one search file (its first is the file's baseline, then Optuna's TPE
draws the learning rate and the method's own knobs), and its best runs again on new seeds, at the same budget and at
four times it. All on one seed start from the same weights and see the same images in the same order. Budgets are
numbers of images in batches of 64: what a method itself costs per step is under 1 % here
(docs/results/2026-11-methods.md), so equal images are equal seconds, on whatever machine and beside whatever load.

    OMP_NUM_THREADS=1 python benchmarks/tuned.py --measure digits_tune --images 36000 --out digits.csv
    OMP_NUM_THREADS=1 python benchmarks/tuned.py --measure cifar10_tune --images 64000 --out C.csv data.path=IMAGES.zip

The same command again goes on where it was. Differences from `uniform` and their intervals are those of
`python -m tunediff.compare`: blocks of one seed, all methods at once.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from scipy import stats

from tunediff import cli, search_space
from tunediff import config as cfg
from tunediff.analysis.sequential import Rules, analyse
from tunediff.analysis.statistics import Difference
from tunediff.core.clock import Budget
from tunediff.core.outcomes import Verdict
from tunediff.core.text import markdown_table
from tunediff.distributed import alone
from tunediff.search_space import Draw, SearchSpace
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import run

BATCH = {"loader.batch_size": 64}
"""Of all: at other sizes equal images are other seconds."""
METHODS = ("uniform", "log_snr_laplace", "info_noise", "wiener")
"""A sampler, or one beside a weighting and an optimizer: `wiener+min_snr`, `wiener+constant+muon`. `beta_policy` is not
among them: its price per step is not small here, so equal images are in its favour, as they are in that of `muon`."""
NAMES = ("timesteps.name", "weighting.name", "optimizer.name")
COLUMNS = ("file", "method", "times", "seed", "values", "images", "frechet")
"""A trial has times 0 and its number in place of a seed."""
Rows = dict[tuple[str, str], list[dict[str, str]]]
"""Rows of a table by (method, times)."""


def train(
    space: SearchSpace, values: Mapping[str, Any], images: int, seed: int, points: int, device: str
) -> list[tuple[int, float]]:
    """Train and return (images, distance) at each point."""
    config = cfg.override(
        space.config({**values, **BATCH, "seed": seed}), {"evaluation.points": points}
    )
    outcome = run(Engine(config, Budget(samples=images), alone(device), Observer()))
    return [(point.samples, float(point["frechet"])) for point in outcome.points]


class Table:
    """The CSV file of a measurement; a run that it already has is not repeated."""

    def __init__(self, path: Path, name: str, images: int, points: int, device: str) -> None:
        """Read the file, or begin it. name: the search file. images: of a trial. points, device: see `main`."""
        self._path, self._name, self._images, self._points, self._rows = (
            path,
            name,
            images,
            points,
            Rows(),
        )
        self._device = device
        if path.exists():
            with open(path, newline="") as file:
                for row in csv.DictReader(file):
                    self._rows.setdefault((row["method"], row["times"]), []).append(row)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(",".join(COLUMNS) + "\n")

    def distance(
        self, space: SearchSpace, method: str, times: int, seed: int, values: Mapping[str, Any]
    ) -> float:
        """Return the final distance of a run, which is made and written first if the table lacks it."""
        for row in self._rows.get((method, str(times)), []):
            if int(row["seed"]) == seed:
                return float(row["frechet"].split(";")[-1])
        # The trials have the file's own seed; the runs afterwards have others.
        run_seed = space.baseline.seed + (1000 + seed) * (times > 0)
        images, looks = self._images * max(1, times), self._points if times else 1
        points = train(space, values, images, run_seed, looks, self._device)
        numbers = (
            ";".join(f"{value:g}" for value in column) for column in zip(*points, strict=True)
        )
        with open(self._path, "a", newline="") as file:
            row_values = [self._name, method, times, seed, json.dumps(dict(values)), *numbers]
            csv.writer(file, lineterminator="\n").writerow(row_values)
        print(method, times, seed, f"{points[-1][1]:.4g}", dict(values), flush=True)
        return points[-1][1]


def best_values(space: SearchSpace, method: str, trials: int, table: Table) -> Mapping[str, Any]:
    """Tune a method by so many trials and return its best values."""
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=trials // 2)
    )
    tuned = tuple(dimension for dimension in space.dimensions if dimension.name not in BATCH)
    study.enqueue_trial(
        {dimension.name: space.candidates[0][dimension.name] for dimension in tuned}
    )
    draw, best = Draw(tuned), (math.inf, dict[str, Any]())
    for number in range(trials):
        values = draw(trial := study.ask())
        distance = table.distance(space, method, 0, number, values)
        study.tell(trial, distance)
        best = min(best, (distance, values), key=lambda result: result[0])
    return best[1]


def measure(args: argparse.Namespace) -> None:
    """Run what the table `args.out` does not have yet; `args`: see `main`."""
    table = Table(args.out, args.measure, args.images, args.points, args.device)
    chosen: dict[str, tuple[SearchSpace, Mapping[str, Any]]] = {}
    for method in args.methods.split(","):
        words = [
            *args.words,
            *(f"{knob}={name}" for knob, name in zip(NAMES, method.split("+"), strict=False)),
        ]
        space = search_space.load(
            search_space.find(args.measure), words, {"trials": max(2, args.trials)}
        )
        chosen[method] = space, best_values(space, method, args.trials, table)
    for times in args.times:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for method, (space, values) in chosen.items():
                table.distance(space, method, times, seed, values)


# --------------------------------------------------------------------------------------------------------- what is seen
def crossing(curve: Sequence[tuple[float, float]], value: float) -> float:
    """Images after which a falling curve is at `value`, between two points in the logarithms of both; NaN: never."""
    if curve[0][1] <= value:
        return curve[0][0]
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= value < high:
            return before * (after / before) ** (math.log(high / value) / math.log(high / low))
    return math.nan


def faster(rows: pd.DataFrame, method: str) -> str:
    """How many times fewer images it needs for uniform's final distance on the same seed: mean and 95 % interval; ≥
    where a first point was there already, so that nobody knows when it was reached: then there is no upper end."""
    logs, early = [], False
    for seed, theirs in rows[rows["method"] == "uniform"].set_index("seed")["curve"].items():
        mine = rows[(rows["method"] == method) & (rows["seed"] == seed)]["curve"]
        if len(mine):
            logs.append(math.log(theirs[-1][0] / crossing(mine.iloc[0], theirs[-1][1])))
            early |= mine.iloc[0][0][1] <= theirs[-1][1]
    if any(math.isnan(one) for one in logs):
        return f"not on {sum(map(math.isnan, logs))} of {len(logs)} seeds"
    if len(logs) < 2:
        return "–"
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.fmean(logs)
    low = f"{math.exp(mean):.2f} ({math.exp(mean - half):.2f} …"
    return f"≥ {low})" if early else f"{low} {math.exp(mean + half):.2f})"


def ratio(difference: Difference) -> str:
    """Return a ratio with its interval; bold if it is significant."""
    if difference.low is None:
        return "–"
    text = f"{difference.estimate:.2f} ({difference.low:.2f} … {difference.high:.2f})"
    return f"**{text}**" if difference.verdict in (Verdict.BETTER, Verdict.WORSE) else text


def show(table: Path) -> str:
    """A Markdown table of one measurement."""
    rows = pd.read_csv(table)
    rows["curve"] = [
        list(zip(map(float, str(a).split(";")), map(float, str(b).split(";")), strict=True))
        for a, b in zip(rows["images"], rows["frechet"], strict=True)
    ]
    rows["final"] = [curve[-1][1] for curve in rows["curve"]]
    cells = [["sampler", "budget", "FD", "× uniform's", "times faster", "its knobs"]]
    for times, part in rows[rows["times"] > 0].groupby("times"):
        finals = part.pivot(index="method", columns="seed", values="final")
        if "uniform" not in finals.index:
            continue  # the measurement is under way
        names = ["uniform", *(name for name in finals.index if name != "uniform")]
        values = finals.loc[names].to_numpy()
        differences = analyse(np.asarray(values, float), Rules(values.shape[1])).differences
        for place, name in enumerate(names):
            here = finals.loc[name].dropna()
            versus = "" if place == 0 else ratio(differences[place - 1])
            chosen = part[part["method"] == name].iloc[0]["values"]
            knobs = ", ".join(
                f"{knob} {value:.3g}" if isinstance(value, float) else f"{knob} {value}"
                for knob, value in json.loads(chosen).items()
            )
            spread = f" ± {here.std():.2g}" if len(here) > 1 else ""
            cells.append([
                f"`{name}`", f"{times}×", f"{here.mean():.3g}{spread} ({len(here)})", versus,
                "" if place == 0 else faster(part, name), knobs if times == 1 else "",
            ])  # fmt: skip
    each = int(((rows["times"] == 0) & (rows["method"] == "uniform")).sum())
    return f"{rows['file'].iloc[0]}: {each} trials each\n\n{markdown_table(cells)}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE.csv | knob=value",
        help="what was measured; with --measure knobs",
    )
    parser.add_argument(
        "--measure", metavar="SEARCH", help="search file whose dimensions are tuned"
    )
    parser.add_argument("--images", type=int, default=36000, help="of a trial (default: 36000)")
    parser.add_argument("--trials", type=int, default=8, help="of each method (default: 8)")
    parser.add_argument(
        "--seeds", type=int, default=5, help="new seeds of each method's best (default: 5)"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="of the new seeds (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument(
        "--times",
        type=int,
        nargs="+",
        default=[1, 4],
        help="their budgets, in those of a trial (default: 1 4)",
    )
    parser.add_argument(
        "--points", type=int, default=4, help="their evaluations, at equal distances (default: 4)"
    )
    parser.add_argument("--methods", default=",".join(METHODS), help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.csv")
    args = parser.parse_intermixed_args()
    if args.measure:
        measure(args)
    else:
        print("\n".join(show(Path(word)) for word in args.words))
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
