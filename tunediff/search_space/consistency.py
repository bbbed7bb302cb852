"""Refuse search files whose keys contradict each other."""

from __future__ import annotations

import math

from tunediff import config as cfg
from tunediff.config import Lines, Metric
from tunediff.config.knobs import refuse
from tunediff.search_space.model import SECONDS, SEED_OFFSET, SearchSpace
from tunediff.search_space.sections import SearchFile


def check_together(
    file: SearchFile, kind: str, metric: Metric, cost: str | None, source: str
) -> None:
    """Raise `ConfigError` for keys that contradict each other."""
    drawn, stops, seeds = kind == "search", file.early_stopping != "none", file.seeds is not None
    listed, first, warm = not drawn, file.first is not None, file.warm_start is not None
    other_sampler = file.sampler != "TPESampler"
    stopping, nothing = f"early_stopping: {file.early_stopping!r}", f"{kind}: draws nothing"
    best = "a trial that is bad in one may be the best in the other; allowed: none"
    unknown = "nothing is known before it is met; allowed: none"
    belongs = "belongs to grid:, trials: and ladder:, which repeat each of their points; search:"
    for broken, why in (
        (listed and first, f"first: belongs to search:; {kind}: runs its points in order"),
        (listed and other_sampler, f"sampler: {file.sampler!r} is not allowed; {nothing}"),
        (
            listed and warm,
            f"warm_start: {file.warm_start!r} is not allowed; it belongs to search:; {nothing}",
        ),
        (
            stops and metric == SECONDS,
            f"{stopping} is not allowed with a target, of which {unknown}",
        ),
        (stops and cost is not None, f"{stopping} is not allowed with two objectives: {best}"),
        (drawn and seeds, f"seeds: {belongs} does not"),
        (stops and seeds, f"seeds: {stopping} is not allowed: only whole runs can be compared"),
        (
            seeds and file.confirm is not None,
            "confirm: belongs to searches of one seed; seeds: repeats every point already",
        ),
    ):
        refuse(broken, f"{source}: {why}")


def check_space(space: SearchSpace, limits: Lines) -> None:
    """Raise `ConfigError` for sections that do not fit together. `limits`: what `budget:` says."""
    _check_shared(space)
    _check_final(space.final, f"{space.source}: final", space)
    if space.confirm is not None:
        _check_final(space.confirm.final, f"{space.source}: confirm: final", space)
    repeats = space.workload.unseeded and (space.confirm is not None or space.seeds > 1)
    key = "seeds" if space.confirm is None else "confirm"
    why = "without a seed every run is one, repeated: the noise of a training is not known"
    refuse(repeats, f"{space.source}: {key}: is not allowed with unseeded: true: {why}")
    _check_limits(space, limits, f"{space.source}: budget")
    _check_seeds(space)


def _check_seeds(space: SearchSpace) -> None:
    """Raise `ConfigError` unless the seeds of further runs of a configuration are allowed too."""
    last = {"noise": space.noise - 1}
    if space.confirm is not None:
        last["confirm"] = SEED_OFFSET + space.confirm.seeds - 1
    for key, distance in last.items():
        seed = space.baseline.seed + distance
        cfg.override(space.baseline, {"seed": seed}, where=f"{space.source}: {key}", check=False)


def _check_limits(space: SearchSpace, content: Lines, where: str) -> None:
    """Raise `ConfigError` for limits within which no trial could end."""
    limits, per_trial = space.budget, f"per_trial = {content.get('per_trial')!r}"
    per_trial += f", {space.longest_s:g} s for a trial" if limits.unit == "device" else ""
    deadline, total = limits.deadline_s or math.inf, limits.total_s or math.inf
    refuse(
        deadline <= space.longest_s,
        f"{where}: deadline: {content.get('deadline')!r} is not above {per_trial}",
    )
    refuse(
        total < space.longest_s,
        f"{where}: total: {content.get('total')!r} is less than {per_trial}",
    )


def _check_shared(space: SearchSpace) -> None:
    """Raise `ConfigError` for seconds of a GPU that several trials share."""
    shared, device = space.trials_per_gpu > 1, space.budget.unit == "device"
    where = f"{space.source}: trials_per_gpu: {space.trials_per_gpu} is not allowed"
    priced = space.budget.price_per_device_hour is not None
    refuse(
        shared and (device or priced),
        f"{where} where devices are counted: budget: unit, price_per_device_hour",
    )
    counted = space.cost in ("device_s", "price") or not space.evaluates
    refuse(
        shared and counted,
        f"{where} for objective: {space.cost or space.metric}: it would be that of several",
    )


def _check_final(knobs: Lines, where: str, space: SearchSpace) -> None:
    """Raise `ConfigError` unless `final:` sets knobs of `evaluation.` outside the protocol only."""
    judged = f"it belongs to searches by {space.workload.objective.name}"
    refuse(
        knobs and not space.evaluates,
        f"{where}: {space.metric} is no judgement of a model; {judged}",
    )
    evaluation = [
        knob for name, knob in space.schema.knobs.items() if name.startswith("evaluation.")
    ]
    allowed = [knob.name for knob in evaluation if not knob.protocol]
    for name in knobs:
        refuse(
            name not in allowed,
            f"{where}: {name}: is not allowed; allowed: {', '.join(allowed) or 'no knob'}",
        )
    cfg.override(space.baseline, knobs, where=where)
