"""What it costs that each run is a process: `python benchmarks/run_costs.py`, about 4 minutes, on a quiet machine.

Prints the seconds from the command to the first training step of `tunediff compare digits`, from the end of a run to
the next one's first step, images per second in a run, in the same engine in a fresh process and in a loop of plain
PyTorch, and the memory of eight runs at once, shared (PSS) and as if each had its own (RSS).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tunediff import config as cfg
from tunediff.core import machine
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget
from tunediff.core.journal import Journal
from tunediff.core.progress import DOING
from tunediff.core.template import TemplateError
from tunediff.tuning.templates import Templates
from tunediff.tuning.trial_spec import TrialSpec

BUDGET_S, TURNS, SLOTS, EVERY_S = 6, 3, 8, 0.01


# ---- seconds of a comparison
def of_comparison(storage: Path) -> dict[str, Any]:
    """Run three pairs; seconds to the first training step, and between runs."""
    sides = ["digits", "evaluation.points=1", "digits", "evaluation.points=1", "optimizer.lr=3e-3"]
    words = [*sides, "--budget", "2s", "--pairs", "3", "--fixed", "--name", "c"]
    command = [
        sys.executable,
        "-m",
        "tunediff.compare",
        *words,
        "--storage",
        str(storage),
        "--quiet",
    ]
    typed, first = time.time(), dict[str, float]()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        for file in storage.glob(f"c/trials/*/{DOING}"):
            with contextlib.suppress(OSError, ValueError):
                doing = json.loads(file.read_text())
                if doing["part"] == "train":
                    first.setdefault(file.parent.name, doing["since"])
        time.sleep(EVERY_S)
    trials = {trial.name: trial for trial in record.read_trials(storage / "c")}
    ends = sorted(trial.ended for trial in trials.values())
    gaps = [begin - end for end, begin in zip(ends, sorted(first.values())[1:], strict=False)]
    return {
        "command to first step, s": min(first.values()) - typed,
        "end of a run to the next one's first step, s (median)": statistics.median(gaps),
        "the same, s (largest)": max(gaps),
    }


# ---- images per second
def in_a_run(storage: Path, turn: int) -> float:
    """Train by the command; images per second of its training."""
    out = storage / f"train{turn}"
    words = [
        "--config",
        "digits",
        "--budget",
        f"{BUDGET_S}s",
        "--out",
        str(out),
        "evaluation.points=1",
    ]
    subprocess.run(
        [sys.executable, "-m", "tunediff.train", *words], check=True, capture_output=True
    )
    trial = record.read_trial(out)
    assert trial is not None
    return float(trial.points[-1].samples_per_s)


def in_the_engine() -> float:
    """Train in this process."""
    from tunediff.distributed import alone
    from tunediff.training.engine import Engine
    from tunediff.training.observer import Observer
    from tunediff.training.trial import run

    config = cfg.override(cfg.baseline("digits"), {"evaluation.points": 1})
    outcome = run(Engine(config, Budget(BUDGET_S), alone(), Observer(), evaluates=False))
    return float(outcome.points[-1].samples_per_s)


def in_a_bare_loop() -> float:
    """Train the same network in plain PyTorch."""
    import torch
    import torch.nn.functional as F

    from tunediff.data import images
    from tunediff.workloads.diffusion.unet import network

    config = cfg.baseline("digits")
    pixels, net = images.load(config.data).pixels, network(config.knobs)
    average = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = torch.optim.AdamW(net.parameters(), config.optimizer.lr)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    batch, steps = config.loader.batch_size, 0
    for warm_up in (True, False):
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < (1.0 if warm_up else BUDGET_S):
            x0 = pixels[torch.randint(len(pixels), (batch,))].float() / 127.5 - 1
            t, noise = torch.randint(1000, (batch,)), torch.randn_like(x0)
            share = kept[t].view(-1, 1, 1, 1)
            x_t = share.sqrt() * x0 + (1 - share).sqrt() * noise
            loss = F.mse_loss(net(x_t, t), noise)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            torch._foreach_lerp_(average, [one.detach() for one in net.parameters()], 1e-3)
            steps += 1
    return batch * steps / (time.perf_counter() - began)


def of_speed(storage: Path) -> dict[str, Any]:
    """Images per second of the three, in turns."""
    found: dict[str, list[float]] = {"run": [], "engine": [], "bare": []}
    for turn in range(TURNS):
        found["run"].append(in_a_run(storage, turn))
        for part in ("engine", "bare"):
            command = [sys.executable, __file__, "--part", part]
            found[part].append(
                float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            )
    names = {"run": "images/s in a run", "engine": "in the engine alone", "bare": "in a bare loop"}
    return {names[part]: statistics.median(values) for part, values in found.items()}


# ---- memory
def of_memory(storage: Path) -> dict[str, Any]:
    """Train on eight slots at once, which share a template; MiB of all their processes."""
    config = cfg.override(cfg.baseline("digits"), {"evaluation.points": 1})
    jobs = []
    for slot in range(SLOTS):
        folder = storage / f"slot{slot}"
        Journal(folder).start(*cfg.identity(config), {}, 600.0)
        job = TrialSpec(
            name=folder.name, folder=folder, workload="diffusion", points=1,
            budget=Budget(600.0), deadline_s=600.0, metric="frechet", mode="min", evaluates=False,
        )  # fmt: skip
        jobs.append(job)
    with open(os.devnull, "wb") as output, contextlib.ExitStack() as stack:
        for job in jobs:
            templates = stack.enter_context(Templates(output, f"memory of {os.getpid()}"))
            threading.Thread(target=train, args=(templates, job), daemon=True).start()
        while len(list(storage.glob(f"slot*/{DOING}"))) < SLOTS:
            time.sleep(0.5)
        time.sleep(20.0)
        pids = [
            event["pid"]
            for job in jobs
            for event in record.events(job.folder)
            if event["event"] == "worker"
        ]
        template = psutil.Process(pids[0]).ppid()
        memory = [psutil.Process(pid).memory_full_info() for pid in (*pids, template)]
    pss, rss = (sum(getattr(one, name) for one in memory) / 2**20 for name in ("pss", "rss"))
    return {f"MiB of {len(pids)} runs and their template, PSS": pss, "the same, RSS": rss}


def train(templates: Templates, job: TrialSpec) -> None:
    """Train until the template is closed."""
    with contextlib.suppress(TemplateError, OSError):
        templates.train(job, {}, lambda run, event: None)


def main() -> int:
    """See the module's description."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--part", choices=("engine", "bare"), help="measure this alone, in this process"
    )
    args = parser.parse_args()
    machine.limit_spinning()  # as the commands do, before torch is imported
    if args.part is not None:
        print({"engine": in_the_engine, "bare": in_a_bare_loop}[args.part]())
        return 0
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        for measure in (of_comparison, of_speed, of_memory):
            for what, value in measure(Path(folder)).items():
                print(
                    f"{what}: {value:,.2f}" if value < 100 else f"{what}: {value:,.0f}", flush=True
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
