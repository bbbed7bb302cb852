"""What may be believed of `tunediff.compare`: `python -m benchmarks.believe [--out DIR]`.

Differences of known size are planted and looked for, thousands of times, in noise that was measured: what the runs kept
in ray_results/reference differ by within a configuration, on the scale on which they are compared (logarithms of
distances, accuracies as they are), over the standard deviation of a single run.

Rules:

- A round draws a whole seed: a configuration's values come from runs that shared their seed, so what a seed does to all
  of them stays in. With three seeds of each configuration kept, which configurations stand in a round is drawn anew.
  `normal` and `heavy` (Student's t with 4 degrees of freedom) are drawn, without anything in common, for comparison.
- Gains are in standard deviations of a single run.
- Compare: every rule sees the same pairs.

Writes believe.csv. About a quarter of an hour on one core. Of configurations that are equal, in noise that differs, of
coarse metrics, and confirmed again: `python -m benchmarks.believe.equal`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special

from benchmarks.believe.noise import REFERENCE, Drawn, Measured, Numbers, sources
from tunediff import cli
from tunediff.analysis import statistics
from tunediff.analysis.sequential import Rules, analyse
from tunediff.core import text
from tunediff.core.options import allow, writing
from tunediff.core.outcomes import Verdict

MOST = 12
FIRST = 3
"""Pairs before a rule without one of its own first looks."""
SD = 0.1
"""Of the logarithm of a single run; t statistics do not depend on it."""
GAINS = (0.0, 0.5, 1.0, 2.0)
CONFIGURATIONS = 16


# -------------------------------------------------------------------------------------------------------------- compare
Decisions = tuple[NDArray[np.int_], NDArray[np.int_]]
"""Of every comparison: 1 better, −1 worse, 0 no significant difference; and the pairs it took."""


def looks(gains: Numbers) -> Decisions:
    """`tunediff.compare` on log gains of B [comparisons, pairs]."""
    verdicts, pairs = np.zeros(len(gains), int), np.zeros(len(gains), int)
    for row, gain in enumerate(gains):
        values = np.exp(np.stack([np.zeros(len(gain)), -gain]))
        for many in range(1, len(gain) + 1):
            test = analyse(values[:, :many], Rules(len(gain)))
            if test.ended:
                break
        verdicts[row] = {Verdict.BETTER: 1, Verdict.WORSE: -1}.get(test.differences[0].verdict, 0)
        pairs[row] = many
    return verdicts, pairs


def t_statistics(gains: Numbers) -> Numbers:
    """Of the paired t-test after every pair."""
    many = np.arange(1, gains.shape[1] + 1)
    means = gains.cumsum(axis=1) / many
    squares = np.maximum((gains**2).cumsum(axis=1) - many * means**2, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(
            np.clip(np.nan_to_num(means / np.sqrt(squares / (many - 1) / many)), -1e6, 1e6)
        )


def until(stops: NDArray[np.bool_], gains: Numbers, first: int) -> Decisions:
    """A rule that stops where `stops` first holds, from pair `first` on, else at the end."""
    stops = stops & (np.arange(1, gains.shape[1] + 1) >= first)
    pairs = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, gains.shape[1])
    ahead = np.sign(np.take_along_axis(gains.cumsum(axis=1), pairs[:, None] - 1, 1)[:, 0]).astype(
        int
    )
    return np.where(stops.any(axis=1), ahead, 0), pairs


def p_values(gains: Numbers) -> Numbers:
    """Two-sided, of the paired t-test after every pair; 1 after the first."""
    freedom = np.arange(gains.shape[1])
    values = 2 * special.stdtr(np.maximum(freedom, 1), -np.abs(t_statistics(gains)))
    return np.where(freedom > 0, values, 1.0)


def naive(gains: Numbers) -> Decisions:
    """Stops as soon as p is below 5 %."""
    return until(p_values(gains) < statistics.LEVEL, gains, FIRST)


def single(gains: Numbers) -> Decisions:
    """Keeps whichever was better in one run each."""
    return np.sign(gains[:, 0]).astype(int), np.ones(len(gains), int)


RULES: dict[str, Callable[[Numbers], Decisions]] = {
    "compare": looks,
    "p < 0.05 after every pair": naive,
    "one run each": single,
}


def compared(
    source: Measured | Drawn, comparisons: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """What every rule says of every gain."""
    rows = []
    for gain in GAINS:
        drawn = source.draw(rng, (comparisons, MOST), 2)
        gains = SD * (gain + drawn[..., 0] - drawn[..., 1])
        for rule, tell in RULES.items():
            verdicts, pairs = tell(gains)
            shares = {
                "better": (verdicts > 0).mean(),
                "worse": (verdicts < 0).mean(),
                "not": (verdicts == 0).mean(),
            }
            rows.append(
                {"part": "compare", "gain": gain, "rule": rule, "times": comparisons}
                | {name: float(share) for name, share in shares.items()}
                | {"rounds": float(pairs.mean()), "rounds_90": float(np.quantile(pairs, 0.9))}
            )
    return rows


# -------------------------------------------------------------------------------------------------------------- command
def percent(share: float) -> str:
    """`2.4`, of a hundred."""
    return "" if math.isnan(share) else f"{100 * share:.1f}"


def tables(frame: pd.DataFrame, noise_sources: dict[str, Measured | Drawn]) -> list[str]:
    """What is printed: the three measured sources together, then the drawn ones; the CSV has each alone."""
    lines: list[str] = []
    for name, source in noise_sources.items():
        if isinstance(source, Measured):
            noise_sds = ", ".join(
                f"{folder} {text.number(sd)}" for folder, sd in source.sds.items()
            )
            lines.append(f"noise {name}: {np.isfinite(source.blocks).sum()} runs; sd of one: {noise_sds}; "
                         f"in common on one seed {percent(source.common)} % of the variance")  # fmt: skip
    kind = frame["noise"].where(frame["noise"].isin(["normal", "heavy"]), "measured")
    for name, part in frame.groupby(kind, sort=False):
        columns = ["better", "worse", "not"]
        lines += ["", f"{name} noise; shares in %"]
        rows = [["gain", "rule", "times", *columns, "rounds", "90 %"]]
        for (gain, rule), one in part.groupby(["gain", "rule"], sort=False):
            means = one[[*columns, "rounds", "rounds_90"]].astype(float).mean()
            shares = [percent(means[column]) for column in columns]
            taken = [f"{means['rounds']:.1f}", f"{means['rounds_90']:.0f}"]
            rows.append([f"{gain:g}", str(rule), str(one["times"].sum()), *shares, *taken])
        lines += aligned(rows)
    return lines


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--comparisons", type=int, default=3000, help="per noise and gain (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=REFERENCE / "believe", help="where believe.csv goes"
    )
    return parser.parse_args(argv)


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Simulate; see `--help`."""
    args = arguments(argv)
    allow(args.comparisons > 0, "--comparisons", args.comparisons, "a whole number above 0")
    rng, noise_sources, begun, rows = (
        np.random.default_rng(args.seed),
        sources(),
        time.monotonic(),
        [],
    )
    for name, source in noise_sources.items():
        rows += [{"noise": name, **row} for row in compared(source, args.comparisons, rng)]
        print(f"{name}: {text.seconds(time.monotonic() - begun)}", file=sys.stderr, flush=True)
    frame = pd.DataFrame(rows)
    with writing("--out", args.out):
        args.out.mkdir(parents=True, exist_ok=True)
        frame.to_csv(args.out / "believe.csv", index=False, float_format="%.4g")
    print(f"seed {args.seed}; numpy {np.__version__}; at most {MOST} rounds")
    print("\n".join(tables(frame, noise_sources)))
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
