"""The loop of docs/agents.md with `--run`: which of twenty proposals are kept, of which five are real.

`python -m benchmarks.agents_loop [SEED …]` makes a git repository with a toy script whose loss has a
noise of 2 % from run to run, changes it twenty times, and asks `tunediff compare --run … --at HEAD
--at .` each time; a change is committed if it is better. Five changes are gains of one to three
standard deviations of a run, five are harms of the same sizes, ten change nothing but the noise.
Beside it stands whoever compares one run each.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tunediff import compare

NOISE = 0.02
SIZES = (1.0, 1.5, 2.0, 2.5, 3.0)
"""Gains and harms, in standard deviations of a run."""
SCRIPT = """import argparse, random
parser = argparse.ArgumentParser()
parser.add_argument("--seed")
FACTOR, VERSION = {factor}, {version}
noise = random.Random(parser.parse_args().seed + ":" + str(VERSION)).gauss(0, {noise})
print(f"val_loss: {{FACTOR * (1 + noise):.5f}}")
"""
RUN = f"{sys.executable} train.py --seed {{seed}}"


def git(*words: str) -> None:
    """Run a git command in the working folder."""
    identity = ("-c", "user.name=loop", "-c", "user.email=loop@example.org")
    subprocess.run(["git", *identity, *words], check=True, capture_output=True)


def proposals(seed: int) -> list[tuple[str, float]]:
    """Return twenty changes in an order by chance: what each is, and its factor of the loss."""
    gains = [(f"gain of {size:g} sd", 1 - size * NOISE) for size in SIZES]
    harms = [(f"harm of {size:g} sd", 1 + size * NOISE) for size in SIZES]
    changes = [*gains, *harms, *[("nothing", 1.0)] * 10]
    random.Random(seed).shuffle(changes)
    return changes


def write(factor: float, version: int) -> None:
    """Write the script; `version` changes its noise."""
    Path("train.py").write_text(SCRIPT.format(factor=factor, version=version, noise=NOISE))


def value(seed: int) -> float:
    """Return what one run of the script prints."""
    done = subprocess.run(RUN.format(seed=seed).split(), capture_output=True, text=True, check=True)
    return float(done.stdout.split()[1])


def loop(seed: int) -> None:
    """Go through twenty proposals and print a row for each judge."""
    factor, kept, fooled, runs = 1.0, list[str](), list[str](), 0
    write(factor, 0)
    git("init", "-q")
    Path(".gitignore").write_text("ray_results\n")
    git("add", "-A")
    git("commit", "-qm", "first")
    begun = time.monotonic()
    for version, (words, change) in enumerate(proposals(seed), 1):
        before = value(seed)
        write(factor * change, version)
        if value(seed) < before:  # one run each
            fooled.append(words)
        asked = [
            "--run",
            RUN,
            "--at",
            "HEAD",
            "--at",
            ".",
            "--objective",
            "val_loss",
            "--outcome",
            "final",
        ]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = compare.main([*asked, "--no-check", "--quiet", "--name", f"p{version}"])
        runs += sum(
            line.startswith("runs: ") and int(line.split()[1])
            for line in said.getvalue().splitlines()
        )
        if code == 0:
            kept.append(words)
            factor *= change
            git("commit", "-qam", words)
        else:
            git("checkout", "-q", "HEAD", "--", "train.py")
    minutes = (time.monotonic() - begun) / 60
    for judge, chosen in (("compare --run", kept), ("one run each", fooled)):
        counts = [
            sum(words.startswith(kind) for words in chosen) for kind in ("gain", "nothing", "harm")
        ]
        which = ", ".join(sorted(words for words in chosen if words != "nothing"))
        print("", seed, judge, *counts, which, "", sep=" | ")
    print(f"seed {seed}: {runs} runs, {minutes:.1f} minutes", flush=True)


def main() -> None:
    """Print a table for the seeds of the command line."""
    columns = (
        "seed",
        "judge",
        "gains kept, of 5",
        "nothing kept, of 10",
        "harms kept, of 5",
        "which",
    )
    print("", *columns, "", sep=" | ")
    print("", *["---"] * len(columns), "", sep=" | ")
    home = Path.cwd()
    for seed in map(int, sys.argv[1:] or ["1"]):
        with tempfile.TemporaryDirectory(prefix="tunediff-loop-") as folder:
            os.chdir(folder)
            try:
                loop(seed)
            finally:
                os.chdir(home)


if __name__ == "__main__":
    main()
