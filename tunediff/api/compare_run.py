"""Run the pairs of a comparison."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

from tunediff.analysis import sides as side_files
from tunediff.analysis.comparison import Comparison
from tunediff.api import command_setup, compare_folder, compare_setup
from tunediff.api.command_options import CommandCompareOptions
from tunediff.api.compare_lines import RunLines
from tunediff.api.compare_setup import CompareOptions, Say
from tunediff.api.options import check_only_reproduces
from tunediff.command import worktrees
from tunediff.command.trial import CommandBackend
from tunediff.core import text
from tunediff.core.journal import repeat_lost
from tunediff.core.listeners import Activity, Listeners
from tunediff.core.lock import alone
from tunediff.core.progress import EventLines, log_exceptions
from tunediff.core.refusals import writing
from tunediff.judge import frozen_code, ledger, locked_judge, proof, verification
from tunediff.ray_backend import connection
from tunediff.report import pair_summary, pair_words, plan
from tunediff.report.heartbeat import Heartbeat
from tunediff.tuning import at_once, experiment, resources, rounds, sessions
from tunediff.tuning.backend import Backend
from tunediff.tuning.trial_spec import TrialSpec

AnyOptions = CompareOptions | CommandCompareOptions


def run(options: AnyOptions, lines: EventLines) -> Path:
    """Run a comparison, new or resumed, until it is decided; write its report; return its folder.

    Raises `ConfigError`, and `StoppedError` or `KeyboardInterrupt` that say how to resume it.
    """
    new = options.resume is None
    if options.out is not None:
        proof.check(options.out)
    folder = _create(options, lines) if new else compare_setup.resume(options)
    if new:
        options.lock_judges(folder)
        ledger.begin(folder, options)
    with (
        experiment.resumable("compare", folder, options),
        experiment.start_of(folder, new=new),
    ):
        command_time, listeners = sessions.CommandTime(folder, lines.begun), Listeners()
        try:
            with listeners.opened(_activity(folder, options), lines.say), alone(folder):
                repeat_lost(folder)
                if not Comparison.read(folder).ended:
                    command_time.charge()
                _run_shown(folder, options, lines, listeners)
        finally:
            command_time.charge()
        ledger.end(folder)
        locked_judge.show_holdout(folder)
        if options.out is not None:
            with writing("--out", options.out):
                proof.write(folder, options.out)
    return folder


def _activity(folder: Path, options: AnyOptions) -> Activity:
    """Return what listeners need to know of a comparison."""
    comparison = Comparison.read(folder)
    metric = comparison.metric
    settings = {
        "objective": metric,
        "budget_s": comparison.experiment.limit.budget or 0.0,
        **dict(zip(side_files.SIDES, comparison.names, strict=True)),
    }
    track = [] if options.track is None else ["--track", options.track]
    resume = text.command("compare", "--resume", folder.name, *track, storage=folder.parent)
    result = functools.partial(pair_summary.as_json, folder)
    return Activity("compare", folder, resume, metric, settings, options.track, result)


def _create(options: AnyOptions, lines: EventLines) -> Path:
    """Check a new comparison, print its cost, make its folder. Raises `ConfigError`."""
    if options.reproduce is not None:
        check_only_reproduces(options)
        storage, name = Path(options.storage), options.name
        return verification.reproduce(options.reproduce, storage, name, lines.say)
    if isinstance(options, CommandCompareOptions):
        asked = command_setup.prepare(options)
        for line in plan.lines(command_setup.planned(asked)) if not lines.quiet else ():
            lines.say(line)
        if options.check:
            command_setup.try_sides(asked, lines.say)
        command_setup.create(asked)
        return asked.folder
    with compare_setup.prepare(options, lines.say) as request:
        if not lines.quiet:
            for line in plan.lines(compare_setup.planned(request, options, lines.say)):
                lines.say(line)
        compare_folder.create(request)
    return request.folder


def _run_shown(folder: Path, options: AnyOptions, lines: EventLines, listeners: Listeners) -> None:
    """Run pairs until it is decided, and say how far it is."""
    heart = Heartbeat(folder, lines.say)  # reads what has ended, once

    def say(message: str) -> None:
        lines.say(message)
        heart.beat()

    with contextlib.nullcontext() if lines.quiet else heart:
        _run(Comparison.read(folder), options, say, listeners)


def _run(comparison: Comparison, options: AnyOptions, say: Say, listeners: Listeners) -> None:
    """Run pairs of trainings on workers of this machine or of a cluster, or of commands, which need
    no workers."""
    if comparison.ended:
        return
    folder = comparison.folder
    kind = type(options) if isinstance(options, CommandCompareOptions) else CompareOptions
    with (
        sessions.noted(folder, options.command_line("compare", kind)),
        _backend(comparison, options, say) as backend,
        listeners.with_listeners(
            RunLines(folder, say, backend.show), sessions.SessionNotes(folder)
        ),
    ):
        backend.say_through(say)
        rounds.run(folder, _rounds(comparison, say), backend, listeners)
    if isinstance(options, CommandCompareOptions):
        for name in side_files.SIDES:  # the revisions stay in its file
            worktrees.remove(folder / name / worktrees.SOURCE)


@contextlib.contextmanager
def _backend(comparison: Comparison, options: AnyOptions, say: Say) -> Iterator[Backend]:
    """Yield what runs the sides of a comparison, and say what they may take."""
    run_devices = at_once.as_it_began(comparison.at_once)
    if isinstance(options, CommandCompareOptions):
        _say_budget(comparison, say)
        yield CommandBackend(comparison.folder, comparison.configs, run_devices)
        return

    needs = compare_setup.needs(comparison.configs)
    strategies = [one.parallel.strategy for one in comparison.configs]

    def divided(*machines: resources.Machine) -> resources.ResourcePartition:
        return resources.divided(machines, *needs, strategies=strategies)

    def greet(dashboard: str | None) -> None:
        if dashboard is not None:
            say(dashboard)
        _say_budget(comparison, say)

    share = at_once.divided_among(run_devices, divided)
    with connection.one_by_one(
        comparison.folder, share, options.address, greet, comparison.configs,
        run_devices=run_devices,
    ) as backend:  # fmt: skip
        yield backend


def _say_budget(comparison: Comparison, say: Say) -> None:
    code = side_files.content(comparison.folder, side_files.CODE)
    if code.get("drawn"):
        digests = [code[side]["digest"][:12] for side in side_files.SIDES]
        say(f"seeds from {code['first_seed']} on, by the digests of A and B: {', '.join(digests)}")
        if left := frozen_code.not_counted(code):
            say(left)
    runs = f"at most {comparison.rules.max_rounds} pairs × 2 × {side_files.run_length(comparison)}"
    if (count := comparison.at_once) > 1:
        runs += f", {count} runs at the same time"
    say(f"{runs}; results {comparison.folder}")


def _rounds(comparison: Comparison, say: Say) -> rounds.Rounds:
    """Return the pairs of a comparison, which say how far it is."""
    folder, experiment, last_words = comparison.folder, comparison.experiment, [""]

    def tell(now: Comparison) -> None:
        # a resumed one passes over the pairs that it has
        if now.rounds and (words := pair_words.so_far(now)) != last_words[-1]:
            last_words.append(words)
            say(words)

    def over() -> bool:
        now = Comparison.read(folder)
        log_exceptions("how far it is", tell, now)
        return now.ended

    make = functools.partial(
        TrialSpec.of,
        folder.absolute(),
        role="side",
        keeps=experiment.judge is not None or experiment.holdout is not None,
        budget=side_files.limits(comparison),
        metric=comparison.objective,
        mode=comparison.mode,
    )
    sides = zip(comparison.configs, side_files.SIDES, strict=True)
    candidates = [(config, {"side": side}) for config, side in sides]
    settings = candidates, comparison.rules.max_rounds, make, over, comparison.at_once
    if experiment.judge is None:
        return rounds.Rounds(*settings)
    judged = locked_judge.JudgedRounds(*settings)
    judged.comparison = comparison
    return judged
