"""Run a workload again: resumed, judged by its saved weights, and with another seed."""

from __future__ import annotations

from pathlib import Path

from tunediff import config as cfg
from tunediff.config import code
from tunediff.config.code import WorkloadError
from tunediff.config.systems import Systems, eager
from tunediff.core.clock import Budget
from tunediff.distributed import World
from tunediff.training import memory, weights
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer, StopAfterFirstStep
from tunediff.training.recorded_runs import (
    Record,
    RecordedJudge,
    Rejudged,
    RunRecord,
    differing,
    digest,
)
from tunediff.training.training_run import TrainingRun
from tunediff.training.trial import run

MOST_S = 240.0
"""Most seconds for the runs of `warnings`, by the first run; longer ones are left out."""
SEED_OFFSET = 100_003
"""From the first seed to the second; one that nobody writes into a file of his own."""
UNCHECKED = "whether a resume and tunediff.evaluate judge the same model was not checked: it"


def warnings(
    config: Systems, world: World, folder: Path, budget: Budget, first: RunRecord, extra_s: float
) -> list[str]:
    """Run a training from its checkpoint, weights and another seed; return the warnings.

    `folder`: holds checkpoint and weights of the first run, of `budget`. `extra_s`: what all of it
    is expected to take. Raises `WorkloadError` where the model is not judged as it was.
    """
    if world.any(extra_s > MOST_S):
        return [f"{UNCHECKED} takes about {extra_s:.0f} s"]
    # the first run has shown that processes work
    config = cfg.override(config, {"loader.workers": 0}, check=False)
    try:
        random_keys, counters = _resumed(config, world, folder, budget, first)
        memory.reset(world.device)
        _evaluated(config, world, folder, first, random_keys | counters)
        memory.reset(world.device)
        warnings = _of_seeds(config, world, budget, first)
        if first.makes_data:
            memory.reset(world.device)
            warnings += _of_own_data(config, world, folder, budget)
        if counters:
            names = ", ".join(sorted(counters))
            warnings.append(
                f"after a resume the framework's {names} begin anew or differ otherwise"
            )
        if (metric := cfg.of(config).objective.name) in random_keys:
            again = (
                "differs when the same model is judged again: its randomness is part of every"
                " comparison"
            )
            warnings.insert(0, f'evaluate_with: "{metric}" {again}')
        return warnings
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, WorkloadError) or not memory.is_oom(error):
            raise
        return [f"{UNCHECKED} needs more memory than there is"]


def _resumed(
    config: Systems, world: World, folder: Path, budget: Budget, first: RunRecord
) -> tuple[set[str], set[str]]:
    """Judge the model that a resumed training has.

    Returns the findings that differ from one evaluation to the next of one model, and other
    findings of a framework that begin anew.
    """
    program = Rejudged(first)
    engine = Engine(config, budget, world, Observer(), program, folder=folder)
    _run_again(engine, "it goes on from its checkpoint")
    if engine.restart_reason:
        raise engine.mistake(
            f"a resumed training starts from the beginning: {engine.restart_reason}"
        )
    hint = (
        "trial.keep(name=…) takes all that changes while it trains, and its load_state_dict"
        " restores it"
    )
    # A framework's own counters may begin anew; what decides must not.
    counters = set[str]()
    if engine.adopted:
        keys = differing(first.findings, program.record.findings, world) - program.random_keys
        counters = keys - {cfg.of(config).objective.name}
    _compare(engine, first, program.record, program.random_keys | counters, "after a resume", hint)
    return program.random_keys, counters


def _evaluated(
    config: Systems, world: World, folder: Path, first: RunRecord, random_keys: set[str]
) -> None:
    """Judge the weights that were saved as `tunediff.evaluate` does."""
    program = RecordedJudge(weights.read(folder / weights.NAME))
    engine = Engine(eager(config), Budget(samples=1), world, Observer(), program)
    _run_again(engine, "its saved weights are judged")
    saved = (
        "trial.export_model(model) names the model that is judged and saved, such as averaged"
        " weights"
    )
    learned, judged = program.loaded - program.fresh, set(program.record.called)
    # Weights that an evaluation swaps in are untrained here, and perhaps in the first run.
    if learned and not judged & learned and judged & (program.fresh - program.loaded):
        raise engine.mistake(
            f"evaluate_with: judges other weights than those that are saved; {saved}"
        )
    _compare(engine, first, program.record, random_keys, "than those that are saved", saved)


def _run_again(engine: Engine, when: str) -> None:
    """Run a training that has run before. Raises `WorkloadError` where it fails this time."""
    try:
        run(engine)
    except Exception as error:
        if memory.is_oom(error):
            raise
        raise engine.mistake(
            f"train(trial) works once and fails when {when}:"
            f" {code.described(error)}\n{code.trace(error)}"
        ) from error


def _compare(
    run: TrainingRun,
    first: RunRecord,
    second: RunRecord,
    random_keys: set[str],
    when: str,
    hint: str,
) -> None:
    """Raise `WorkloadError` with what differs between two evaluations of one model."""
    if first.called != second.called:
        raise run.mistake(f"evaluate_with: judges other weights {when}; {hint}")
    if keys := sorted(differing(first.findings, second.findings, run.world) - random_keys):
        a, b = (run.findings.get(keys[0], "missing") for run in (first, second))
        where = when if when.startswith("after") else "of the saved weights"
        raise run.mistake(
            f'evaluate_with: "{keys[0]}" is {a} in the training and {b} {where}; {hint}'
        )


def _of_seeds(config: Systems, world: World, budget: Budget, first: RunRecord) -> list[str]:
    """Train with another seed; name what stays equal."""
    other = cfg.override(config, {"seed": config.seed + SEED_OFFSET}, check=False)
    program = Record()
    engine = Engine(other, budget, world, Observer(), program, evaluates=False)
    _run_again(engine, "it has another seed")
    warnings, alike = [], "so runs on new seeds are more alike than they should be"
    if engine.seeded and first.initial == program.record.initial:
        same = "the initial weights are the same for two values of the knob seed"
        warnings.append(f"{same}, {alike} unless they are read from a file")
    if len(set(first.batches)) > 1 and first.batches == program.record.batches:
        warnings.append(
            f"the first batches are the same for two values of the knob seed, {alike}: does the"
            " loader shuffle?"
        )
    return warnings


def _of_own_data(config: Systems, world: World, folder: Path, budget: Budget) -> list[str]:
    """Compare a training that was stopped after its first step with one that was not, where the
    loop makes its data itself: environments and buffers may be nowhere kept."""
    place = folder / "interrupted"
    outcomes = []
    for observer, where in ((Observer(), None), (StopAfterFirstStep(), place), (Observer(), place)):
        engine = Engine(config, budget, world, observer, Record(), folder=where)
        _run_again(engine, "it is interrupted after a step and goes on")
        outcomes.append(engine.result.state_dict() if engine.result is not None else {})
    plain, _, resumed = ({name: digest(one) for name, one in kept.items()} for kept in outcomes)
    if not world.any(plain != resumed):
        return []
    return [
        "a resumed training does not go on as if it had not been interrupted: what train(trial)"
        " changes beside trial.keep(…), such as environments and buffers, begins anew"
    ]
