"""Search for the configuration with the best result for its training seconds: `python -m tunediff.search`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tunediff import analysis, cli, search_space
from tunediff.analysis import confirmation
from tunediff.analysis.confirmation import Confirmation
from tunediff.config import ConfigError, Lines, apart
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.progress import log_exceptions
from tunediff.core.text import pluralize
from tunediff.event_lines import EventLines
from tunediff.report import outputs, plan, summary, verdicts
from tunediff.report.console import Console, Table
from tunediff.search_space import MOST_FINALISTS, SearchSpace
from tunediff.tuning import confirming, experiment, resources, sessions

if TYPE_CHECKING:
    from tunediff.training import judging
    from tunediff.tuning.slot import Slots


UNREAD = "knobs that train(trial) never reads are dropped from these when the search starts"
NO_TIME = "no further confirming runs: another round would not end within --total"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = cli.parser("search", __doc__ or "")
    add = parser.add_argument
    files = "search file (default: digits), or a workload's file, which is searched around its baseline"
    add("words", nargs="*", metavar="SPACE.yaml | mine.py | knob=value", help=files)
    add("--name", help="name of the search and its folder (default: search file and time)")
    cli.add_storage(parser)
    add("--trials", type=int, help="trials in all, the baseline included")
    add("--budget", help="training seconds per trial, e.g. 90s, 10m")
    cli.add_unit(parser)
    add("--total", help="wall-clock of the whole search, confirming runs included, e.g. 8h")
    add("--confirm", type=int, metavar="N", help="how many of the best to run again on new seeds; 0: none")
    add("--seed", type=int, help="seed of the search")
    cli.add_machine(parser, "search")
    add("--resume", metavar="NAME", help="go on with a search that was interrupted")
    add("--warm-start", metavar="NAME", help="an earlier search whose trials this one knows already")
    add("--no-check", action="store_true", help="do not try a workload of your own with two steps and one evaluation")
    add("--force", action="store_true", help="start what would take over 30 days, 100,000 trials or the whole disk")
    add("--dry-run", action="store_true", help="print what would run, what it costs and if it fits")
    cli.add_printing(parser)
    return parser.parse_intermixed_args(argv)  # knob=value may stand before and after options


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Run a search; see `--help`."""
    args = arguments(argv)
    cli.check_machine(args)
    folder, wanted, content = _resumed(args) if args.resume is not None else _new(args)
    # ---- data and weights that a trial would miss are missed now
    cli.check_here(wanted.baseline, wanted.evaluates)
    cli.warn_emulated(resources.values_of(wanted, "precision.amp"), args.address)
    if args.address is None:
        resources.share(wanted, resources.local())
        if wanted.cost == "energy_wh":
            _check_energy(wanted)
    if args.dry_run:
        cli.check_creatable("--storage", folder)
    if args.dry_run or args.address is None:  # what a cluster elsewhere has is not known before it is asked
        planned = plan.values(wanted, folder, _measured(wanted, args) if args.dry_run else {})
        if args.resume is None and args.completed and not args.no_check:
            planned["notes"].append(UNREAD)
        if args.dry_run:
            cli.print_json(planned) if args.json else print("\n".join(plan.lines(planned)))
        plan.check(planned, args.force)
    if args.dry_run:
        return cli.OK
    told: dict[str, Any] | None = None
    if content is not None:
        wanted, told = _created(folder, wanted, content, args)
    try:
        with experiment.start_of(folder, new=content is not None):
            confirmed = _run(folder, wanted, args, told)
    except (KeyboardInterrupt, sessions.StoppedError) as error:
        return experiment.stopped(error, "search", folder, cli.machine_words(args))
    found = analysis.read(folder)
    outputs.write_all(found)
    summary.conclude(found, confirmed, args.json)
    return cli.OK if found.leader is not None else cli.NO_SUCCESS


def _measured(wanted: SearchSpace, args: argparse.Namespace) -> judging.Measured:
    """What a dry run measures. Raises `ConfigError` for unusable data."""
    from tunediff.training import judging  # imports torch

    if not args.quiet:
        print(_looking(wanted), file=sys.stderr, flush=True)
    return judging.before_search(wanted.baseline, wanted.evaluates, prepare=False)


def _looking(wanted: SearchSpace) -> str:
    return f"looking at the data{' and timing one evaluation' if wanted.evaluates else ''}"


def _check_energy(wanted: SearchSpace) -> None:
    """Raises `ConfigError` where nothing counts the energy of a training."""
    import torch

    from tunediff.training import hardware  # imports torch

    if hardware.EnergyMeter(torch.device(resources.local().device)).joules() is None:
        what = f"cannot be measured here: {hardware.NO_ENERGY}"
        raise ConfigError(f"{wanted.source}: objective: cost: 'energy_wh' {what}")


