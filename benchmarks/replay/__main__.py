"""Search strategies against a recorded table: `python -m benchmarks.replay RESULT_FOLDER [--seeds 100] [--out DIR]`.

A grid that was searched once is a table: every point of it has its real curve, the objective at
fractions of its training seconds.

    python -m tunediff.search replay_digits --name replay-digits
    python -m benchmarks.replay ray_results/replay-digits --candidates

A strategy that proposes a point reads its curve instead of training, and pays the training seconds up to where the
curve was stopped. So a search of minutes is replayed in a fraction of a second, with many seeds. RESULT_FOLDER may also
be one that holds only table.csv, or such a file: what is kept of a table, the knobs that vary and the curves. Beside a
table of another workload than diffusion lies its baseline.yaml.

Rules, the same for all strategies:

- One trial at a time, each point once: a point that was proposed before costs nothing and is drawn again.
- What a search has found is the best *finished* trial. Regret is its value over the best one of the table, minus 1;
  where ratios mean nothing (accuracies, values below 0), how far it is from the best as a share of how far the worst
  is. A search without a finished trial has found the worst. A trial that failed costs its seconds and counts as bad.
- Early stopping is Ray Tune's own, fed with the points as Ray Tune feeds them.

random, TPE and GP are Optuna's samplers with their defaults, told the last value of a stopped trial as Ray Tune tells
it. "ours" is `tunediff.tuning.searcher.Searcher` as a search runs it: it tries the baseline, the first point of the
table, first. --candidates adds other settings of ours.

Writes replay.md, replay.png, table.csv and baseline.yaml. A ratio compares median seconds; its interval is a bootstrap
over the seeds. A table is one measurement of one seed: its best is partly the luckiest, for every strategy alike.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay.report import figure, markdown, summary
from benchmarks.replay.strategies import CANDIDATES, STRATEGIES, replay_all, replay_in_processes
from benchmarks.replay.table import TABLE, load
from tunediff import cli
from tunediff.config import ConfigError


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="RESULT_FOLDER", help="a search's folder, or where table.csv is")
    parser.add_argument("--seeds", type=int, default=100, help="searches per strategy (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where the results go (default: RESULT_FOLDER)")
    parser.add_argument("--candidates", action="store_true", help="other settings of ours as well")
    parser.add_argument("--only", action="append", metavar="STRATEGY", help="this strategy; may be repeated")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Replay; see `--help`."""
    return cli.guarded(_main)(argv)


def _main(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    strategies = STRATEGIES | CANDIDATES
    names = args.only or list(strategies if args.candidates else STRATEGIES)
    if unknown := [name for name in names if name not in strategies]:
        raise ConfigError(f"--only: {unknown[0]!r} is not allowed; allowed: {', '.join(strategies)}")
    if args.seeds < 2 or args.processes < 1:
        raise ConfigError("--seeds, --processes: allowed: at least 2 seeds and 1 process")
    if missing := [package for package in ("torch", "scipy") if importlib.util.find_spec(package) is None]:
        print(f"GP is left out: it needs {' and '.join(missing)}", file=sys.stderr)
        names = [name for name in names if not name.startswith("GP")]
    out = args.out or (args.table if args.table.is_dir() else args.table.parent)
    table = load(args.table, out)
    path = out / TABLE if (out / TABLE).is_file() else args.table
    if args.processes == 1:
        runs = replay_all(table, names, range(args.seeds))
    else:
        runs = replay_in_processes(path, names, args.seeds, args.processes)
    title = args.table.resolve().name if args.table.is_dir() else args.table.stem
    text = markdown(table, summary(table, runs), title, args.seeds)
    out.mkdir(parents=True, exist_ok=True)
    (out / "replay.md").write_text(text)
    figure(table, runs, out / "replay.png")
    print(text, end="")
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
