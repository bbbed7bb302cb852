"""Do the forecasts of `tunediff.results.forecast` hold? `python benchmarks/forecast.py CURVES.csv … [--out FOLDER]`

Every configuration of a table was measured with 1, 4 and 16 times a budget. From the curves with one of them the value
at the end of a larger one is forecast, with the curves of the others at hand as in a search, and compared:

- `inside`: measured values within the 80 % interval; `with a spread fitted elsewhere`: on the first other table, which
  has seen nothing of this one. `half width`: of the intervals, in logarithms.
- `error`: root mean square of log(forecast/measured), of accuracies by their distance to 1; and `if unchanged`, `own
  slope`, `power law`: that of the value so far, of each curve's own slope, and of a power law with an offset,
  a + b·t^−c (Domhan et al., IJCAI 2015), fitted to it.
- `rank so far`: Kendall's τ of the values so far with the measured ones; 1: who is ahead stays ahead. As all go on with
  one slope, it is that of the forecasts as well. `pairs in order`: of those whose order was not said to be open.

    OMP_NUM_THREADS=1 python benchmarks/forecast.py --measure digits --out CURVES.csv
    OMP_NUM_THREADS=1 python benchmarks/forecast.py --measure cifar10 --out CURVES.csv data.path=cifar10-images.zip
    OMP_NUM_THREADS=1 python benchmarks/forecast.py --measure digits_classifier --out CURVES.csv

Measuring trains every configuration below with budgets of 1, 4 and 16 times as many samples, each from the start, and
appends its points to CURVES.csv. Samples, not seconds: the curves are then the same on a machine that others use. The
same command again goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import optimize, stats

from tunediff import cli, record, train
from tunediff import config as cfg
from tunediff.report.words import markdown_table
from tunediff.results.forecast import SPREAD, Common, Curve, Runs, Scale, common, crossing, trend

BUDGETS = (1, 4, 16)
SEEDS = 3
COLUMNS = ("workload", "configuration", "seed", "budget", "samples", "train_s", "value")

FIXED = {
    "digits": "loader.workers=0 loader.resident=true evaluation.images=1000 evaluation.steps=10 "
    "evaluation.validation_images=0 evaluation.points=8 loader.batch_size=64",
    "cifar10": "data.image_size=16 model.channels=16 model.multipliers=[1,2,2] model.blocks=1 model.attention=[8] "
    "model.norm_groups=8 model.dropout=0.0 loader.workers=0 loader.resident=true evaluation.extractor=classifier "
    "evaluation.images=400 evaluation.batch_size=200 evaluation.steps=10 evaluation.validation_images=0 "
    "evaluation.points=8 loader.batch_size=32",
    "digits_classifier": "loader.workers=0 loader.resident=true evaluation.points=8 loader.batch_size=64 "
    "optimizer.decay=constant",
}
SAMPLES = {"digits": 8192, "cifar10": 3072, "digits_classifier": 1024}
"""Of the smallest budget."""
CONFIGURATIONS = {
    "digits": (
        "optimizer.lr=1.0e-3",
        "optimizer.lr=3.0e-3",
        "timesteps.name=wiener optimizer.lr=3.0e-3",
        "optimizer.decay=cosine optimizer.lr=4.0e-3",
        "optimizer.lr=3.0e-4",
        "optimizer.lr=8.0e-3",
        "loader.batch_size=32 optimizer.lr=1.0e-3",
        "loader.batch_size=128 optimizer.lr=3.0e-3",
        "timesteps.name=log_snr_laplace optimizer.lr=2.0e-3",
        "weighting.name=min_snr optimizer.lr=2.0e-3",
        "optimizer.decay=cosine timesteps.name=log_snr_laplace optimizer.lr=2.0e-3",
        "ema.half_life=0.2 optimizer.lr=2.0e-3",
        "model.channels=24 optimizer.lr=2.0e-3",
        "model.channels=8 optimizer.lr=4.0e-3",
        "optimizer.decay=linear timesteps.name=wiener loader.batch_size=32 optimizer.lr=2.0e-3",
    ),
    "cifar10": (
        "optimizer.lr=2.0e-3",
        "timesteps.name=log_snr_laplace optimizer.lr=2.0e-3",
        "optimizer.decay=cosine optimizer.lr=4.0e-3",
        "optimizer.lr=5.0e-4",
        "optimizer.lr=5.0e-3",
        "loader.batch_size=64 optimizer.lr=2.0e-3",
        "loader.batch_size=16 optimizer.lr=2.0e-3",
        "timesteps.name=wiener optimizer.lr=2.0e-3",
        "weighting.name=min_snr optimizer.lr=2.0e-3",
        "optimizer.decay=cosine timesteps.name=log_snr_laplace optimizer.lr=3.0e-3",
        "model.channels=8 optimizer.lr=4.0e-3",
        "ema.half_life=0.2 optimizer.lr=2.0e-3",
        "optimizer.decay=linear timesteps.name=wiener loader.batch_size=64 optimizer.lr=4.0e-3",
    ),
    "digits_classifier": (
        "optimizer.lr=0.05",
        "optimizer.lr=0.02",
        "optimizer.lr=0.005",
        "optimizer.lr=0.15",
        "loader.batch_size=32 optimizer.lr=0.02",
        "loader.batch_size=128 optimizer.lr=0.1",
        "optimizer.name=adamw optimizer.lr=0.003",
        "optimizer.name=adamw optimizer.lr=0.001",
        "optimizer.name=adamw optimizer.lr=0.01",
        "model.width=4 optimizer.lr=0.05",
        "model.width=32 optimizer.lr=0.02",
        "optimizer.decay=cosine optimizer.lr=0.1",
        "optimizer.decay=cosine optimizer.name=adamw optimizer.lr=0.005",
    ),
}
REPEATED = {"digits": 4, "cifar10": 2, "digits_classifier": 13}
"""The first of them also run with further seeds, at the two smaller budgets."""


def runs(workload: str) -> Iterator[tuple[str, int, int]]:
    """Configuration, seed and budget of every run, in order: what is cheap first."""
    configurations = CONFIGURATIONS[workload]
    yield from ((words, 0, budget) for words in configurations for budget in BUDGETS[:2])
    for words in configurations[: REPEATED[workload]]:
        yield from ((words, seed, budget) for seed in range(1, SEEDS) for budget in BUDGETS[:2])
    yield from ((words, 0, BUDGETS[2]) for words in configurations)


def measure(workload: str, table: Path, words: Sequence[str], some: slice) -> None:
    """Train what the table does not hold yet of `some` of the runs, and append their curves."""
    known: set[tuple[str, ...]] = set()
    if table.exists():
        with open(table, newline="") as file:
            known = {tuple(row[:4]) for row in csv.reader(file)}
    else:
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(",".join(COLUMNS) + "\n")
    for number, (configuration, seed, budget) in list(enumerate(runs(workload)))[some]:
        if (key := (workload, configuration, str(seed), str(budget))) in known:
            continue
        folder = table.parent / "runs" / f"{workload}-{number:03d}"
        arguments = [*FIXED[workload].split(), *configuration.split(), f"seed={seed}", *words]
        options = ["--config", workload, "--samples", str(budget * SAMPLES[workload]), "--out", str(folder)]
        if train.main([*options, *arguments]) != cli.OK:
            raise SystemExit(f"{' '.join(key)}: training failed")
        found, metric = record.read_trial(folder), cfg.of(cfg.baseline(workload)).objective.name
        assert found is not None
        with open(table, "a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                (*key, point.samples, f"{point.train_s:.3f}", f"{point[metric]:.5g}") for point in found.points
            )


# ----------------------------------------------------------------------------------------------------------- forecasts
Table = Mapping[str, Mapping[int, list[Curve]]]
"""Configuration, budget: the curves of its seeds, against samples."""


def read(paths: Sequence[Path]) -> dict[str, Table]:
    """The tables by workload."""
    found: dict[str, dict[str, dict[int, dict[str, list[tuple[float, float]]]]]] = {}
    for path in paths:
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                of = found.setdefault(row["workload"], {}).setdefault(row["configuration"], {})
                line = of.setdefault(int(row["budget"]), {}).setdefault(row["seed"], [])
                line.append((float(row["samples"]), float(row["value"])))
    return {
        workload: {name: {b: list(seeds.values()) for b, seeds in of.items()} for name, of in table.items()}
        for workload, table in found.items()
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration, forecast from one budget to another."""

    step: str
    """`1× → 4×`"""
    runs: Runs
    shared: Common
    end: float
    """Samples of the larger budget."""
    measured: list[float]

    def scaled(self, value: float) -> float:
        """As forecasts see it: the logarithm of a distance, or of an error."""
        return self.shared.scale.to(value)

    @property
    def so_far(self) -> float:
        """Mean of its values with the smaller budget, scaled."""
        return float(np.mean([self.scaled(curve[-1][1]) for curve in self.runs.curves]))

    @property
    def truth(self) -> float:
        """Mean of its values with the larger one, scaled."""
        return float(np.mean([self.scaled(value) for value in self.measured]))

    def told(self, spread: float = SPREAD) -> tuple[float, float]:
        """The forecast, scaled, and half of its interval."""
        found = trend(self.runs, self.shared, spread)
        assert found is not None
        return found.middle(self.end), found.half(self.end, len(self.measured))

    def holds(self, spread: float = SPREAD) -> bool:
        """Whether what was measured lies within the interval."""
        middle, half = self.told(spread)
        return abs(self.truth - middle) <= half


