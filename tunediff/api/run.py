"""Run the experiment in a folder: a search with the runs that confirm it, or a comparison."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff import analysis
from tunediff import config as cfg
from tunediff.analysis import Results, confirming_runs, journals
from tunediff.analysis import sides as side_files
from tunediff.analysis.comparison import Comparison
from tunediff.api import compare_setup, search_setup
from tunediff.api.compare_setup import Say
from tunediff.api.options import CompareOptions, JobOptions, SearchOptions
from tunediff.api.search_setup import SearchRequest
from tunediff.command import worktrees
from tunediff.command.trial import CommandBackend
from tunediff.core import machine, text
from tunediff.core import trial_record as record
from tunediff.core.journal import repeat_lost
from tunediff.core.listeners import Activity, Listener, Listeners
from tunediff.core.lock import exclusive_lock
from tunediff.core.options import writing
from tunediff.core.outcomes import Status
from tunediff.core.progress import EventLines, log_exceptions
from tunediff.core.text import pluralize
from tunediff.experiment.model import Experiment
from tunediff.proof import frozen_code, ledger, locked_judge, proof
from tunediff.ray_backend import connection
from tunediff.report import plan, reading, sentences
from tunediff.report.console import Console, Heartbeat
from tunediff.report.listener import LISTENERS
from tunediff.report.live_table import LiveTable
from tunediff.search_space import SearchSpace
from tunediff.tuning import at_once, confirming, experiment, resources, rounds, sessions
from tunediff.tuning.backend import Backend
from tunediff.tuning.sessions import CommandTime
from tunediff.tuning.templates import Templates
from tunediff.tuning.trial_spec import TrialSpec

Display = Callable[..., Console]
"""Makes the console of the runs in a folder; takes folder, space and `planned` of `Console`."""
Share = Callable[..., resources.ResourcePartition]
"""Divides machines for runs."""
Work = Callable[[Listeners, CommandTime], None]
"""Runs what is left of an experiment."""


def run(
    activity: Activity, options: JobOptions, lines: EventLines, new: bool, work: Work
) -> CommandTime:
    """Run what is left of the experiment of `activity`, alone in its folder.

    Returns what charges it for whatever follows. Raises `ConfigError`, and `StoppedError` or
    `KeyboardInterrupt` that say how to resume it.
    """
    folder = activity.folder
    with (
        experiment.resumable(activity.module, folder, options),
        experiment.removed_if_start_fails(folder, new=new),
    ):
        command_time, listeners = CommandTime(folder, lines.begun), Listeners(*LISTENERS)
        try:
            with listeners.opened(activity, lines.say), exclusive_lock(folder):
                work(listeners, command_time)
                command_time.charge()
        finally:
            command_time.charge()
    return command_time


# ---- a search
def search(
    request: SearchRequest,
    options: SearchOptions,
    lines: EventLines,
    display: Display | None = None,
) -> CommandTime:
    """Make the folder of a new search and run what is not finished, confirming runs included.

    Leaves tables, figures and report.html in the folder. See `run`.
    """
    new, space, planned = request.content is not None, request.space, None
    ray: contextlib.AbstractContextManager[Any] | None = None
    with _templates(request.space, options) as templates, contextlib.ExitStack() as early:
        if new:
            say = functools.partial(lines.aside.say, timed=False)
            known = search_setup.measuring(request, options, say, lines.quiet, templates)
            if known is not None:  # Ray, the template and reading go side by side
                ray = _handed_over(early, early.enter_context(connection.started(None)))
            space, planned = search_setup.create(request, options, say, known)
        shows = display or console(lines)
        activity = search_setup.activity("search", request.folder, space)

        def work(listeners: Listeners, command_time: CommandTime) -> None:
            _search(request.folder, space, options, shows, planned, listeners, command_time,
                    templates, ray)  # fmt: skip

        return run(activity, options, lines, new, work)


@contextlib.contextmanager
def _handed_over(opened: contextlib.ExitStack, context: Any) -> Iterator[Any]:
    """Yield what was opened before, and close it at the end of this block."""
    with opened.pop_all():
        yield context


@contextlib.contextmanager
def _templates(space: SearchSpace, options: SearchOptions) -> Iterator[Templates]:
    """Yield the templates of the trials on this machine, which are prepared from the start on:
    Ray's workers use the same."""
    variables = dict[str, str]()
    if options.address is None:
        here = resources.local()
        place = resources.share(space, here).place([here], 1)
        variables = {machine.OMP: str(place.threads)}  # as Ray sets it for its workers
    shared = uuid.uuid4().hex
    # What a user's file prints while it is imported, its import here has printed
    with open(os.devnull, "wb") as output, Templates(output, shared, variables) as templates:
        yield templates


