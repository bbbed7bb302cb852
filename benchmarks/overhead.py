"""What a search costs beside training: `python benchmarks/overhead.py [--trials 1000]`.

A whole search runs through Ray Tune, searcher, journals, study and console, but its trials report made-up points and
end at once, so that all seconds are the driver's own. Prints, by windows of trials, seconds per trial and of one
suggestion: both must not grow.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunediff import search_space
from tunediff.core import trial_record as record
from tunediff.core.listeners import Listeners
from tunediff.core.lock import exclusive_lock
from tunediff.core.outcomes import Status
from tunediff.core.point import Point
from tunediff.ray_backend import connection, searcher, tuner
from tunediff.report.console import Console
from tunediff.tuning import experiment, resources, sessions, trial
from tunediff.tuning.trial_spec import TrialSpec

CONTENT = {
    "workload": "digits",
    "search": {
        "loader.batch_size": [32, 64, 128, 256],
        "optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True},
        "model.dropout": {"low": 0.0, "high": 0.5},
        "precision.amp": ["none", "bf16"],
        "ema.max_decay": {"low": 0.9, "high": 0.9999},
    },
}


class Trivial(searcher.Driver):
    """A trial without slot and workers: one point, whose value the knobs decide, and the end."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._points = trivial(new_config[trial.SPEC])
        return True

    setup = reset_config


def trivial(spec: TrialSpec) -> Iterator[dict[str, float]]:
    """What `tunediff.tuning.trial.run_trial_on_slot` does, but for the training."""
    import math
    import os

    from tunediff.core import trial_record as record
    from tunediff.core.journal import Journal
    from tunediff.tuning import trial

    drawn = record.read_begun(spec.folder).drawn
    value = 1.0 + abs(math.log10(drawn["optimizer.lr"]) + 3) + drawn["model.dropout"]
    seconds, journal = spec.budget.seconds or 60.0, Journal(spec.folder)
    journal.write("worker", pid=os.getpid(), threads=1, device="cpu")
    for index in range(1, spec.points + 1):
        fraction = index / spec.points
        metrics = {spec.metric: value * (2 - fraction), "label": "made up"}
        point = Point(
            index, seconds * fraction, samples=1000 * index, steps=index, fraction=fraction, samples_per_s=1000.0,
            loss=1.0, peak_memory_mib=1.0, peak_host_memory_mib=1.0, metrics=metrics,
        )  # fmt: skip
        journal.point(point)
        yield trial.reported(point, spec)
    journal.end(record.End(Status.OK, seconds={"train": 0.0}))


def of_driver(trials: int, window: int) -> list[dict[str, Any]]:
    """Run `trials` trivial ones; seconds per trial and per suggestion by windows of `window` trials."""
    suggestions: list[float] = []
    suggest = searcher.Searcher.suggest

    def timed(self: searcher.Searcher, trial_id: str) -> Any:
        start = time.perf_counter()
        suggestion = suggest(self, trial_id)
        if isinstance(suggestion, dict):
            suggestions.append(time.perf_counter() - start)
        return suggestion

    searcher.Searcher.suggest = timed  # type: ignore[method-assign]
    tuner.Driver = Trivial  # type: ignore[misc]
    content = {**CONTENT, "budget": {"per_trial": "60s", "trials": trials}}
    space = search_space.parse(content | {"fixed": {"evaluation.points": 2}}, "overhead")
    with tempfile.TemporaryDirectory() as storage:
        folder = Path(storage) / "overhead"
        experiment.create(folder, space, content)
        console = Console(folder, space)
        sys.stdout, terminal = open(os.devnull, "w"), sys.stdout  # noqa: SIM115
        try:
            share = functools.partial(resources.share, space)
            workers = connection.workers(folder, share, None, lambda _: None)
            with (
                exclusive_lock(folder),
                sessions.recorded_session(folder, "overhead"),
                workers as slots,
            ):
                listeners = Listeners()
                with listeners.with_listeners(console):
                    connection.search(folder, space, slots, listeners)
        finally:
            sys.stdout = terminal
        ended = sorted(t.ended for t in record.read_trials(folder) if t.ended is not None)
    rows = []
    for first in range(0, trials, window):
        last = min(first + window, len(ended)) - 1
        before = ended[first - 1] if first else ended[0]
        count = last - first + (1 if first else 0)
        rows.append(
            {
                "trials": f"{first}…{last}",
                "per_trial_s": (ended[last] - before) / max(1, count),
                "suggestion_ms_median": 1e3 * statistics.median(suggestions[first : last + 1]),
                "suggestion_ms_max": 1e3 * max(suggestions[first : last + 1]),
            }
        )
    return rows


def main() -> int:
    """See the module's description."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--window", type=int, default=100, help="trials per row")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print("| trials | s per trial | suggestion, ms (median) | (max) |\n|---|---|---|---|")
    for row in of_driver(args.trials, args.window):
        numbers = (row["per_trial_s"], row["suggestion_ms_median"], row["suggestion_ms_max"])
        print(f"| {row['trials']} | " + " | ".join(f"{number:.3g}" for number in numbers) + " |")
    print(f"load average before: {load:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
