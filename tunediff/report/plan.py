"""What a search would run and cost, before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tunediff import cli, space
from tunediff.report.console import skipped
from tunediff.results import evaluating
from tunediff.space import SearchSpace
from tunediff.tuning import resources


def lines(wanted: SearchSpace, folder: Path) -> list[str]:
    """What a search would run and cost."""
    machine = resources.local()
    share = resources.share(wanted, machine)
    trials, per_trial = wanted.budget.trials, wanted.budget.per_trial_s
    train_h = trials * per_trial / 3600
    parameters = _parameters(wanted)
    kept, working = 4 * parameters * trials / 2**20, 20 * parameters * share.slots / 2**20
    above = next(path for path in [folder, *folder.parents] if path.exists())
    free = shutil.disk_usage(above).free / 2**20
    repeats = f", {wanted.seeds} seeds each" if wanted.seeds > 1 else ""
    repeats += f", {wanted.noise} of them the baseline, for the noise" if wanted.noise > 1 else ""
    points = "unlimited" if (n := space.size(wanted)) == float("inf") else f"{n:.0f}"
    again = " and ".join(f"{runs} × {cli.seconds(each_s)}" for runs, each_s in wanted.again)
    said = [
        f"search: {wanted.source} ({len(wanted.dimensions)} knobs, {points} points)",
        f"trials: {trials} × {cli.seconds(per_trial)} training, {share.slots} at once{repeats}",
        f"training_hours: {train_h:.2f} (evaluation, start-up and compilation come on top)",
        *([f"confirming: at most {again} training; it ends when it is decided"] if again else []),
        *(_evaluation(wanted) if wanted.evaluates else []),
        f"gpu_hours: {train_h * max(resources.world_sizes(wanted)) if share.gpu else 0:.2f}",
        f"total_limit: {cli.seconds(wanted.budget.total_s) if wanted.budget.total_s else 'none'}",
        f"machine: {machine}; world sizes {', '.join(map(str, resources.world_sizes(wanted)))} fit",
        f"parameters: {f'{parameters:,}' if parameters else 'unknown (the workload has no network(knobs))'}",
        f"disk_mib: {kept + working:.0f} of {free:.0f} free ({'fits' if kept + working < free else 'DOES NOT FIT'})",
    ]
    said += [f"  {dimension.name}: {dimension}" for dimension in wanted.dimensions]
    said += [f"  first {i}: {cli.knobs(wanted.changed(point))}" for i, point in enumerate(wanted.candidates)]
    return said + skipped(wanted)


def values(wanted: SearchSpace, folder: Path) -> dict[str, Any]:
    """`lines` by name."""
    named = [line.partition(": ") for line in lines(wanted, folder)]
    return {name.strip(): said for name, _, said in named}


def _evaluation(wanted: SearchSpace) -> list[str]:
    """What judging takes, by the rate of the baseline's network on this machine."""
    from tunediff.distributed import alone
    from tunediff.training import judging

    pass_s = judging.pass_s(wanted.baseline, alone())
    cost = evaluating.cost(wanted, pass_s)
    if cost.evaluation_s is None:
        why = "the workload has no evaluation_work(knobs) and evaluation_pass(knobs, device), or its data are not here"
        return [f"evaluation_hours: unknown ({why})"] + ["final_evaluation: unknown"] * bool(cost.finals)
    hours = cost.evaluations * cost.evaluation_s / 3600
    measured = f"{cost.evaluations} × {cli.seconds(cost.evaluation_s)}: the baseline's network, timed on this machine"
    said = [f"evaluation_hours: {hours:.2f} ({measured})"]
    for of, runs, each_s in cost.finals:
        assert each_s is not None
        said.append(f"final_evaluation: {cli.seconds(each_s)} per {of}, {runs * each_s / 3600:.2f} hours in all")
    return said


def _parameters(wanted: SearchSpace) -> int:
    """Of the baseline's model; 0 where its workload does not say how to build it."""
    import torch

    if (network := wanted.workload.offers("network")) is None:
        return 0
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in network(wanted.baseline.knobs).parameters())
