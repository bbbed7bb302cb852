"""When is a search long enough? Rules that end it early, replayed: `python -m benchmarks.replay.enough TABLE_FOLDER …`.

At most 40 configurations of a table are drawn as a search draws them (TPE) and trained to their ends, and the best
by one run each is kept. Regret: how far the mean of what is kept is behind the table's best mean, in standard
deviations of one run. A rule looks from the tenth trial on. It is worth something if its regret is smaller than
that of a fixed number of trials, the same for all tables, which is as large as the rule's own number on average.

- patience: nothing was better for so many trials.
- records: the chance that any trial that is left beats the best by the noise of one run. The next one is the best
  with chance 1/(n+1); by how much, the distances among the best ten say (exponential).
- posterior: the same chance from a Gaussian process (scikit-learn, Matérn 5/2 with noise) over all points that are
  left.
- regret bound: Optuna's `RegretBoundEvaluator`, in standard deviations of one run (A. Makarova et al., AutoML
  2022).

Needs about five minutes on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.study import StudyDirection
from optuna.terminator import RegretBoundEvaluator
from optuna.trial import TrialState, create_trial
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from benchmarks.replay.strategies import Sampled, begin
from benchmarks.replay.table import Table, load, position
from tunediff import cli
from tunediff.core.refusals import allow
from tunediff.core.trial_record import End
from tunediff.tuning.sampling import default_sampler

MOST, FIRST, BEST = 40, 10, 10
Numbers = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Found:
    """What one search has found after every trial."""

    points: Numbers
    """[configurations of the table, features from 0 to 1]: those drawn come first, in their order."""
    losses: Numbers
    """Of the trials, in standard deviations of one run; infinite: it failed."""
    regret: Numbers
    """After every trial."""


def searched(table: Table, seed: int) -> Found:
    """Draw as a search does, one of the recorded runs of each configuration."""
    rng, left = random.Random(seed), list(range(1, len(table.configurations)))
    curves = [rng.choice(one.curves) for one in table.configurations]
    draws, order = Sampled(table, seed, default_sampler), [0]
    while True:
        trial = begin(table, len(order) - 1, order[-1])
        trial.points, trial.end = list(curves[order[-1]].points), End(curves[order[-1]].status)
        draws.report(trial)
        if len(order) == MOST:
            break
        order.append(draws.draw(left))
        left.remove(order[-1])
    metric, sd = table.space.metric, table.noise.sd
    ended = [curves[place] for place in order]
    losses = (
        np.array(
            [
                table.loss(one.points[-1][metric]) if one.status == "ok" else math.inf
                for one in ended
            ]
        )
        / sd
    )
    means = np.array([one.mean for one in table.configurations]) / sd
    kept = [order[int(losses[: n + 1].argmin())] for n in range(MOST)]
    features = np.array([_features(table, place) for place in [*order, *left]])
    return Found(features, losses, means[kept] - means.min())


def _features(table: Table, place: int) -> list[float]:
    knobs, values = table.configurations[place].knobs, list[float]()
    for dimension in table.space.dimensions:
        value = knobs.get(dimension.name)
        if dimension.choices is not None:
            values += [float(value == choice) for choice in dimension.choices]
        else:
            values.append(position(dimension, value) if value is not None else 0.5)
    return values


# --------------------------------------------------------------------------------------------------------------- rules
def patience(found: Found, n: int) -> float:
    """Minus the trials since the best one."""
    return float(found.losses[:n].argmin()) - (n - 1)


def records(found: Found, n: int) -> float:
    """The chance that one of the trials that are left is better by the noise of one run."""
    best = np.sort(found.losses[:n][np.isfinite(found.losses[:n])])[: BEST + 1]
    scale = max(float((best[-1] - best[:-1]).mean()), 1e-9)
    return float(1 - (1 - math.exp(-1 / scale) / (n + 1)) ** (MOST - n))


def posterior(found: Found, n: int) -> float:
    """The chance that any point that is left is better by the noise of one run."""
    y = found.losses[:n]
    y = np.minimum(
        y, np.quantile(y[np.isfinite(y)], 0.75)
    )  # how poor the poor ones are says nothing about the best
    scale = max(float(y.std()), 1e-9)
    kernel = ConstantKernel(1.0, (0.05, 20.0)) * Matern(1.0, (0.1, 10.0), nu=2.5) + WhiteKernel(
        0.3, (1e-4, 10.0)
    )
    process = GaussianProcessRegressor(kernel, random_state=0).fit(
        found.points[:n], (y - y.mean()) / scale
    )
    kept = found.points[int(y.argmin())]
    mean, covariance = process.predict(np.vstack([kept, found.points[n:]]), return_cov=True)
    normal = np.random.default_rng(0).multivariate_normal
    drawn = normal(mean, covariance + 1e-8 * np.eye(len(mean)), 256, method="eigh")
    return float((drawn[:, 1:].min(axis=1) < drawn[:, 0] - 1 / scale).mean())


def regret_bound(found: Found, n: int) -> float:
    """Optuna's bound of the regret."""
    worst = found.losses[:n][np.isfinite(found.losses[:n])].max()
    trials = []
    for number in range(n):
        params = {f"x{i}": float(value) for i, value in enumerate(found.points[number])}
        space = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in params}
        value = float(min(found.losses[number], worst))
        trials.append(
            create_trial(state=TrialState.COMPLETE, params=params, distributions=space, value=value)
        )
    return float(RegretBoundEvaluator(seed=0).evaluate(trials, StudyDirection.MINIMIZE))


