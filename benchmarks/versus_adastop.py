"""Our sequential test beside AdaStop, on the same runs: `uv run --with adastop python benchmarks/versus_adastop.py`.

AdaStop (Mathieu et al. 2023, arXiv 2306.10882; package `adastop`) is the sequential test of reinforcement learning:
after every group of seeds a permutation test of all runs of A against all of B. It takes two groups of runs that share
nothing; ours takes pairs of runs that share a seed. Both may use twelve runs of each side and err in 5 % of equal
pairs, both sides together. Noise and gains are those of `benchmarks/believe.py`. Prints a table and writes adastop.csv.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from adastop import MultipleAgentsComparator

sys.path.insert(0, str(Path(__file__).parent))
import believe

GROUP = 4
"""Seeds of each side between two looks of AdaStop; three looks."""
PERMUTATIONS = 10_000


def adastop(values: believe.Numbers) -> believe.Decisions:
    """Decide as AdaStop does on values [comparisons, runs, 2] of A and B; smaller is better."""
    verdicts, rounds = np.zeros(len(values), int), np.zeros(len(values), int)
    for row, runs in enumerate(values):
        looks = len(runs) // GROUP
        test = MultipleAgentsComparator(n=GROUP, K=looks, B=PERMUTATIONS, alpha=0.05, seed=row)
        for count in range(GROUP, len(runs) + 1, GROUP):
            test.partial_compare({"A": runs[:count, 0], "B": runs[:count, 1]}, verbose=False)
            (decision,) = test.decisions.values()
            if decision != "continue":
                break
        rounds[row] = count
        verdicts[row] = {"larger": 1, "smaller": -1}.get(str(decision), 0)
    return verdicts, rounds


def rows(
    name: str, source: believe.Measured | believe.Drawn, times: int, rng: np.random.Generator
) -> pd.DataFrame:
    """Return how often each test calls B better or worse, and after how many runs of each side, per gain."""
    table = []
    for gain in believe.GAINS:
        drawn = source.draw(rng, (times, believe.MOST), 2)
        values = np.stack([drawn[..., 0], drawn[..., 1] - gain], axis=-1)
        for rule, (verdicts, rounds) in (
            ("tunediff compare", believe.looks(believe.SD * (values[..., 0] - values[..., 1]))),
            ("AdaStop", adastop(values)),
        ):
            shares = {"better": float((verdicts > 0).mean()), "worse": float((verdicts < 0).mean())}
            table.append(
                {
                    "noise": name,
                    "gain": gain,
                    "rule": rule,
                    "times": times,
                    **shares,
                    "runs": rounds.mean(),
                }
            )
    return pd.DataFrame(table)


def main() -> None:
    """Run; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--times", type=int, default=200, help="comparisons per gain (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("adastop.csv"))
    args = parser.parse_args()
    sources, rng = believe.sources(), np.random.default_rng(0)
    table = pd.concat(
        [rows(name, sources[name], args.times, rng) for name in ("digits", "cifar10", "normal")]
    )
    table.to_csv(args.out, index=False, float_format="%.4g")
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
