"""Search strategies against recorded curves: `python -m benchmarks.replay TABLE_FOLDER … [--seeds 200]`.

A table (`python -m benchmarks.replay.record`) holds real curves of many configurations, each trained on two seeds. A
strategy that draws a configuration reads its curve instead of training, and pays the training seconds of the points
that it looked at. So a search of hours is replayed in a fraction of a second, with hundreds of seeds.

Rules, the same for all strategies:

- One trial at a time, the baseline first, each configuration once, by a curve of one of its seeds.
- What a search has found is the best *finished* trial, by its one run. The target: its mean over the seeds is not
  behind the table's best mean by more than the noise of one run (pooled over the configurations).
- Every strategy chooses among the recorded configurations: a sampler's draw stands for the nearest one that is left.
- A trial that failed costs what it trained.

Random search, TPE (Optuna's defaults), TPE with Ray Tune's ASHA from half of the budget, and ours with the same.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.replay.report import markdown
from benchmarks.replay.strategies import STRATEGIES, replay_seed
from benchmarks.replay.table import load
from tunediff import cli
from tunediff.core.refusals import allow


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE_FOLDER")
    parser.add_argument(
        "--seeds", type=int, default=200, help="searches per strategy (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.md", help="where the results go, beside standard output"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="STRATEGY",
        help="this one beside random; may be repeated",
    )
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    return parser.parse_args(argv)


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Replay; see `--help`."""
    args = arguments(argv)
    allow(args.seeds >= 2, "--seeds", args.seeds, "at least 2")
    for name in args.only or ():
        allow(name in STRATEGIES, "--only", name, ", ".join(STRATEGIES))
    tables = {folder.resolve().name: load(folder) for folder in args.tables}
    names = ["random", *(name for name in args.only or STRATEGIES if name != "random")]
    seconds: dict[str, dict[str, np.ndarray]] = {}
    with concurrent.futures.ProcessPoolExecutor(
        args.processes, multiprocessing.get_context("spawn")
    ) as pool:
        each = pool.map if args.processes > 1 else map
        for title, folder in zip(tables, args.tables, strict=True):
            seconds[title] = {}
            for name in names:
                replayed = each(functools.partial(replay_seed, folder, name), range(args.seeds))
                seconds[title][name] = np.array(list(replayed))
                print(f"{title}: {name}", file=sys.stderr, flush=True)
    text = markdown(tables, seconds, args.seeds)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    print(text, end="")
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
