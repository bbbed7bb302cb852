"""How well a budget is kept: seconds trained over seconds given, and where the points of the curve lie.

`python benchmarks/budget.py [--seconds 10] [--runs 20] [--only NAME …]` trains each of the trainings below for so many
seconds and prints a markdown table: medians over the runs, and the worst run. `late` is how far the worst point lies
behind its fraction of the budget; in units of the slowest step of its run, more than 1 means that a step was begun
after the time for the point had come.

- `loader, 0 workers`, `loader, 2 workers`: bound by its loader, 30 ms an item in batches of 8, a tiny network;
- `slows down`: a step takes ten times as long from the middle of the budget on;
- `slow first epoch`: items take 30 ms when they are first asked for, and nothing afterwards;
- `digits`: the shipped workload, without evaluations.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tunediff import config as cfg
from tunediff.config import workload
from tunediff.core.clock import Budget, Clock
from tunediff.core.point import Point
from tunediff.distributed import alone
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import Trial, run

BATCH, POINTS, JUDGED_S = 8, 4, 0.2


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Of nothing."""


class Items(Dataset[Tensor]):
    """64 rows, each of which takes `seconds` to load; `cached`: the first time only."""

    def __init__(self, seconds: float, cached: bool = False) -> None:
        self._seconds, self._cached, self._loaded = seconds, cached, set[int]()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        if index not in self._loaded:
            time.sleep(self._seconds)
        if self._cached:
            self._loaded.add(index)
        return torch.full((4,), float(index))


def nothing(progress: float) -> float:
    """A step that is as fast as it can be."""
    return 0.0


def slows_down(progress: float) -> float:
    """5 ms a step, then 50."""
    return 0.005 if progress < 0.5 else 0.05


@dataclasses.dataclass(frozen=True)
class WorkerGroupSpec:
    """What a training is slowed down by."""

    data: Callable[[], Any]
    """Makes its data set anew for each run."""
    workers: int = 0
    """Loader processes."""
    step_s: Callable[[float], float] = nothing


TRAININGS = {
    "loader, 0 workers": WorkerGroupSpec(lambda: Items(0.03)),
    "loader, 2 workers": WorkerGroupSpec(lambda: Items(0.03), workers=2),
    "slows down": WorkerGroupSpec(lambda: torch.zeros(64, 4), step_s=slows_down),
    "slow first epoch": WorkerGroupSpec(lambda: Items(0.03, cached=True)),
    "digits": None,
}
NOW: list[str] = []
"""The name of the training that runs."""


def train(trial: Trial) -> None:
    """The training that `NOW` names; its evaluations only last `JUDGED_S`."""
    kind = TRAININGS[NOW[0]]
    assert kind is not None
    net = trial.prepare(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(judge)
    for x in trial.batches(kind.data()):
        time.sleep(kind.step_s(trial.progress))
        trial.step(net(x).mean(), optimizer)


def judge() -> dict[str, float]:
    """An evaluation that finds nothing."""
    time.sleep(JUDGED_S)
    return {"loss_of_nothing": 0.0}


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training made of its budget."""

    points: Sequence[Point]
    seconds: float
    """Of the budget."""
    slowest_s: float
    """The slowest step."""

    @property
    def ratio(self) -> float:
        """Seconds trained over seconds given."""
        return self.points[-1].train_s / self.seconds

    @property
    def late_s(self) -> float:
        """How many seconds the worst point lies behind its fraction of the budget."""
        return max(point.train_s - point.fraction * self.seconds for point in self.points)


class Steps(Observer):
    """Measures the slowest step, its wait for data included."""

    def __init__(self) -> None:
        super().__init__()
        self.slowest_s, self._since, self._part = 0.0, 0.0, ""

    def after_step(self) -> None:
        now = time.monotonic()
        self.slowest_s, self._since = max(self.slowest_s, now - self._since), now

    def part(self, name: str) -> None:
        """Hear which part of the clock begins: the first step of a segment begins where the training goes on."""
        if name == "train" and self._part not in ("train", "data_wait"):
            self._since = time.monotonic()
        self._part = name


def configuration(name: str) -> cfg.Systems:
    """Return the configuration of a training, which becomes that of the workload `budget`."""
    if (kind := TRAININGS[name]) is None:
        return cfg.baseline("digits")
    module: Any = types.ModuleType("budget")
    module.Knobs, module.OBJECTIVE, module.train = (
        Knobs,
        cfg.Metric("loss_of_nothing", "min"),
        train,
    )
    sys.modules["budget.knobs"] = sys.modules["budget.train"] = module
    workload.SHIPPED["budget"] = "budget"
    NOW[:] = [name]
    values = {
        "loader.batch_size": BATCH, "loader.workers": kind.workers, "evaluation.points": POINTS,
        "memory.keep_freed": False,
    }  # fmt: skip
    return cfg.override(workload.find("budget").schema.default(), values)


def measured(name: str, seconds: float) -> Run:
    """Train for so many seconds, and return what was measured."""
    steps, budget, config = Steps(), Budget(seconds), configuration(name)
    clock = Clock(budget, on_part=steps.part)
    engine = Engine(config, budget, alone("cpu"), steps, evaluates=name != "digits", clock=clock)
    points = run(engine).points
    return Run(points, seconds, steps.slowest_s)


def row(name: str, runs: Sequence[Run]) -> str:
    """Return the line of a training in the table."""
    ratios, late = [one.ratio for one in runs], [one.late_s for one in runs]
    places = zip(
        *([point.train_s / one.seconds for point in one.points] for one in runs), strict=True
    )
    cells = [
        name, str(len(runs)), f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}",
        " ".join(f"{statistics.median(place):.3f}" for place in places),
        f"{1e3 * max(late):.0f}", f"{1e3 * max(one.slowest_s for one in runs):.0f}",
        f"{max(one.late_s / one.slowest_s for one in runs):.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(seconds: float, count: int, names: Sequence[str]) -> Iterator[str]:
    """Train `count` times each and yield the lines of the table as they become known."""
    heads = [
        "training",
        "runs",
        "trained/given",
        "worst",
        "points at",
        "late, ms",
        "slowest step, ms",
        "late/step",
    ]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for name in names:
        yield row(name, [measured(name, seconds) for _ in range(count)])


def main() -> int:
    """See the module's description."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="budget of each run")
    parser.add_argument("--runs", type=int, default=20, help="of each training")
    parser.add_argument(
        "--only", nargs="+", choices=TRAININGS, default=list(TRAININGS), metavar="NAME"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for line in table(options.seconds, options.runs, options.only):
        print(line, flush=True)
    print(f"\n{options.seconds:g} s each; load average {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
