"""What training on each noise level is worth: `python benchmarks/map.py --measure digits --out MAP.csv`, then
`python benchmarks/map.py MAP.csv … [--out FOLDER]`.

At several moments of an ordinary training (uniform t) its averaged weights go on nine times, with a fresh optimizer and
for half as many images as it has seen: with uniform t, and with half of the draws within one of eight bands of log-SNR,
the other half uniform in t. Everything else is the same, seed and order of the images too. (From one moment to the next
the training itself goes on in this way.) A band is worth what its training has gained on the one with uniform t: in the
Fréchet distance, and in the validation error of each noise level, as parts of them. A draw costs the same in all of
them: equal images are equal seconds, on whatever machine.

Where the samplers draw is measured at the same moments: each goes on from the same weights and learns for an eighth of
the images. The oracle draws in proportion to what a band is worth, where that is above 0; a sampler is as far from it
as the share of its draws that would have to move to another band.

    OMP_NUM_THREADS=1 python benchmarks/map.py --measure digits --out digits.csv
    OMP_NUM_THREADS=1 python benchmarks/map.py --measure cifar10-16 --out cifar10-16.csv data.path=cifar10-images.zip
    OMP_NUM_THREADS=1 python benchmarks/map.py --measure cifar10-32 --out cifar10-32.csv data.path=cifar10-images.zip

The same command again goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch import Tensor

from tunediff import cli
from tunediff import config as cfg
from tunediff.core.clock import Budget
from tunediff.core.colors import BASELINE, PLAIN, SERIES, WINNER
from tunediff.core.files import write_text
from tunediff.core.point import Point
from tunediff.distributed import World, alone
from tunediff.report.words import markdown_table
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import run
from tunediff.workloads.diffusion import timesteps
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.base import TableSampler, mixed

EDGES = (-7.0, -4.0, -2.5, -1.0, 0.0, 1.0, 2.5, 4.0, 7.0)
"""Of the eight bands, in log-SNR."""
REST = 0.5
"""Of the draws that stays uniform."""
SMALL = (
    "model.multipliers=[1,2,2] model.blocks=1 model.attention=[8] model.norm_groups=8 model.dropout=0.0 "
    "evaluation.extractor=cifar10-resnet evaluation.images=600 evaluation.batch_size=200"
)
SETS = {
    "digits": ("digits", "loader.batch_size=64 evaluation.images=1000", (8192, 32768, 131072)),
    "cifar10-16": (
        "cifar10",
        f"{SMALL} data.image_size=16 model.channels=16 loader.batch_size=64",
        (16384, 65536),
    ),
    "cifar10-32": ("cifar10", f"{SMALL} model.channels=16 loader.batch_size=64", (8192, 16384)),
}
"""Workload, knobs, and the moments: images that an ordinary training has seen."""
ALL = (
    "timesteps.name=uniform loader.workers=0 loader.resident=true optimizer.lr=2.0e-3 evaluation.sampler=ddim "
    "evaluation.steps=25 evaluation.eta=1.0 evaluation.points=1 evaluation.validation_images=128"
)
COLUMNS = (
    "set",
    "moment",
    "seed",
    "draws",
    "frechet",
    "validation_mse",
    "validation_log_snr",
    "share",
)
SAMPLERS = (
    "uniform",
    "log_snr_laplace",
    "loss_second_moment",
    "info_noise",
    "beta_policy",
    "wiener",
)
"""Whose draws are compared with the map."""


SHADES = {"cmap": "PuOr", "vmin": -20.0, "vmax": 20.0}


class Band(TableSampler):
    """`REST` of the draws uniform in t, the others spread evenly over the log-SNRs from low to high."""

    def __init__(
        self, low: float, high: float, diffusion: Diffusion, channels: int, world: World
    ) -> None:
        self._range = low, high
        super().__init__(
            SimpleNamespace(importance_correction=0.0, stratified=True), diffusion, channels, world
        )

    def _initial(self, diffusion: Diffusion) -> Tensor:
        log_snr, (low, high) = diffusion.snr_table.log(), self._range
        within = (log_snr >= low) & (log_snr < high)
        return mixed(within * torch.gradient(log_snr)[0].abs(), REST)


class Trained(NamedTuple):
    """One training that ended."""

    weights: Mapping[str, Tensor]
    """The averaged ones."""
    point: Point
    share: list[float]
    """Of the draws in each band, at the end; the rest lies beyond them."""


def train(
    config: Any,
    samples: int,
    initial: Mapping[str, Tensor] | None,
    band: int | None = None,
    judged: bool = True,
) -> Trained:
    """Train on so many images, with the configuration's own sampler or in one band."""
    built: list[timesteps.TimestepSampler] = []
    log_snr = Diffusion(config.process).snr_table.log()

    def build(
        member: Any, diffusion: Diffusion, channels: int, world: World
    ) -> timesteps.TimestepSampler:
        built.append(
            plain(member, diffusion, channels, world) if band is None
            else Band(EDGES[band], EDGES[band + 1], diffusion, channels, world)
        )  # fmt: skip
        return built[-1]

    plain, timesteps.build = timesteps.build, build
    try:
        engine = Engine(
            config,
            Budget(samples=samples),
            alone("cpu"),
            Observer(),
            initial=initial,
            evaluates=judged,
        )
        outcome = run(engine)
    finally:
        timesteps.build = plain
    p = built[0].probabilities()
    share = [
        float(p[(log_snr >= low) & (log_snr < high)].sum())
        for low, high in itertools.pairwise(EDGES)
    ]
    return Trained(outcome.model.state_dict(), outcome.points[-1], share)