def _resumed(args: argparse.Namespace) -> tuple[Path, SearchSpace, None]:
    """Folder and space of an earlier search."""
    fixed = (args.seed, args.confirm)
    if args.words or args.name or args.budget or args.unit or args.warm_start or any(one is not None for one in fixed):
        raise ConfigError(
            "--resume: takes file, knobs and budget from the folder; only --trials and --total can change"
        )
    folder = search_space.folder_of(args.resume, args.storage).resolve()
    done = sum(trial.finished for trial in record.read_trials(folder))
    cli.allow(args.trials is None or args.trials >= done, "--trials", args.trials, f"at least {done}, which are done")
    spent_s = sessions.all_spent_s(folder)
    enough = args.total is None or search_space.duration_s(args.total, "--total") >= spent_s
    cli.allow(enough, "--total", args.total, f"at least {math.ceil(spent_s)}s, which are spent")
    wanted = experiment.reopen(folder, _limits(args), keep=not args.dry_run)
    if warning := experiment.foreign(folder):
        print(f"warning: {warning}", file=sys.stderr)
    return folder, wanted, None


def _new(args: argparse.Namespace) -> tuple[Path, SearchSpace, Lines]:
    """Folder, space and search file of a new search."""
    storage = args.storage.resolve()  # Ray needs an absolute path, and its processes may run elsewhere
    if args.name is not None:
        cli.check_name(args.name, storage)
    files = [word for word in args.words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"command line: one search file at most, found {', '.join(files)}{apart(args.words)}")
    path, words = search_space.find(files[0] if files else None), [word for word in args.words if "=" in word]
    # What a cluster elsewhere has is not known before it is asked.
    machine = resources.local()
    content = search_space.read(
        path, resources.world_sizes_of(machine) if args.address is None else (), machine.gpus > 0
    )
    read = content
    content = search_space.completed(read, path, words, machine.cores, machine.gpus > 0)
    args.completed = content is not read
    if args.completed:  # a file of a user's without a search file: its knobs on the command line are not searched
        whole = search_space.completed(read, path, [], machine.cores, machine.gpus > 0)
        for name in (word.partition("=")[0] for word in words):
            if name in whole["search"].keys() - content["search"].keys():
                consequence = f"what {path.name} says of it is not searched"
                value = next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))
                print(f"{name} is fixed at {value} by the command line; {consequence}", file=sys.stderr)
    content = _confirmed_by(args.confirm, content)
    if args.warm_start is not None:
        content["warm_start"] = str(search_space.of_search(search_space.folder_of(args.warm_start, storage)).parent)
    narrowed = search_space.narrow(content, str(path), path.parent, words)
    content = narrowed.content
    for notice in narrowed.notices:
        print(notice, file=sys.stderr)
    wanted = search_space.parse(content, str(path), path.parent, narrowed.words, _limits(args))
    if args.seed is not None:
        cli.allow(0 <= args.seed < 2**32, "--seed", args.seed, "a whole number of at least 0 and below 2^32")
        wanted = dataclasses.replace(wanted, seed=args.seed)
    stem = "".join(filter(str.isprintable, path.stem)).lstrip(".-")[:40] or "search"
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}" if args.name is None else args.name
    return storage / name, wanted, content


def _confirmed_by(finalists: int | None, content: Lines) -> Lines:
    """The content with so many finalists in `confirm:`, without it for 0. Raises `ConfigError`."""
    if finalists is None:
        return content
    cli.allow(0 <= finalists <= MOST_FINALISTS, "--confirm", finalists, f"0 to {MOST_FINALISTS} finalists; 0: none")
    left = {key: value for key, value in content.items() if key != "confirm"}
    section = content.get("confirm") or {}
    return {**left, "confirm": {**section, "of": finalists}} if finalists else left


def _created(
    folder: Path, wanted: SearchSpace, content: Lines, args: argparse.Namespace
) -> tuple[SearchSpace, dict[str, Any] | None]:
    """The space of a new search in its folder, and what it will cost, as measured; a user's workload has been tried.

    Raises `ConfigError`.
    """
    lines, own = EventLines.of(args), wanted.workload.file is not None
    lines, begun = dataclasses.replace(lines, on_stderr=True), time.monotonic()

    def say(text: str) -> None:
        lines.print(lines.line(text, time.monotonic() - begun) if lines.as_json else text)

    cli.check_writable("--storage", folder)
    measured: judging.Measured = {}
    if not (own or args.quiet or args.address):
        from tunediff.training import judging  # imports torch

        say(_looking(wanted))
        measured = judging.before_search(wanted.baseline, wanted.evaluates)
        plan.check(plan.values(wanted, folder, measured), args.force)
    if own and not args.no_check:
        from tunediff.tuning import preflight  # imports torch

        wanted, tried = preflight.create(folder, wanted, content, args.completed, say)
        keys = ("evaluation_s", "parameters", "other_load_share", "disturbed")
        measured = cast("judging.Measured", {key: value for key, value in tried.items() if key in keys})
    else:
        wanted = experiment.create(folder, wanted, content)
    return wanted, plan.values(wanted, folder, measured) if args.address is None else None