def console(lines: EventLines) -> Display:
    """Return what shows the progress: a live table in a terminal, a line per event elsewhere."""
    terminal = not (lines.quiet or lines.on_stderr or lines.logged) and sys.stdout.isatty()
    return functools.partial(LiveTable if terminal else Console, lines=lines)


def _search(
    folder: Path, space: SearchSpace, options: SearchOptions, display: Display,
    planned: Mapping[str, Any] | None,
    listeners: Listeners, command_time: CommandTime, templates: Templates,
    ray: contextlib.AbstractContextManager[Any] | None,
) -> None:  # fmt: skip
    share = functools.partial(resources.share, space)
    with contextlib.ExitStack() as stack:
        # Other points that were lost may be drawn again
        repeat_lost(folder, space.candidates)
        searched = confirming.complete(folder, space)
        nothing_left = searched or experiment.out_of_time(folder, space)
        is_here = options.address is None
        left = confirming.pending(folder, space, is_here) if nothing_left else None
        if nothing_left and left is None:
            command_time.dismiss()
            # A session that was killed has no end, and would go on to here
            if not searched and any(one.end for one in journals.sessions(folder)[-1:]):
                sessions.note_time_is_up(folder)
            return
        frozen_code.check_unedited(folder, options.force)
        command_time.charge()
        session = stack.enter_context(contextlib.ExitStack())
        if not searched:
            session.enter_context(
                sessions.recorded_session(folder, options.command_line("search", SearchOptions))
            )
        shown = session.enter_context(display(folder, space, planned=planned))
        opened: contextlib.AbstractContextManager[Backend] = (
            _confirming_backend(folder, left[1], options, share, shown.greet)
            if searched and left is not None
            else connection.workers(
                folder, share, options.address, shown.greet, templates, space.workload.name, ray
            )
        )
        devices = stack.enter_context(contextlib.ExitStack())
        backend = devices.enter_context(opened)
        backend.say_through(shown.say)
        listeners.set_output(shown.say)
        if not searched:
            with listeners.with_listeners(shown):
                connection.search(folder, space, backend, listeners)
        if is_alone := confirming_runs.nothing_to_confirm(analysis.read(folder)):
            shown.say(sentences.NOTHING_TO_CONFIRM)
        session.close()
        if left_out := journals.not_begun(analysis.read(folder), journals.sessions(folder)):
            shown.say(f"not begun: {left_out}")
        if (left := confirming.pending(folder, space, is_here)) is not None:
            if not searched and left[1].at_once > 1:
                devices.close()  # Ray's workers leave them to processes of this command
                again = _confirming_backend(folder, left[1], options, share, lambda dashboard: None)
                backend = devices.enter_context(again)
            _confirm(analysis.read(folder), *left, backend, display, listeners)
        elif (
            not is_alone
            and space.finalists
            and space.budget.total_s is not None
            and not ((test := confirming_runs.read(analysis.read(folder))) and test.ended)
        ):
            shown.say(_no_time(folder, space))


