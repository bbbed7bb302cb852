"""Run a search and its confirming runs, and read what they have shown."""

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
from tunediff.analysis import confirming_runs, evidence, journals
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.evidence import Evidence
from tunediff.api import search_setup
from tunediff.api.search_setup import SearchOptions, SearchRequest
from tunediff.core import machine, text
from tunediff.core.journal import repeat_lost
from tunediff.core.listeners import Listeners
from tunediff.core.lock import alone
from tunediff.core.progress import EventLines, log_exceptions
from tunediff.core.text import pluralize
from tunediff.judge import frozen_code
from tunediff.ray_backend import connection
from tunediff.report import verdicts
from tunediff.report.console import Console
from tunediff.report.live_table import LiveTable
from tunediff.search_space import SearchSpace
from tunediff.tuning import at_once, confirming, experiment, resources, sessions
from tunediff.tuning.backend import Backend
from tunediff.tuning.sessions import CommandTime
from tunediff.tuning.templates import SharedTemplates, Templates

Display = Callable[..., Console]
"""Makes the console of the runs in a folder; takes folder, space and `planned` of `Console`."""


def run(
    request: SearchRequest,
    options: SearchOptions,
    lines: EventLines,
    display: Display | None = None,
) -> CommandTime:
    """Make the folder of a new search and run what is not finished, confirming runs included.

    Leaves tables, figures and report.html in the folder. Returns what charges the search for
    whatever follows. Raises `ConfigError`, and `StoppedError` or `KeyboardInterrupt` that say how
    to resume it.
    """
    with _templates(request.space, options) as templates:
        return _run_prepared(request, options, lines, display, templates)


@contextlib.contextmanager
def _templates(space: SearchSpace, options: SearchOptions) -> Iterator[Templates]:
    """Yield the templates of the trials on this machine, which are prepared from the start on:
    Ray's workers use the same."""
    variables = dict[str, str]()
    if options.address is None:
        here = resources.local()
        place = resources.share(space, here).place([here], 1)
        variables = {machine.OMP: str(place.threads)}  # as Ray sets it for its workers
    shared = SharedTemplates(uuid.uuid4().hex, list(sys.path), variables)
    # What a user's file prints while it is imported, its import here has printed
    with open(os.devnull, "wb") as output, Templates(output, shared) as templates:
        yield templates


def _run_prepared(
    request: SearchRequest, options: SearchOptions, lines: EventLines, display: Display | None,
    templates: Templates,
) -> CommandTime:  # fmt: skip
    space, planned, new = request.space, None, request.content is not None
    if new:
        say = functools.partial(lines.aside.say, timed=False)
        space, planned = search_setup.create(request, options, say, lines.quiet, templates)

    with (
        experiment.resumable("search", request.folder, options),
        experiment.start_of(request.folder, new),
    ):
        command_time = sessions.CommandTime(request.folder, lines.begun)
        name, storage = request.folder.name, request.folder.parent
        resume = text.command("search", "--resume", name, storage=storage)
        activity = search_setup.activity("search", request.folder, space, resume)
        listeners = Listeners()
        try:
            with listeners.opened(activity, lines.say):
                shows = display or console(lines)
                _run(request.folder, space, options, shows, planned, listeners, command_time,
                     templates)  # fmt: skip
                command_time.charge()
        finally:
            command_time.charge()
    return command_time


def read(folder: Path) -> Evidence:
    """Return what a search and its confirming runs have shown so far. Raises `ConfigError`."""
    return evidence.read(analysis.read(folder))


def console(lines: EventLines) -> Display:
    """Return what shows the progress: a live table in a terminal, a line per event elsewhere."""
    terminal = not (lines.quiet or lines.on_stderr or lines.logged) and sys.stdout.isatty()
    return functools.partial(LiveTable if terminal else Console, lines=lines)


