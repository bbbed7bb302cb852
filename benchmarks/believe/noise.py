"""The noise of a simulation: that of the runs kept in ray_results/reference, or drawn from a distribution."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
REFERENCE = Path(__file__).parents[2] / "ray_results" / "reference"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What single runs differ by from the mean of their configuration, in standard deviations: [seeds, configurations].

    NaN: the search of that seed had no more configurations.
    """

    blocks: Numbers
    sds: dict[str, float]
    """Standard deviation of a single run, by folder."""

    def draw(self, rng: np.random.Generator, size: tuple[int, ...], configurations: int) -> Numbers:
        """[*size, configurations]: each of `size` is a seed that was run, and configurations that were run with it.

        Of more configurations than were run, each is any of those that were.
        """
        blocks = self.blocks[rng.integers(len(self.blocks), size=math.prod(size))]
        if configurations > blocks.shape[1]:
            order = rng.integers(blocks.shape[1], size=(len(blocks), configurations))
            return np.take_along_axis(blocks, order, 1).reshape(*size, configurations)
        order = np.argsort(np.where(np.isnan(blocks), np.inf, rng.random(blocks.shape)), axis=1)[
            :, :configurations
        ]
        return np.take_along_axis(blocks, order, 1).reshape(*size, configurations)

    @property
    def common(self) -> float:
        """Share of the variance that configurations on one seed have in common: the mean product of two of them."""
        many = np.isfinite(self.blocks).sum(axis=1)
        sums, squares = np.nansum(self.blocks, axis=1), np.nansum(self.blocks**2, axis=1)
        return float((sums**2 - squares).sum() / (many * (many - 1)).sum())


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Independent noise of standard deviation 1."""

    freedom: float = math.inf

    def draw(self, rng: np.random.Generator, size: tuple[int, ...], configurations: int) -> Numbers:
        """[*size, configurations]."""
        shape = (*size, configurations)
        if math.isinf(self.freedom):
            return rng.standard_normal(shape)
        return np.asarray(
            rng.standard_t(self.freedom, shape) / math.sqrt(self.freedom / (self.freedom - 2))
        )


def measured(files: Sequence[Path]) -> Measured:
    """The noise in tables of runs: each has the metric before `versus_baseline` and the knobs behind `reason`."""
    blocks: list[Numbers] = []
    sds = {}
    for file in files:
        frame = pd.read_csv(file)
        names = list(frame.columns)
        metric = names[names.index("versus_baseline") - 1]
        knobs = [name for name in names[names.index("reason") + 1 :] if name != "seed"]
        alike = frame.groupby(knobs, dropna=False, sort=False).ngroup()
        values = (
            frame.assign(alike=alike)
            .pivot(index="alike", columns="seed", values=metric)
            .to_numpy(float)
        )
        y = np.log(values) if metric == "frechet" else values
        seeds = y.shape[1]
        off = (y - y.mean(axis=1, keepdims=True)) * math.sqrt(seeds / (seeds - 1))
        sds[file.parent.name] = math.sqrt(float((off**2).mean()))
        blocks += [*(off / sds[file.parent.name]).T]
    widest = max(map(len, blocks))
    padded = [np.pad(block, (0, widest - len(block)), constant_values=np.nan) for block in blocks]
    return Measured(np.array(padded), sds)


def sources() -> dict[str, Measured | Drawn]:
    """All noise that is drawn from, by name."""
    return {
        "digits": measured([REFERENCE / "digits-methods" / "trials.csv"]),
        "cifar10": measured([REFERENCE / "cifar10-methods" / "trials.csv"]),
        "confirmed": measured(sorted(REFERENCE.glob("*/confirm-trials.csv"))),
        "normal": Drawn(),
        "heavy": Drawn(4.0),
    }