def _confirming_backend(
    folder: Path, space: SearchSpace, options: SearchOptions, share: Share,
    greet: Callable[[str | None], None],
) -> contextlib.AbstractContextManager[Backend]:  # fmt: skip
    """Return what runs the confirming runs of `space` outside of their search, one at a time or on
    all equal devices of this machine."""
    if run_devices := confirming.run_devices(space, options.address):
        share = at_once.divided_among(run_devices, functools.partial(resources.share, space))
    return connection.one_by_one(
        folder, share, options.address, greet, [space.workload.name], run_devices
    )


def _confirm(
    results: Results, place: Path, space: SearchSpace, backend: Backend,
    display: Display, listeners: Listeners,
) -> None:  # fmt: skip
    """Run finalists and baseline on new seeds until it is decided."""
    repeat_lost(place)
    with display(place, space) as shown, listeners.with_listeners(shown):
        listeners.set_output(shown.say)
        log_exceptions("the confirming runs", _announce, shown)
        tell = functools.partial(_tell, shown)
        confirming.run(results, place, space, backend, listeners, tell)
        if not confirming.over(results, place):
            shown.say(_no_time(results.folder, results.space))


def _no_time(folder: Path, space: SearchSpace) -> str:
    total_s = space.budget.total_s or 0.0
    words = ("--resume", folder.name, "--total", text.seconds(2 * total_s))
    return (
        "no further confirming runs: another round would not end within the limit of"
        f" {text.seconds(total_s)}; for more, after trials not begun:"
        f" {text.command('search', *words, storage=folder.parent)}"
    )