def _run(
    folder: Path, space: SearchSpace, options: SearchOptions, display: Display,
    planned: Mapping[str, Any] | None,
    listeners: Listeners, command_time: CommandTime, templates: Templates,
) -> None:  # fmt: skip
    share = functools.partial(resources.share, space)
    with contextlib.ExitStack() as stack:
        stack.enter_context(alone(folder))
        # Other points that were lost may be drawn again
        repeat_lost(folder, space.candidates)
        searched = confirming.complete(folder, space)
        nothing_left = searched or experiment.out_of_time(folder, space)
        is_here = options.address is None
        if nothing_left and not confirming.pending(folder, space, is_here):
            command_time.dismiss()
            return
        frozen_code.check_unedited(folder, options.force)
        command_time.charge()
        session = stack.enter_context(contextlib.ExitStack())
        if not searched:
            session.enter_context(
                sessions.noted(folder, options.command_line("search", SearchOptions))
            )
        shown = session.enter_context(display(folder, space, planned=planned))
        where = (folder, share, options.address)
        trains = (shown.greet, [space.baseline], space.evaluates)
        opened: contextlib.AbstractContextManager[Backend] = (
            _confirming_backend(folder, options, share, shown.greet)
            if searched
            else connection.workers(*where, experiment.warm(space), *trains, templates)
        )
        devices = stack.enter_context(contextlib.ExitStack())
        backend = devices.enter_context(opened)
        backend.say_through(shown.say)
        listeners.speak_through(shown.say)
        if not searched:
            with listeners.with_listeners(shown):
                connection.search(folder, space, backend, listeners)
        if why := confirming_runs.nothing_to_confirm(analysis.read(folder)):
            shown.say(f"nothing to confirm: {why}")
        session.close()
        if left_out := journals.not_begun(analysis.read(folder), journals.sessions(folder)):
            shown.say(f"not begun: {left_out}")
        if confirming.pending(folder, space, is_here):
            if not searched and _confirming_space(folder, is_here).at_once > 1:
                devices.close()  # Ray's workers leave them to processes of this command
                again = _confirming_backend(folder, options, share, lambda dashboard: None)
                backend = devices.enter_context(again)
            _run_again(folder, options, backend, display, listeners)
        elif not why and space.finalists and space.budget.total_s is not None:
            shown.say(_no_time(folder, space))


def _confirming_space(folder: Path, is_here: bool) -> SearchSpace:
    prepared = confirming.prepare(analysis.read(folder), is_here)
    assert prepared is not None
    return prepared[1]


def _confirming_backend(
    folder: Path, options: SearchOptions, share: Callable[..., resources.ResourcePartition],
    greet: Callable[[str | None], None],
) -> contextlib.AbstractContextManager[Backend]:  # fmt: skip
    """Return what runs the confirming runs outside of their search, one at a time or on all equal
    devices of this machine."""
    space = _confirming_space(folder, options.address is None)
    if run_devices := confirming.run_devices(space, options.address):
        share = at_once.divided_among(run_devices, functools.partial(resources.share, space))
    configs, evaluates = [space.baseline], space.evaluates
    return connection.one_by_one(
        folder, share, options.address, greet, configs, evaluates, run_devices
    )


def _run_again(
    folder: Path, options: SearchOptions, backend: Backend, display: Display, listeners: Listeners
) -> None:
    """Run finalists and baseline on new seeds until it is decided."""
    is_here = options.address is None
    prepared = confirming.prepare(results := analysis.read(folder), is_here)
    assert prepared is not None
    place, space = prepared
    run_devices = confirming.run_devices(space, options.address)
    why = confirming.of_finalists(results, is_here)[1]
    if not confirming.left(results, place, space):
        return
    repeat_lost(place)
    with display(place, space) as shown, listeners.with_listeners(shown):
        listeners.speak_through(shown.say)
        log_exceptions("what is confirmed", _announce, shown)
        if why and not run_devices:
            shown.say(f"one confirming run at a time: {why}")
        tell = functools.partial(_tell, shown)
        confirming.run(results, place, space, backend, listeners, tell)
        if not confirming.over(results, place):
            shown.say(_no_time(results.folder, results.space))


def _no_time(folder: Path, space: SearchSpace) -> str:
    total_s = space.budget.total_s or 0.0
    why = f"another round would not end within the limit of {text.seconds(total_s)}"
    words = ("search", "--resume", folder.name, "--total", text.seconds(2 * total_s))
    more = text.command(*words, storage=folder.parent)
    return f"no further confirming runs: {why}; to go on: {more}"


def _announce(console: Console) -> None:
    """Say that the confirming runs begin."""
    space = console.space
    many = pluralize(len(space.candidates) // space.seeds - 1, "finalist")
    seeds = f"up to {pluralize(space.seeds, 'new seed')} each, fewer if it is decided before"
    if space.at_once > 1:
        seeds += f"; {space.at_once} runs at the same time"
    console.say(f"confirming: {many} and the baseline, {seeds}")


def _tell(console: Console, confirmed: Comparison) -> None:
    verdict = "; ".join(verdicts.so_far(confirmed)) or "nothing to compare"
    console.say(f"after {pluralize(confirmed.analysis.rounds, 'seed')}: {verdict}")