def measure(name: str, table: Path, words: Sequence[str], seeds: int) -> None:
    """Train what the table does not hold yet."""
    workload, own, moments = SETS[name]
    written: set[tuple[str, ...]] = set()
    if table.exists():
        with open(table, newline="") as file:
            written = {tuple(row[:4]) for row in csv.reader(file)}
    else:
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(",".join(COLUMNS) + "\n")

    def write(key: Sequence[str], trained: Trained, judged: bool) -> None:
        values: list[str] = ["", "", ""]
        if judged:
            values = [f"{trained.point['frechet']:.6g}"] + [
                ";".join("" if value is None else f"{value:.5g}" for value in trained.point[column])
                for column in COLUMNS[5:7]
            ]
        with open(table, "a", newline="") as file:
            row = [*key, *values, ";".join(f"{share:.4f}" for share in trained.share)]
            csv.writer(file, lineterminator="\n").writerow(row)
        print(*key, *values[:1], flush=True)

    for seed in range(seeds):
        config = cfg.named(Path(workload), [*ALL.split(), *own.split(), f"seed={seed}", *words])
        weights, before = None, 0
        for moment in moments:
            weights, before = train(config, moment - before, weights, judged=False).weights, moment
            for band in (None, *range(len(EDGES) - 1)):
                key = (
                    name,
                    str(moment),
                    str(seed),
                    "uniform" if band is None else f"{EDGES[band]:g} … {EDGES[band + 1]:g}",
                )
                if key not in written:
                    write(key, train(config, moment // 2, weights, band), True)
            for sampler in SAMPLERS if seed == 0 else ():
                key = (name, str(moment), str(seed), sampler)
                if key not in written and sampler != "uniform":
                    drawn = cfg.override(config, {"timesteps.name": sampler})
                    write(key, train(drawn, moment // 8, weights, judged=False), False)


# --------------------------------------------------------------------------------------------------------- what is seen
def worth(rows: pd.DataFrame) -> pd.DataFrame:
    """gain: the part of uniform's distance that a band's training is below it, mean and range over seeds; oracle: its
    share of the draws in proportion to that."""
    scored = rows.dropna(subset="frechet").pivot(index="draws", columns="seed", values="frechet")
    gains = 1 - scored.div(scored.loc["uniform"])
    frame = pd.DataFrame(
        {"gain": gains.mean(axis=1), "low": gains.min(axis=1), "high": gains.max(axis=1)}
    )
    frame = frame.loc[[draws for draws in rows["draws"].unique() if "…" in draws]]
    positive = frame["gain"].clip(lower=0)
    return frame.assign(oracle=positive / positive.sum())


def gains_by_level(rows: pd.DataFrame) -> tuple[list[float], list[list[float]]]:
    """11 edges in log-SNR, and for each band the part of uniform's validation error between them that its training's is
    below it, mean over seeds; NaN where there is no timestep."""
    scored = rows.dropna(subset="frechet")

    def numbers(column: str) -> pd.DataFrame:
        parts = scored[column].str.split(";", expand=True).replace("", None).astype(float)
        return parts.set_index([scored["draws"], scored["seed"]])

    errors = numbers("validation_mse")
    below = [
        1 - errors.loc[draws] / errors.loc["uniform"]
        for draws in rows["draws"].unique()
        if "…" in draws
    ]
    return numbers("validation_log_snr").iloc[0].tolist(), [one.mean().tolist() for one in below]


def distances(rows: pd.DataFrame, oracle: Sequence[float]) -> dict[str, float]:
    """Share of each sampler's draws that lies in another band, or beyond them all, than the oracle's."""
    shares = {}
    for name in SAMPLERS:
        share = [float(part) for part in rows[rows["draws"] == name]["share"].iloc[0].split(";")]
        shares[name] = sum(max(0.0, best - mine) for best, mine in zip(oracle, share, strict=True))
    return shares


def show(tables: Sequence[Path], folder: Path) -> None:
    """`map.md` and `map.png`."""
    rows = pd.concat([pd.read_csv(table) for table in tables])
    cells = [
        (name, moment, part) for (name, moment), part in rows.groupby(["set", "moment"], sort=False)
    ]
    bands = [f"{low:g} … {high:g}" for low, high in itertools.pairwise(EDGES)]
    gains = [["log-SNR", *(f"{name}, {moment:,}" for name, moment, _ in cells)]]
    worths = [worth(part) for _, _, part in cells]
    gains += [
        [band, *(f"{100 * each.loc[band, 'gain']:+.0f} %" for each in worths)] for band in bands
    ]
    away = [
        distances(part, list(each["oracle"]))
        for (_, _, part), each in zip(cells, worths, strict=True)
    ]
    far = [["sampler", *gains[0][1:]]] + [
        [f"`{name}`", *(f"{each[name]:.2f}" for each in away)] for name in SAMPLERS
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "map.md", f"{markdown_table(gains)}\n\n{markdown_table(far)}\n")
    figure, axes = plt.subplots(
        3,
        len(cells),
        figsize=(3.2 * len(cells), 7.5),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    left, widths = EDGES[:-1], [high - low for low, high in itertools.pairwise(EDGES)]
    for (name, moment, part), each, (above, middle, below) in zip(
        cells, worths, axes.T, strict=True
    ):
        errors = abs(each[["low", "high"]].sub(each["gain"], axis=0).T.to_numpy()) * 100
        above.bar(
            left,
            100 * each["gain"],
            widths,
            align="edge",
            yerr=errors,
            color=BASELINE,
            ecolor=PLAIN,
            edgecolor="white",
        )
        above.axhline(0, color=PLAIN, linewidth=0.8)
        above.set_title(f"{name}, after {moment:,} images")
        levels, changed = gains_by_level(part)
        shades = middle.pcolormesh(
            levels, EDGES, [[100 * gain for gain in row] for row in changed], **SHADES
        )
        middle.set_xlim(-10, 10)
        for number, sampler in enumerate(SAMPLERS):
            share = [
                float(value) for value in part[part["draws"] == sampler]["share"].iloc[0].split(";")
            ]
            below.stairs(
                [value / width for value, width in zip(share, widths, strict=True)],
                EDGES,
                label=sampler,
                color=SERIES[number],
            )
        below.stairs(
            each["oracle"] / widths,
            EDGES,
            label="oracle",
            color=WINNER,
            linewidth=2,
            linestyle="--",
        )
        below.set_xlabel("log-SNR")
    axes[0, 0].set_ylabel("Fréchet distance below\nuniform's, %")
    axes[1, 0].set_ylabel("log-SNR that was\ntrained on more")
    figure.colorbar(shades, ax=axes[1, -1], label="ε-error below\nuniform's, %", extend="both")
    axes[2, 0].set_ylabel("share of the draws per\nunit of log-SNR")
    figure.legend(*axes[2, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(folder / "map.png", dpi=120)
    print((folder / "map.md").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MAP.csv | knob=value",
        help="what was measured; with --measure knobs",
    )
    parser.add_argument("--measure", choices=SETS)
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each band (default: 2)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE | FOLDER")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.out, args.words, args.seeds)
    else:
        show([Path(word) for word in args.words], args.out)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
