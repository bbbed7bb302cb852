"""What the searches found, as a table of words and a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.strategies import STRATEGIES, Run
from benchmarks.replay.table import Table
from tunediff.core import colors, environment

TARGET = 0.02
"""Regret at which a search is done."""
SHARES = (0.25, 0.5, 1.0)
"""Shares of the table's seconds after which regret is told."""
RESAMPLED = 2000
"""Bootstrap samples of a ratio."""
Numbers = NDArray[np.float64]


def quantile(values: Numbers, q: float) -> float:
    """A quantile that is one of the values: some are infinite."""
    return float(np.quantile(values, q, method="inverted_cdf"))


def ratio(ours: Numbers, theirs: Numbers) -> tuple[float, float, float]:
    """Ratio of the medians and its 95 % interval, by a bootstrap over the seeds of both."""
    draw = np.random.default_rng(0)

    def medians(values: Numbers) -> Numbers:
        drawn = draw.choice(values, (RESAMPLED, len(values)))
        return np.asarray(np.quantile(drawn, 0.5, axis=1, method="inverted_cdf"), np.float64)

    with np.errstate(invalid="ignore"):
        resampled = np.nan_to_num(medians(ours) / medians(theirs), nan=1.0, posinf=math.inf)
        middle = quantile(ours, 0.5) / quantile(theirs, 0.5)
    return middle, quantile(resampled, 0.025), quantile(resampled, 0.975)


def regret(table: Table, runs: Sequence[Run], seconds: float) -> Numbers:
    """Regret of each run after that many training seconds."""
    return np.array([table.regret(min(run.best_after(seconds), table.worst)) for run in runs])


def regret_in_words(table: Table, which: str) -> str:
    """What regret is, in words."""
    label = table.space.label
    if table.ratios:
        return f"{label} of the best {which} over that of the table's best, minus 1"
    return f"how far {label} of the best {which} is from the table's best, as a share of how far the worst is"


def summary(table: Table, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per strategy, in their order."""
    grouped = _grouped(runs)
    # The way back from regret to a loss.
    target = table.best + TARGET * (table.best if table.ratios else table.worst - table.best)
    seconds = {name: np.array([run.seconds_to(target) for run in mine]) for name, mine in grouped.items()}
    rows = []
    for name, mine in grouped.items():
        needed = seconds[name]
        rows.append(
            {
                "strategy": name,
                "median_s": quantile(needed, 0.5),
                "quartiles_s": (quantile(needed, 0.25), quantile(needed, 0.75)),
                "ratio": ratio(needed, seconds["random"]) if "random" in seconds and name != "random" else None,
                "regret": [float(np.median(regret(table, mine, share * table.total_s))) for share in SHARES],
                "reached": int(np.isfinite(needed).sum()),
                "stopped": sum(run.stopped for run in mine) / sum(len(run.best) for run in mine),
            }
        )
    return rows


def _grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.strategy, []).append(run)
    return grouped


def markdown(table: Table, rows: Sequence[dict[str, Any]], name: str, seeds: int) -> str:
    """What replay.md holds."""

    def of(seconds: float) -> str:
        return f"{seconds:.0f}" if math.isfinite(seconds) else "never"

    done = [table.loss(curve.value) for curve in table.curves if curve.value is not None]
    close, sign = sum(table.regret(loss) <= TARGET for loss in done), table.loss(1.0)
    within = f"{TARGET:.0%} of the best" if table.ratios else f"{TARGET:.0%} of the table's range from the best"
    failed = sum(curve.value is None for curve in table.curves)
    versions = environment.describe()["versions"]
    lines = [
        f"# {name}: search strategies replayed",
        "",
        f"{len(table.curves)} points of up to {table.budget_s:.1f} training seconds, {table.total_s:.0f} s in all; "
        f"{table.space.label} {sign * table.best:.3g} to {sign * table.worst:.3g}, {close} within {within}, "
        f"{failed} failed. {seeds} seeds; Optuna {versions['optuna']}, Ray {versions['ray']}.",
        "",
        f"| strategy | seconds to within {within}: median (quartiles) | ratio to random (95 % interval)"
        + "".join(f" | regret after {share:.0%}" for share in SHARES)
        + " | seeds that reached it | trials stopped |",
        "|---|---|---|" + "---|" * len(SHARES) + "---|---|",
    ]
    for row in rows:
        low, high = row["quartiles_s"]
        words = [row["strategy"], f"{of(row['median_s'])} ({of(low)} … {of(high)})"]
        words.append("" if row["ratio"] is None else "{:.2f} ({:.2f} … {:.2f})".format(*row["ratio"]))
        words += [f"{value:.1%}" for value in row["regret"]]
        words += [f"{row['reached']} of {seeds}", f"{row['stopped']:.0%}"]
        lines.append("| " + " | ".join(words) + " |")
    shares = ", ".join(f"{share:.0%}" for share in SHARES)
    lines += [
        "",
        f"Seconds are training seconds. Regret: {regret_in_words(table, 'finished trial')}; "
        f"medians after {shares} of the table's seconds. Ratio: of the medians; interval by a bootstrap over seeds.",
    ]
    return "\n".join(lines) + "\n"


def figure(table: Table, runs: Sequence[Run], path: Path) -> None:
    """Regret against training seconds: median over the seeds, and the quartiles as a band. Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no window, also where there is a screen
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    image, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    seconds = np.linspace(0.0, table.total_s, 400)
    grouped = _grouped(runs)
    main = {name: mine for name, mine in grouped.items() if name in STRATEGIES}  # more would hide each other
    for i, (name, mine) in enumerate((main or grouped).items()):
        curves = 100 * np.array([regret(table, mine, s) for s in seconds])
        style: dict[str, Any] = {"color": colors.OTHER if name == "random" else colors.SERIES[i % len(colors.SERIES)]}
        low, middle, high = np.quantile(curves, (0.25, 0.5, 0.75), axis=1)
        axes.fill_between(seconds, low, high, step="post", alpha=0.12, linewidth=0, **style)
        axes.step(
            seconds,
            middle,
            where="post",
            label=name,
            linewidth=1.8,
            linestyle=("-", "--")[i // len(colors.SERIES) % 2],
            **style,
        )
    axes.axhline(100 * TARGET, color="0.5", linestyle=":", linewidth=1.0)
    axes.set_yscale("symlog", linthresh=1.0)  # the end of a search is 0
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g %%"))
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("training seconds spent")
    axes.set_ylabel(f"regret: {regret_in_words(table, 'so far')}")
    axes.set_title(f"{len(table.curves)} recorded points; median and quartiles of the seeds", fontsize=10)
    axes.legend(fontsize=9)
    image.savefig(path, dpi=120)
    plt.close(image)