def _limits(args: argparse.Namespace) -> Lines:
    """Limits from the command line, as `budget:` has them. Raises `ConfigError` naming the option."""
    for option, value in (("--budget", args.budget), ("--total", args.total)):
        if value is not None:
            search_space.duration_s(value, option)
    cli.allow(args.trials is None or args.trials >= 1, "--trials", args.trials, "a whole number of at least 1")
    given = {"per_trial": args.budget, "unit": args.unit, "trials": args.trials, "total": args.total}
    return {key: value for key, value in given.items() if value is not None}


def _run(
    folder: Path, wanted: SearchSpace, args: argparse.Namespace, told: Mapping[str, Any] | None
) -> Confirmation | None:
    """Run what is not finished, confirming runs included; under a live table in a terminal, else a line per event."""
    searched = confirming.complete(folder, wanted)
    if searched and not confirming.pending(folder, wanted):
        return _confirmed(folder, wanted)
    lines = EventLines.of(args)
    kind = functools.partial(Console if lines.quiet or lines.on_stderr or not sys.stdout.isatty() else Table,
                             quiet=lines.quiet, lines=lines)  # fmt: skip
    share = functools.partial(resources.share, wanted)
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(experiment.alone(folder))
        session = stack.enter_context(contextlib.ExitStack())
        if not searched:
            session.enter_context(sessions.noted(folder))
        console = session.enter_context(kind(folder, wanted, told=told))
        slots = stack.enter_context(
            experiment.workers(
                folder, share, args.address, experiment.warm(wanted), console.greet, [wanted.baseline], wanted.evaluates
            )
        )
        slots.tell(console.say)
        if not searched:
            experiment.search(folder, wanted, slots, console.listen)
        if why := confirmation.nothing_to_confirm(analysis.read(folder)):
            console.say(f"nothing to confirm: {why}")
        session.close()
        if not confirming.pending(folder, wanted):
            if wanted.finalists and wanted.budget.total_s is not None:
                console.say(NO_TIME)
            return _confirmed(folder, wanted)
        _run_again(folder, slots, functools.partial(kind, started=begun))
    return _confirmed(folder, wanted)


def _run_again(folder: Path, slots: Slots, console: Callable[..., Console]) -> None:
    """The finalists and the baseline on new seeds, until it is decided; then with the longer budgets."""
    prepared = confirming.prepare(found := analysis.read(folder))
    assert prepared is not None
    of, again = prepared
    for place, wanted in [prepared, *confirming.longer(found, of)]:
        if confirming.over(found, place) or not confirming.has_time(found, place, wanted):
            continue
        with console(place, wanted) as listening:
            log_exceptions("what is confirmed", _announce, listening, wanted is not again)
            tell = functools.partial(_tell, listening)
            confirming.run(found, place, wanted, slots, listening.listen, tell)
            if not confirming.over(found, place):
                listening.say(NO_TIME)


def _announce(console: Console, longer: bool) -> None:
    """Say what begins: the confirming runs, or those with longer budgets."""
    wanted = console.space
    many = pluralize(len(wanted.candidates) // wanted.seeds - 1, "finalist")
    seeds = f"up to {pluralize(wanted.seeds, 'new seed')} each, fewer if it is decided before"
    if longer:
        each = f"{text.seconds(wanted.budget.per_trial_s)} of {wanted.budget.clock.what}"
        seeds = f"{each}, {pluralize(wanted.seeds, 'seed')} each"
    console.say(f"confirming: {many} and the baseline, {seeds}")


def _tell(console: Console, told: Confirmation) -> None:
    """How far the confirming runs are."""
    console.say(
        f"after {pluralize(told.look.rounds, 'seed')}: {'; '.join(verdicts.so_far(told)) or 'nothing to compare'}"
    )


def _confirmed(folder: Path, wanted: SearchSpace) -> Confirmation | None:
    """What the confirming runs say; None where there are none."""
    found = analysis.read(folder)
    if wanted.confirm is None or (prepared := confirming.prepare(found)) is None:
        return None
    runs = analysis.read(prepared[0])
    if not runs.trials:  # --total left no time for them
        return None
    outputs.write_all(runs)
    return confirmation.confirm(found, runs)


if __name__ == "__main__":
    sys.exit(main())