def _announce(console: Console) -> None:
    """Say that the confirming runs begin."""
    space = console.space
    many = pluralize(len(space.candidates) // space.seeds - 1, "finalist")
    seeds = f"up to {pluralize(space.seeds, 'new seed')} each, fewer if it is decided before"
    if space.at_once > 1:
        seeds += f"; {space.at_once} runs at the same time"
    console.say(f"confirming: {many} and the baseline, {seeds}")


def _tell(console: Console, confirmed: Comparison) -> None:
    console.say(sentences.progress(reading.of_confirmation(confirmed)))


# ---- a comparison
def compare(options: CompareOptions, lines: EventLines) -> Path:
    """Run a comparison, new or resumed, until it is decided; write its report; return its folder.

    See `run`.
    """
    new = options.resume is None
    if options.out is not None:
        proof.check_out(options.out)
    folder = _create(options, lines) if new else compare_setup.resume(options)
    if new:
        ledger.begin(folder, options)

    def work(listeners: Listeners, command_time: CommandTime) -> None:
        repeat_lost(folder)
        if not Comparison.read(folder).ended:
            command_time.charge()
        heart = Heartbeat(folder, lines.say)  # reads what has ended, once

        def say(message: str) -> None:
            lines.say(message)
            heart.beat()

        with contextlib.nullcontext() if lines.quiet else heart:
            _compare(Comparison.read(folder), options, say, listeners)

    run(_activity(folder, options), options, lines, new, work)
    ledger.end(folder)
    locked_judge.show_holdout(folder)
    if options.out is not None:
        with writing("--out", options.out):
            proof.write(folder, options.out)
    return folder


def _activity(folder: Path, options: CompareOptions) -> Activity:
    """Return what listeners need to know of a comparison."""
    asked = Experiment.read(folder)
    settings = {"objective": asked.objective, "budget_s": asked.limit.budget, **asked.candidates}
    track = [] if options.track is None else ["--track", options.track]
    resume = text.command("compare", "--resume", folder.name, *track, storage=folder.parent)
    result = functools.partial(reading.flat_of, folder)
    return Activity("compare", folder, resume, asked.objective, settings, options.track, result)


def _create(options: CompareOptions, lines: EventLines) -> Path:
    """Check a new comparison, print its cost, make its folder. Raises `ConfigError`."""
    if options.reproduce is not None:
        compare_setup.refuse_other_than_reproduced(options)
        storage, name = Path(options.storage), options.name
        return proof.reproduce(options.reproduce, storage, name, lines.say)
    with compare_setup.prepare(options, lines.say) as new:
        if not lines.quiet:
            for line in plan.lines(compare_setup.planned(new, options, lines.say)):
                lines.say(line)
        if options.check:
            compare_setup.try_commands(new, lines.say)
        compare_setup.create(new, options)
    return new.folder


def _compare(
    comparison: Comparison, options: CompareOptions, say: Say, listeners: Listeners
) -> None:
    """Run pairs of trainings on workers of this machine or of a cluster, or of commands, which need
    no workers."""
    if comparison.ended:
        return
    folder = comparison.folder
    with (
        sessions.recorded_session(folder, options.command_line("compare", CompareOptions)),
        _backend(comparison, options, say) as backend,
        listeners.with_listeners(
            RunLines(folder, say, backend.show), sessions.SessionNotes(folder)
        ),
    ):
        backend.say_through(say)
        rounds.run(folder, _rounds(comparison, say), backend, listeners)
    for name in side_files.SIDES:  # revisions of commands stay in its file
        worktrees.remove(folder / name / worktrees.SOURCE)


@contextlib.contextmanager
def _backend(comparison: Comparison, options: CompareOptions, say: Say) -> Iterator[Backend]:
    """Yield what runs the sides of a comparison, and say what they may take."""
    run_devices = at_once.as_it_began(comparison.at_once)
    if side_files.of_commands(comparison.folder):
        _say_budget(comparison, say)
        commands = CommandBackend(comparison.folder, comparison.configs, run_devices)
        limit = comparison.experiment.limit
        if limit.compile == "shared":
            configs = dict(zip(side_files.SIDES, comparison.configs, strict=True))
            commands.warm_up(configs, limit.budget, say)
        yield commands
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
        comparison.folder, share, options.address, greet,
        [config.schema.workload for config in comparison.configs], run_devices,
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
        if now.rounds and (words := sentences.progress(reading.of_sides(now))) != last_words[-1]:
            last_words.append(words)
            say(words)

    def over() -> bool:
        now = Comparison.read(folder)
        log_exceptions("progress", tell, now)
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
    kind = rounds.Rounds if experiment.judge is None else locked_judge.JudgedRounds
    proposer = kind(candidates, comparison.rules.max_rounds, make, over, comparison.at_once)
    if isinstance(proposer, locked_judge.JudgedRounds):
        proposer.comparison = comparison
    return proposer


def _run_words(drawn: Mapping[str, Any]) -> str:
    """Return how messages name a run: its side and seed."""
    return f"{drawn['side']} seed {drawn['seed']}"


class RunLines(Listener):
    """Shows how runs end, also on Ray's pages."""

    def __init__(
        self, folder: Path, say: Say, show: Callable[[int, str], object] = lambda slot, words: None
    ) -> None:
        """`show`: shows words for a slot, of which a comparison has one."""
        self._folder, self._say, self._show = folder, say, show

    def start(self, trial: str, content: Mapping[str, Any]) -> None:
        self._show(0, _run_words(content))

    def end(self, trial: str, content: Mapping[str, Any]) -> None:
        run, words = record.read_trial(self._folder / "trials" / trial), _run_words(content)
        if run is not None:
            words = "  ".join([words, *filter(None, self._ended(run))])
            self._say(words)
        self._show(0, words)

    @staticmethod
    def _ended(run: record.TrialRecord) -> list[str]:
        """Return how a run ended, in parts of a line."""
        if not run.points or run.status != Status.OK:
            return [run.status or "", run.reason]
        workload, last = cfg.of(cfg.configuration_of(run)), run.points[-1]
        metric = workload.objective
        value = text.number(last.get(metric.name))
        words = [f"{last.get('label', metric.label)} {value} at {last.train_s:.1f} s"]
        if last.train_s:  # a command may print its own seconds behind its value
            words.append(f"{text.number(last.samples / last.train_s)} {workload.unit}/s")
        return words
