"""How long a draw by the model of curves takes: `python -m benchmarks.replay.decision TABLE_FOLDER … [--trials 100]`.

The trials of a table, repeated until there are enough of them, each with all of its points: more than a search has.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path

from benchmarks.replay.table import load
from tunediff.core.trial_record import End, TrialRecord
from tunediff.tuning.curve_model import propose


def main() -> None:
    """Print the median and the longest of ten draws, in seconds of the processor: other load does not count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE_FOLDER")
    parser.add_argument("--trials", type=int, default=100, help="default: %(default)s")
    args = parser.parse_args()
    for folder in args.tables:
        table, trials = load(folder), list[TrialRecord]()
        for number in range(args.trials):
            one = table.configurations[number % len(table.configurations)]
            curve = one.curves[number // len(table.configurations) % len(one.curves)]
            end, points = End(curve.status), list(curve.points)
            trials.append(TrialRecord(f"t{number:04d}", number, {}, dict(one.knobs), "", points=points, end=end))
        space, times_ms = dataclasses.replace(table.space, seed=1), list[float]()
        for number in range(11):
            began = time.process_time()
            propose(space, trials, number)
            times_ms.append(1000 * (time.process_time() - began))
        # The first call imports SciPy
        typical_ms, most_ms = statistics.median(times_ms[1:]), max(times_ms[1:])
        size = f"{args.trials} trials × {table.points} points"
        print(f"{folder.name}: {size}: median {typical_ms:.0f} ms, at most {most_ms:.0f} ms of the process")


if __name__ == "__main__":
    sys.exit(main())