def cases(table: Table, start: int, end: int, points: int = 1, others: int | None = None) -> list[Case]:
    """All configurations that have both budgets: of each curve every so manieth of its `points`, its last among them;
    beside each one the next so many `others`, or all."""
    every = [curve for of in table.values() for curves in of.values() for curve in curves]
    falls = any(value > 1 for curve in every for _, value in curve)  # else they are accuracies
    scale = Scale.of(every, ratios=falls, falls=falls)
    begun = {
        name: Runs(tuple(curve[::-1][::points][::-1] for curve in of[start]), "optimizer.decay=" in name)
        for name, of in table.items()
        if start in of
    }
    found = []
    for place, (name, runs) in enumerate(begun.items()):
        around = [*begun.values()][place:] + [*begun.values()][:place]
        shared = common(around[: None if others is None else 1 + others], scale)
        assert shared is not None
        if end in table[name]:
            ends = table[name][end]
            found.append(Case(f"{start}× → {end}×", runs, shared, ends[0][-1][0], [curve[-1][1] for curve in ends]))
    return found


def fitted(found: Sequence[Case]) -> float:
    """The spread under which what was measured is likeliest: errors are normal with the variance of the interval."""

    def surprise(spread: float) -> float:
        total = 0.0
        for case in found:
            middle, half = case.told(spread)
            sd = half / stats.t.ppf(0.9, case.shared.freedom)
            total += math.log(sd) + 0.5 * ((case.truth - middle) / sd) ** 2
        return total

    return float(optimize.minimize_scalar(surprise, bounds=(0.01, 5.0), method="bounded").x)


