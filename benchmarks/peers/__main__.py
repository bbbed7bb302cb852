"""Our training step and our sampler against public ones: `python -m benchmarks.peers [--config digits] [--sampling]`.

Peers, where they are installed (`uv pip install diffusers denoising-diffusion-pytorch`):

- diffusers: `UNet2DModel` with our architecture and our weights, trained as its example of unconditional image
  generation does (AdamW, clipping, learning-rate schedule, `EMAModel`, the loss read in every step), but without
  accelerate; sampled with `DDIMScheduler`.
- denoising-diffusion-pytorch: its `Unet` is another network; it gets our multipliers and the width that comes nearest
  to our number of parameters, and is trained as its `Trainer` does.

Ours is the real `tunediff.training.trial.run`, timed by its own clock, with all it does in a step, drawing its batches
from resident bytes; the peers get theirs ready-made as floats. The pixels are random: no speed depends on them.

A peer runs as it comes, and where the configuration sets `memory.channels_last` or `precision.amp` once more with the
same switches. "tuned" is the same contender with channels_last and torch.compile, on a GPU also bfloat16 autocast and
cuDNN's benchmark; ours then takes its fused AdamW as well. On a GPU tuned contenders run unless --no-tuned is given,
on a CPU with --tuned: compilation takes minutes.

Every contender is a process of its own, so that memory, allocator and global settings are its own; they take turns,
one at a time, in every round. A ratio compares two contenders in the same round. Round 0 warms up and is not counted:
in it tuned contenders compile side by side.
Machines are shared: read the ratios with their spread, not the images/s. On a busy CPU the ratio of CPU times tells
more than that of the wall clock, with OMP_NUM_THREADS=1: threads that wait for each other spend CPU time as well.

knob=value changes the configuration of ours; model, data, process and batch size hold for all.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.contenders import TUNED, Job, contend
from tunediff import cli, search_space
from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.core import environment
from tunediff.distributed import alone
from tunediff.workloads.diffusion import commands

PACKAGES = ("diffusers", "denoising-diffusion-pytorch")  # the peers, named as they are installed


def run(jobs: list[Job]) -> dict[str, list[dict[str, float]]]:
    """The rounds of every contender by its label; one that fails is told and left out."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for job in jobs:
        pipes[job.label], theirs = context.Pipe()
        processes.append(context.Process(target=contend, args=(job, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
    rounds_by_label: dict[str, list[dict[str, float]]] = {label: [] for label in pipes}
    try:
        for number in range(jobs[0].rounds + 1):
            _round(number, pipes, rounds_by_label)
            print(f"round {number} of {jobs[0].rounds} done", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(
            "interrupted: what follows is of the rounds that all contenders have", file=sys.stderr
        )
        for process in processes:
            process.terminate()
        whole = min(map(len, rounds_by_label.values()), default=0)
        rounds_by_label = {
            label: rounds[:whole] for label, rounds in rounds_by_label.items() if whole
        }
    for process in processes:
        process.join(timeout=30)
    return rounds_by_label


def _round(
    number: int, pipes: dict[str, Connection], rounds_by_label: dict[str, list[dict[str, float]]]
) -> None:
    """Let every contender have its turn; one that fails is told and left out."""
    order = list(pipes)
    shift = number % max(1, len(order))
    turns = [
        [label] for label in [*order[shift:], *order[:shift]]
    ]  # nobody always follows the same contender
    if number == 0:
        together = [label for label in order if label.endswith(", tuned")]
        turns = [[label] for label in order if label not in together] + [together]
    for labels in turns:
        begun = time.monotonic()
        for label in labels:
            with contextlib.suppress(BrokenPipeError):  # told below
                pipes[label].send("go")
        for label in labels:
            try:
                answer = pipes[label].recv()
            except EOFError:
                answer = {"error": "its process ended without a word"}
            if "error" in answer:
                print(f"{label} failed and is left out:\n{answer['error']}", file=sys.stderr)
                del pipes[label], rounds_by_label[label]
            elif number > 0:
                rounds_by_label[label].append(answer)
            else:
                print(
                    f"{label} is ready after {time.monotonic() - begun:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )


def spread(values: list[float], digits: int) -> str:
    """Median (min … max)."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} … {max(values):,.{digits}f})"


def report(
    rounds_by_label: dict[str, list[dict[str, float]]], images: int
) -> tuple[list[str], dict[str, Any]]:
    """Lines to print, and the same numbers by contender. `images` per round."""
    lines = [
        f"{'contender':36} {'parameters':>11} {'images/s: median (min … max)':>32} {'peak MiB':>9}"
    ]
    contenders: dict[str, Any] = {}
    for label, rounds in rounds_by_label.items():
        rates = [images / entry["seconds"] for entry in rounds]
        peak, parameters = max(entry["peak_mib"] for entry in rounds), int(rounds[0]["parameters"])
        lines.append(f"{label:36} {parameters:11,} {spread(rates, 1):>32} {peak:9,.0f}")
        contenders[label] = {
            "parameters": parameters, "samples_per_s": rates, "cpu_s": [entry["cpu_s"] for entry in rounds],
            "peak_mib": peak,
        }  # fmt: skip
    ratios: dict[str, Any] = {}
    for mine in [label for label in rounds_by_label if label.startswith("ours")]:
        lines += ["", f"{mine + ' is … times as fast as':36} {'wall clock':>24} {'CPU time':>24}"]
        for peer in [label for label in rounds_by_label if label != mine]:
            pairs = list(zip(rounds_by_label[mine], rounds_by_label[peer], strict=True))
            wall, cpu = (
                [theirs[key] / ours[key] for ours, theirs in pairs] for key in ("seconds", "cpu_s")
            )
            lines.append(f"{peer:36} {spread(wall, 2):>24} {spread(cpu, 2):>24}")
            ratios[f"{mine} / {peer}"] = {"wall": wall, "cpu": cpu}
    return lines, {"contenders": contenders, "ratios": ratios}


def configuration(path: Path, words: list[str]) -> Systems:
    """A workload, a configuration file, or the baseline of a search file."""
    if path.is_file() and "budget" in cfg.read_yaml(path):
        base = search_space.load(path).baseline
        return cfg.override(base, cfg.parse_overrides(words, base.schema), where="command line")
    return cfg.named(path, words)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or other words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="knob=value", help="changes to the configuration"
    )
    parser.add_argument(
        "--config", type=Path, default=Path("digits"),
        help="workload, configuration file, or a search file for its baseline (default: digits)",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, help="images per step (default: the configuration's)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default: 5)")
    parser.add_argument(
        "--steps", type=int, default=20, help="steps, or batches sampled, per round (default: 20)"
    )
    parser.add_argument(
        "--sampling", action="store_true", help="DDIM with evaluation.steps instead of training"
    )
    parser.add_argument(
        "--tuned",
        action=argparse.BooleanOptionalAction,
        help="tuned contenders too (default: on a GPU)",
    )
    parser.add_argument(
        "--peers", nargs="+", choices=PACKAGES, default=PACKAGES, help="only these (default: both)"
    )
    parser.add_argument("--out", type=Path, help="file for the numbers with hardware and versions")
    args: argparse.Namespace = parser.parse_args(words)
    if not 1 <= args.rounds <= 99 or args.steps < 1:
        parser.error("--rounds goes from 1 to 99, --steps from 1")
    return args


def main() -> int:
    """See the module's docstring."""
    args = arguments()
    batch = [] if args.batch is None else [f"loader.batch_size={args.batch}"]
    config = configuration(args.config, [*args.words, *batch])
    device = alone().device
    commands.check(Path("does-not-exist"), config)  # refuses what diffusers cannot represent

    jobs = []
    compiles = device.type == "cuda" if args.tuned is None else args.tuned
    for tuned in (False, True) if compiles else (False,):
        knobs = (
            TUNED | ({"precision.amp": "bf16"} if device.type == "cuda" else {}) if tuned else {}
        )
        knobs = cfg.flat(cfg.override(config, knobs))
        rest = knobs, args.sampling, args.steps, args.rounds
        jobs.append(Job("ours", tuned, tuned, *rest))
        switched = knobs["memory.channels_last"] or knobs["precision.amp"] == "bf16"
        for package in args.peers:
            if _installed(package):
                jobs += [
                    Job(package, tuned, same, *rest)
                    for same in ([True] if tuned else [False, True][: 1 + switched])
                ]
            elif not tuned:
                print(
                    f"{package} is left out; to install it: uv pip install {package}",
                    file=sys.stderr,
                )
    rounds_by_label = run(jobs)
    if not rounds_by_label:
        return cli.FAILED
    load = os.getloadavg()[0]
    lines, numbers = report(rounds_by_label, args.steps * config.loader.batch_size)
    what = f"DDIM sampling, {config.evaluation.steps} steps" if args.sampling else "training step"
    name = torch.cuda.get_device_name() if device.type == "cuda" else environment.describe()["cpu"]
    packages = ("torch", *PACKAGES, "ema-pytorch")
    versions = {
        package: importlib.metadata.version(package) for package in packages if _installed(package)
    }
    print(
        f"{what}, batch {config.loader.batch_size}, images {config.data.channels} × {config.data.image_size}², "
        f"{args.rounds} rounds of {args.steps}\n"
        f"{name}, {torch.get_num_threads()} threads, load average {load:.1f}; "
        + ", ".join(f"{package} {version}" for package, version in versions.items())
        + "\n"
    )
    print("\n".join(lines))
    if args.out is not None:
        content = {
            "command": sys.argv,
            **numbers,
            "config": cfg.flat(config),
            "load_average": load,
            "device": name,
        }
        content |= {"torch_threads": torch.get_num_threads(), "versions": versions}
        args.out.write_text(json.dumps(content | {"environment": environment.describe()}, indent=1))
    return cli.OK


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