RULES: dict[str, tuple[Callable[[Found, int], float], tuple[float, ...]]] = {
    "patience": (patience, (-8.0, -12.0, -16.0)),
    "records": (records, (0.4, 0.2, 0.05)),
    "posterior": (posterior, (0.2, 0.05, 0.02)),
    "regret bound": (regret_bound, (3.0, 2.0, 1.0)),
}
"""Each with the levels below which it ends a search."""


# ------------------------------------------------------------------------------------------------------------- results
def difference(
    found: Sequence[Sequence[Found]], ends: NDArray[np.int_]
) -> tuple[float, float, float]:
    """Regret of a rule less that of a fixed number of trials, and its 95 % interval by bootstrap over searches.

    `found`, `ends`: [tables][searches]; the number of trials after which the rule ends each.
    """
    regret = np.array([[one.regret for one in searches] for searches in found])
    own = np.take_along_axis(regret, ends[:, :, None] - 1, 2)[:, :, 0]

    def less(chosen: NDArray[np.int_]) -> float:
        rows = np.arange(len(found))[:, None]
        fixed = np.interp(
            ends[rows, chosen].mean(),
            np.arange(1, MOST + 1),
            regret[rows, chosen].mean(axis=(0, 1)),
        )
        return float(own[rows, chosen].mean() - fixed)

    rng, shape = np.random.default_rng(0), ends.shape
    drawn = [less(rng.integers(shape[1], size=shape)) for _ in range(2000)]
    return less(np.broadcast_to(np.arange(shape[1]), shape)), *np.quantile(drawn, [0.025, 0.975])


def table_of(found: Sequence[Sequence[Found]]) -> list[str]:
    """The results as lines of Markdown."""
    lines = [
        "| rule | level | trials | regret | less that of as many trials (95 %) |",
        "|---|---|---|---|---|",
    ]
    for name, (rule, levels) in RULES.items():
        step = 1 if rule in (patience, records) else 2
        values = [
            [[(n, rule(one, n)) for n in range(FIRST, MOST, step)] for one in searches]
            for searches in found
        ]
        for level in levels:
            ends = np.array(
                [[next((n for n, v in own if v <= level), MOST) for own in each] for each in values]
            )
            regret = np.mean([[one.regret[end - 1] for one, end in zip(*pair, strict=True)]
                              for pair in zip(found, ends, strict=True)])  # fmt: skip
            by, low, high = difference(found, ends)
            lines.append(
                f"| {name} | {level:g} | {ends.mean():.1f} | {regret:.2f} | {by:+.2f} ({low:+.2f} … {high:+.2f}) |"
            )
        print(name, file=sys.stderr, flush=True)
    return lines


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Replay; see `--help`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE_FOLDER")
    parser.add_argument(
        "--seeds", type=int, default=20, help="searches of each table (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    allow(args.seeds >= 2, "--seeds", args.seeds, "at least 2")
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = [
        [searched(table, seed) for seed in range(args.seeds)] for table in map(load, args.tables)
    ]
    print("\n".join(table_of(found)))
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
