"""What a trial costs beside training when there are thousands: `python benchmarks/scaling.py [--trials 10000]`.

Searcher, study, journals and console do what they do in a search, with one made-up point per trial and as many slots as
asked for, but without Ray: one process, which starts in a second. Prints, by windows of trials, milliseconds of CPU per
trial of each part, which others on the machine disturb little, and the memory of the process. `--earlier 3000` begins a
search that has so many trials already, with its study in memory: to write them one by one takes SQLite an hour.
`overhead.py` measures the same through Ray Tune, which costs more.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import json
import math
import os
import pstats
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import psutil

from tunediff import config as cfg
from tunediff import search_space
from tunediff.core import environment
from tunediff.core import trial_record as record
from tunediff.core.point import Point
from tunediff.core.progress import log_exceptions
from tunediff.ray_backend.searcher import Searcher
from tunediff.report.console import Console
from tunediff.tuning import experiment
from tunediff.tuning.optuna_proposer import OptunaProposer
from tunediff.tuning.pool import Pool
from tunediff.tuning.resources import Machine, ResourcePartition

CONTENT = {
    "workload": "digits",
    "search": {
        "loader.batch_size": [32, 64, 128, 256],
        "optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True},
        "model.dropout": {"low": 0.0, "high": 0.5},
        "precision.amp": ["none", "bf16"],
        "ema.max_decay": {"low": 0.9, "high": 0.9999},
    },
    "fixed": {"evaluation.points": 1},
    "noise": 1,
}
DEVICES = 8
"""Of a node."""
PARTS = ("suggest", "journal", "result", "complete", "console")


class Simulation:
    """A search whose trials end at once, in slots that are taken in turn."""

    def __init__(self, folder: Path, trials: int, slots: int, earlier: int = 0) -> None:
        content = CONTENT | {"budget": {"per_trial": "60s", "trials": earlier + trials}}
        self.space = experiment.create(folder, search_space.parse(content, "scaling"), content)
        self.folder, self.trials, self.slots = folder, trials, slots
        self.spent: dict[str, float] = collections.defaultdict(float)
        for number in range(earlier):
            write_earlier(folder, self.space, number)
        storage = optuna.storages.InMemoryStorage() if earlier else None
        nodes = tuple(
            Machine(64, DEVICES, f"node{number}", f"{number}")
            for number in range(-(-slots // DEVICES))
        )
        pool = Pool(ResourcePartition(nodes, (1,), gpu=True, exclusive=False))
        self.searcher = self.timed("start", self._searcher, folder, pool, storage)
        self.console = Console(folder, self.space)

    def _searcher(
        self, folder: Path, pool: Pool, storage: optuna.storages.BaseStorage | None
    ) -> Searcher:
        backend: Any = SimpleNamespace(devices=pool, release=lambda spec: None)
        return Searcher(OptunaProposer(self.space, folder, storage=storage), backend)

    def timed(self, part: str, do: Callable[..., Any], *args: Any) -> Any:
        """What `do` returns; its CPU seconds count as those of `part`."""
        begin = time.process_time()
        try:
            return do(*args)
        finally:
            self.spent[part] += time.process_time() - begin

    def run(self, ended: Callable[[int], object]) -> None:
        """All trials; `ended` hears how many have ended."""
        live, number, done = collections.deque[tuple[str, dict[str, Any]]](), 0, 0
        while True:
            while len(live) < self.slots and number < self.trials:
                name = f"tune{number}"
                params = self.timed("suggest", self.searcher.suggest, name)
                if not isinstance(params, dict):
                    break
                self._tell("start", params)
                live.append((name, params))
                number += 1
            if not live:
                return
            self._end(*live.popleft())
            done += 1
            ended(done)

    def _end(self, name: str, params: dict[str, Any]) -> None:
        point = self.timed("journal", self._write, params)
        result = {
            **{key: value for key, value in point.flat.items() if key != "seconds"},
            "objective": point["frechet"],
        }
        self.timed("result", self.searcher.on_trial_result, name, result)
        self._tell("point", {**params, **result})
        self.timed("complete", self.searcher.on_trial_complete, name, result)
        self._tell("end", params)

    def _tell(self, event: str, params: dict[str, Any]) -> None:
        self.timed(
            "console", log_exceptions, event, self.console.listen, event, params["trial"], params
        )

    def _write(self, params: dict[str, Any]) -> Point:
        """What worker and driver write to a journal."""
        journal = params["spec"].begin()
        journal.write("worker", pid=os.getpid(), threads=1, device="cpu")
        value = objective(params)
        point = Point(
            1, 60.0, samples=1000, steps=10, fraction=1.0, device_s=60.0, samples_per_s=16.0, loss=1.0,
            peak_memory_mib=1.0, peak_host_memory_mib=1.0, metrics={"frechet": value, "label": "made up"},
        )  # fmt: skip
        journal.point(point)
        journal.end(record.End("ok", seconds={"train": 60.0}))
        return point


def objective(values: Mapping[str, Any]) -> float:
    """Made up; below 1.01 near a learning rate of 1e-3 without dropout."""
    return 1.0 + abs(math.log10(values["optimizer.lr"]) + 3) + float(values["model.dropout"])


def write_earlier(folder: Path, space: search_space.SearchSpace, number: int) -> None:
    """The journal of a trial that has ended, at once."""
    rng = random.Random(number)
    drawn = space.candidates[0] if number == 0 else {
        "loader.batch_size": rng.choice([32, 64, 128, 256]), "optimizer.lr": 10 ** rng.uniform(-4, -2),
        "model.dropout": rng.uniform(0, 0.5), "precision.amp": rng.choice(["none", "bf16"]),
        "ema.max_decay": rng.uniform(0.9, 0.9999),
    }  # fmt: skip
    config, name = space.config(drawn), f"t{number:04d}"
    begun = {
        "config": cfg.flat(config),
        "drawn": drawn,
        "fingerprint": cfg.fingerprint(config),
        "budget_s": 60.0,
    }
    point = {
        "index": 1,
        "train_s": 60.0,
        "samples": 1000,
        "steps": 10,
        "frechet": objective(drawn),
        "samples_per_s": 16.0,
    }
    lines = [
        {"event": "start", "time": 1.0, "name": name, "number": number, **begun},
        {"event": "point", "time": 2.0, **point, "label": "made up"},
        {"event": "end", "time": 3.0, "status": "ok", "seconds": {"train": 60.0}},
    ]
    (folder / "trials" / name).mkdir()
    (folder / "trials" / name / record.JOURNAL).write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )


def measured(
    folder: Path, trials: int, slots: int, window: int, earlier: int = 0
) -> list[dict[str, Any]]:
    """CPU milliseconds per trial of each part, and MiB of the process, by windows of trials."""
    process, rows, before = psutil.Process(), list[dict[str, Any]](), dict[str, float]()
    simulation = Simulation(folder, trials, slots, earlier)

    def ended(done: int) -> None:
        if done % window and done != trials:
            return
        count = done - (rows[-1]["trials"] - earlier if rows else 0)
        each = {
            part: 1e3 * (simulation.spent[part] - before.get(part, 0.0)) / count for part in PARTS
        }
        rows.append(
            {
                "trials": earlier + done,
                **each,
                "all": sum(each.values()),
                "mib": process.memory_info().rss / 2**20,
            }
        )
        before.update(simulation.spent)
        print(_line(rows[-1].values()), file=sys.stderr, flush=True)

    simulation.run(ended)
    return rows


def _line(values: Any) -> str:
    return (
        "| "
        + " | ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values)
        + " |"
    )


def main() -> int:
    """See the module's description."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument(
        "--earlier",
        type=int,
        default=0,
        help="trials that have ended before (default: %(default)s)",
    )
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--window", type=int, default=1000, help="trials per row")
    parser.add_argument(
        "--profile", action="store_true", help="also print where the time goes, by function"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    load, profile = os.getloadavg()[0], cProfile.Profile()
    with tempfile.TemporaryDirectory() as storage:
        sys.stdout, terminal = open(os.devnull, "w"), sys.stdout  # noqa: SIM115
        try:
            if args.profile:
                profile.enable()
            rows = measured(
                Path(storage) / "scaling", args.trials, args.slots, args.window, args.earlier
            )
            profile.disable()
        finally:
            sys.stdout = terminal
    if args.json:
        print(
            json.dumps(
                {"windows": rows, "load_before": load, "environment": environment.describe()},
                indent=1,
            )
        )
        return 0
    print(_line(rows[0]) + "\n" + "|---" * len(rows[0]) + "|")
    print("\n".join(_line(row.values()) for row in rows))
    print(
        f"milliseconds of CPU per trial; load average before: {load:.1f}, after: {os.getloadavg()[0]:.1f}"
    )
    if args.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
    return 0


if __name__ == "__main__":
    sys.exit(main())
