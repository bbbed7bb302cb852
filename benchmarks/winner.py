"""Wall-clock to a winner that new seeds have confirmed: `python -m benchmarks.winner [TOOL]`, ten minutes.

By tunediff, by Optuna and by Ray Tune with Optuna's sampler. All train 8 trials of `digits` (the first two are those
of the search file, early stopping is off), then the baseline and the best on new seeds. Optuna and Ray Tune test
nothing, so the loop after them is ours: pairs until the sequential test of `tunediff.analysis` decides, 12 at most.

Appends rows to ray_results/reference/versus/winner.csv; `python -m benchmarks.page` shows them.
"""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tunediff import search_space
from tunediff.analysis.sequential import Rules, analyse
from tunediff.core.clock import Budget
from tunediff.core.outcomes import Verdict
from tunediff.distributed import alone
from tunediff.search_space import Draw, SearchSpace

ROWS = Path(__file__).parents[1] / "ray_results/reference/versus/winner.csv"
TRIALS, BUDGET_S, SEED, MOST = 8, 6.0, 1, 12
COLUMNS = ("tool", "trials", "pairs", "trained_s", "wall_s", "verdict", "ratio", "load")
ENV = os.environ | {"GOMP_SPINCOUNT": "3000"}
"""As tunediff's commands set it: on a machine with other load, threads that spin stop a training almost completely."""


def space() -> SearchSpace:
    """Return the search space of the digits."""
    return search_space.load(search_space.find("digits"), (), {"trials": TRIALS})


def trained(values: Mapping[str, Any], seed: int) -> float:
    """Train the digits for the budget and return the distance."""
    from tunediff.training.engine import Engine
    from tunediff.training.observer import Observer
    from tunediff.training.trial import run

    config = space().config({**values, "seed": seed})
    outcome = run(Engine(config, Budget(BUDGET_S), alone("cpu"), Observer()))
    return float(outcome.points[-1]["frechet"])


def by_optuna() -> Mapping[str, Any]:
    """Search with Optuna and return the best values."""
    import optuna

    study, draw = (
        optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED)),
        Draw(space().dimensions),
    )
    for first in space().candidates[:2]:
        study.enqueue_trial(first)
    study.optimize(lambda trial: trained(draw(trial), SEED), n_trials=TRIALS)
    return draw(optuna.trial.FixedTrial(study.best_params))


def by_ray() -> Mapping[str, Any]:
    """Search with Ray Tune and Optuna's sampler and return the best values."""
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch

    def trainable(values: dict[str, Any]) -> None:
        tune.report({"frechet": trained(values, SEED)})

    draw = Draw(space().dimensions)
    first = [dict(point) for point in space().candidates[:2]]
    algorithm = OptunaSearch(
        draw, metric="frechet", mode="min", seed=SEED, points_to_evaluate=first
    )
    settings = tune.TuneConfig(search_alg=algorithm, num_samples=TRIALS, max_concurrent_trials=1)
    resources = tune.with_resources(trainable, {"cpu": os.cpu_count()})
    best = tune.Tuner(resources, tune_config=settings).fit().get_best_result("frechet", "min")
    return dict(best.config or {})


def confirmed(search: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Search, run pairs on new seeds until the test decides, and return what is known but the wall-clock."""
    best, values = search(), np.empty((2, 0))
    while True:
        seed = 1000 + values.shape[1]
        pair = [[trained(space().candidates[0], seed)], [trained(best, seed)]]
        values = np.hstack([values, pair])
        pairs = values.shape[1]
        if pairs < 3:
            continue
        found = analyse(values, Rules(MOST)).differences[0]
        if pairs == MOST or found.verdict in (Verdict.BETTER, Verdict.WORSE):
            trained_s = BUDGET_S * (TRIALS + 2 * pairs)
            ratio = math.exp(np.log(values[1] / values[0]).mean())
            return {
                "pairs": pairs,
                "trained_s": trained_s,
                "verdict": str(found.verdict.value),
                "ratio": ratio,
            }


def by_tunediff() -> dict[str, Any]:
    """Search with tunediff, which confirms by itself."""
    with tempfile.TemporaryDirectory() as storage:
        words = [
            "digits",
            "--budget",
            f"{BUDGET_S:g}s",
            "--trials",
            str(TRIALS),
            "--seed",
            str(SEED),
        ]
        words += ["--early-stopping", "none", "--storage", storage, "--name", "winner", "--json"]
        command = [sys.executable, "-m", "tunediff", "search", *words]
        result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    found = result["confirmations"][0]
    best = next(one for one in found["candidates"] if one["name"] == found["best"])
    return {
        "pairs": len(best["values"]), "trained_s": result["seconds"]["train"],
        "verdict": result["verdict"], "ratio": best["effect"]["value"],
    }  # fmt: skip


TOOLS: dict[str, Callable[[], dict[str, Any]]] = {
    "tunediff": by_tunediff,
    "Optuna": lambda: confirmed(by_optuna),
    "Ray Tune": lambda: confirmed(by_ray),
}


def write(row: Mapping[str, Any]) -> None:
    """Append a row to the table, which is begun first."""
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    is_new = not ROWS.exists()
    with open(ROWS, "a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            table.writeheader()
        numbers = {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
        table.writerow({**row, **numbers})
    print(dict(row), flush=True)


def main() -> int:
    """Measure each tool in a process of its own; `TOOL` is one, in this process."""
    if tools := sys.argv[1:]:
        print("RESULT", json.dumps(TOOLS[tools[0]]()))
        return 0
    for tool in TOOLS:
        command = [sys.executable, "-m", "benchmarks.winner", tool]
        load, began = round(os.getloadavg()[0], 1), time.perf_counter()
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=ENV)
        wall_s = time.perf_counter() - began
        known = json.loads(ended.stdout.rpartition("RESULT ")[2])
        write({"tool": tool, "trials": TRIALS, "wall_s": wall_s, **known, "load": load})
    return 0


if __name__ == "__main__":
    sys.exit(main())