def own_slope(case: Case) -> float:
    """With the slope of its own curves."""
    alone = common([case.runs], case.shared.scale)
    assert alone is not None
    return dataclasses.replace(case, shared=alone).told()[0]


def offset_power_law(case: Case) -> float:
    """a + b·t^−c by least squares of logarithms, with a, b, c ≥ 0, at the larger budget; the mean over the seeds."""
    ends = []
    for curve in case.runs.curves:
        t, z = (np.asarray(side) for side in zip(*((t, case.scaled(value)) for t, value in curve), strict=True))
        u, last = t / t[-1], math.exp(z[-1])

        def misses(p: np.ndarray, u: np.ndarray = u, z: np.ndarray = z) -> np.ndarray:
            return np.log(p[0] + p[1] * u ** -p[2]) - z

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start, bounds = [last / 2, last / 2, 0.5], (1e-12, [last, np.inf, 3])
            a, b, c = optimize.least_squares(misses, start, bounds=bounds).x
        ends.append(math.log(a + b * (case.end / t[-1]) ** -c))
    return float(np.mean(ends))


def error(found: Sequence[Case], of: Callable[[Case], float]) -> float:
    """Root mean square of forecast less measured, scaled."""
    return math.sqrt(np.mean([(of(case) - case.truth) ** 2 for case in found]))


