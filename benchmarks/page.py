"""docs/results/benchmarks.md from the rows in ray_results/reference: `python -m benchmarks.page [--measure]`.

Writes the tables of the page between its markers. `--measure`, four minutes, first makes the rows of `versus` anew: two
commands that sleep for a second and print a number, in turns, by a loop of the shell, by hyperfine and by `tunediff
compare --run`; 6 runs and 24, so that what a run costs is apart from what a start costs.
"""

from __future__ import annotations

import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tunediff.core.text import markdown_table

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "ray_results/reference"
PAGE = ROOT / "docs/results/benchmarks.md"
RUNS, WINNERS = REFERENCE / "versus/runs.csv", REFERENCE / "versus/winner.csv"
STEP = 'sleep 1; echo "loss: 0.$1$2"\n'
STEPS = {
    "digits": "training, digits, batch 128",
    "cifar": "training, CIFAR-10, batch 64",
    "cifar-channels-last": "… ours in channels_last",
    "sampling": "DDIM, 10 steps, digits",
    "sampling-cifar": "DDIM, 5 steps, CIFAR-10",
}
PEERS = ("diffusers", "denoising-diffusion-pytorch")


def commands(folder: Path, pairs: int) -> dict[str, list[str]]:
    """Return the command of each tool that runs so many pairs in a folder."""
    step = "sh step.sh"
    loop = f"for seed in $(seq {pairs}); do for a in 1 2; do {step} $a $seed; done; done"
    options = ["--objective", "loss", "--outcome", "final", "--pairs", str(pairs), "--fixed"]
    sides = ["--run", f"{step} {{a}} {{seed}}", "a=1", "a=2", "--storage", str(folder / "results")]
    return {
        "loop of the shell": ["sh", "-c", loop],
        "hyperfine": ["hyperfine", "-N", "--runs", str(pairs), "-L", "a", "1,2", f"{step} {{a}} 7"],
        "tunediff compare": [sys.executable, "-m", "tunediff", "compare", *sides, *options],
    }


def measure() -> None:
    """Run the pairs of commands by every tool, in turns, and write the rows."""
    rows: list[Sequence[object]] = [("tool", "runs", "wall_s", "load")]
    for pairs in (3, 12):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step.sh").write_text(STEP)
            for tool, command in commands(Path(folder), pairs).items():
                load, began = os.getloadavg()[0], time.perf_counter()
                subprocess.run(command, cwd=folder, capture_output=True)
                wall_s = time.perf_counter() - began
                rows.append((tool, 2 * pairs, f"{wall_s:.2f}", f"{load:.1f}"))
    RUNS.parent.mkdir(parents=True, exist_ok=True)
    with open(RUNS, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def step_table() -> str:
    """Return how many times as fast ours is: median over the rounds, least and most."""
    rows = [["", *PEERS]]
    for name, title in STEPS.items():
        ratios = json.loads((REFERENCE / f"peers-cpu/{name}.json").read_text())["ratios"]
        cells = [ratios[f"ours / {peer}"]["wall"] for peer in PEERS]
        rows.append(
            [title, *(f"{statistics.median(c):.2f} ({min(c):.2f} … {max(c):.2f})" for c in cells)]
        )
    return markdown_table(rows)


def run_table() -> str:
    """Return what a start and a run cost beside the second that a run sleeps."""
    with open(RUNS, newline="") as file:
        measured = list(csv.DictReader(file))
    rows = [["", "24 runs of 1 s", "a run's own cost", "a start's", "load average before"]]
    for tool in dict.fromkeys(row["tool"] for row in measured):
        few, many = (row for row in measured if row["tool"] == tool)
        counts, walls = (
            [int(r["runs"]) for r in (few, many)],
            [float(r["wall_s"]) for r in (few, many)],
        )
        run_s = (walls[1] - walls[0]) / (counts[1] - counts[0])
        start_s = walls[0] - counts[0] * run_s
        rows.append(
            [tool, f"{walls[1]:.1f} s", f"{run_s - 1:.2f} s", f"{start_s:.1f} s", many["load"]]
        )
    return markdown_table(rows)


def winner_table() -> str:
    """Return what a confirmed winner took, by `benchmarks.winner`."""
    with open(WINNERS, newline="") as file:
        measured = list(csv.DictReader(file))
    rows = [
        ["", "wall-clock", "of it trained", "pairs", "verdict on new seeds", "load average before"]
    ]
    for row in measured:
        verdict = f"{row['verdict']}, {float(row['ratio']):.2f} times"
        walls = [f"{float(row[name]):.0f} s" for name in ("wall_s", "trained_s")]
        rows.append([row["tool"], *walls, row["pairs"], verdict, row["load"]])
    return markdown_table(rows)


def driver_table() -> str:
    """Return what Ray Tune, searcher, journals and console cost by trials, as `benchmarks.overhead` printed it."""
    lines = (REFERENCE / "overhead/output.txt").read_text().splitlines()
    return "\n".join(line for line in lines if re.match(r"\| ?(trials|--|0…|400…|900…)", line))


def filled(page: str) -> str:
    """Return the page with its tables made of the rows."""
    tables = {"step": step_table, "run": run_table, "winner": winner_table, "driver": driver_table}
    for name, make in tables.items():
        table = make()
        part = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.S)
        page = part.sub(lambda found, table=table: f"{found[1]}\n{table.strip()}\n{found[2]}", page)
    return page


def main() -> int:
    """See the module's description."""
    if "--measure" in sys.argv[1:]:
        measure()
    PAGE.write_text(filled(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