def rank(found: Sequence[Case], of: Callable[[Case], float]) -> float:
    """Kendall's τ with what was measured."""
    return float(stats.kendalltau([of(case) for case in found], [case.truth for case in found]).statistic)


def inside(found: Sequence[Case], spread: float) -> str:
    """How many measured values lie within their intervals."""
    return f"{sum(case.holds(spread) for case in found)} of {len(found)}"


def order(found: Sequence[Case]) -> str:
    """Of all pairs whose order is not open at the larger budget: how many have kept it."""
    kept, told = 0, 0
    for one, other in itertools.combinations(found, 2):
        pair = [trend(case.runs, case.shared) for case in (one, other)]
        assert pair[0] is not None
        assert pair[1] is not None
        at = crossing(pair[0], pair[1])
        if at is None or at.open_s is None or at.open_s > max(one.end, other.end):
            told += 1
            kept += (one.so_far < other.so_far) == (one.truth < other.truth)
    return f"{kept} of {told}"


def report(tables: Mapping[str, Table]) -> str:
    """Both tables of results, in Markdown."""
    spreads = {name: fitted([*cases(table, 1, 4), *cases(table, 1, 16)]) for name, table in tables.items()}
    lines = [["curves", "budget", "inside", "with a spread fitted elsewhere", "half width", "error", "if unchanged",
              "own slope", "power law", "rank so far", "pairs in order"]]  # fmt: skip
    for name, table in tables.items():
        others = [*(spread for workload, spread in spreads.items() if workload != name), SPREAD]
        other = others[0]
        for what, found in (
            (name, cases(table, 1, 4)),
            (f"{name}, 4 points", cases(table, 1, 4, points=2)),
            (f"{name}, 4 configurations", cases(table, 1, 4, others=3)),
            *((name, cases(table, start, 16)) for start in (1, 4)),
        ):
            if len(found) < 3:
                continue
            ways = (lambda case: case.told()[0], lambda case: case.so_far, own_slope, offset_power_law)
            half = float(np.mean([case.told()[1] for case in found]))
            numbers = (half, *(error(found, way) for way in ways), rank(found, lambda case: case.so_far))
            lines.append([
                what, found[0].step, inside(found, SPREAD),
                inside(found, other), *(f"{value:.3f}" for value in numbers), order(found),
            ])  # fmt: skip
    said = ", ".join(f"{spread:.2f} on {name}" for name, spread in spreads.items())
    return f"{markdown_table(lines)}\n\nSpread, fitted: {said}; shipped: {SPREAD}.\n"


def main() -> int:
    """Compare, or measure; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="tables of curves; with --measure: knob=value")
    parser.add_argument("--measure", choices=tuple(CONFIGURATIONS), help="train instead, and append to --out")
    parser.add_argument(
        "--out", type=Path, help="table that is appended to, or folder that forecast.md is written into"
    )
    parser.add_argument("--runs", default=":", help="which of the runs, as a slice such as 0:26 (default: all)")
    args = parser.parse_args()
    if args.measure is None:
        text = report(read([Path(word) for word in args.words]))
        print(text, end="")
        if args.out is not None:
            (args.out / "forecast.md").write_text(text)
        return 0
    measure(
        args.measure,
        args.out or Path("ray_results/forecast/curves.csv"),
        args.words,
        slice(*(int(end) if end else None for end in args.runs.split(":"))),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
