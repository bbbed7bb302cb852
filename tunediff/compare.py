"""Is B better than A at equal training seconds, or device-seconds, here? `python -m tunediff.compare A B`.

A and B: a configuration file such as an exported best.yaml, digits or cifar10, or a workload's file (mine.py,
mine.py:PRESET, mine.py@REVISION of its git repository); knob=value behind one of them goes on top of it. Without B it
is A with what stands behind it: `compare mine.py lr=3e-4`. Both run once on each of several seeds, which decide initial
weights, order of the data and everything drawn, one run at a time, until the difference is larger than the noise, or
no number of pairs that is allowed would tell it. The test allows for every look: B is wrongly called better, or worse,
in at most 2.5 % of comparisons each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tunediff import cli
from tunediff import config as cfg
from tunediff.analysis import confirmation, evaluating, pairs
from tunediff.analysis.pairs import Pairs
from tunediff.config import ConfigError, Systems
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.files import write_text
from tunediff.core.progress import log_exceptions
from tunediff.event_lines import EventLines
from tunediff.report import pair_plan
from tunediff.report.heartbeat import Heartbeat
from tunediff.report.plan import MOST_DAYS
from tunediff.search_space import duration_s, folder_of
from tunediff.tuning import experiment, local_ray, resources, sessions

NOT_TOLD, WORSE, FAILED_RUN = 10, 11, 12
EXITS = {"better": cli.OK, "no significant difference": NOT_TOLD, "worse": WORSE, "failed": FAILED_RUN}
MOST = 12
Say = Callable[..., None]
"""Prints a line: its text, an event and its fields."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = cli.parser("compare", __doc__ or "")
    parser.epilog = (
        "Exit codes: 0 B is better, 10 no significant difference, 11 B is worse, 12 a run of one failed; "
        "1 failed, 2 bad input, "
        "130 interrupted."
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="A [knob=value …] [B [knob=value …]]", help="what is compared")
    add("--budget", help="training seconds of a run, e.g. 90s, 10m (default: 60s)")
    cli.add_unit(parser)
    add("--pairs", type=int, help=f"pairs of runs at most (default: {MOST})")
    add("--resolution", help="a difference that does not matter, e.g. 2%% of A's value, or 0.01 of an accuracy")
    add("--compile", choices=("charged", "free"), help="whether compiling counts as training (default: charged)")
    add("--name", help="name of the comparison and its folder (default: compare and the time)")
    cli.add_storage(parser, "all searches and comparisons")
    add("--resume", metavar="NAME", help="go on with a comparison that was interrupted")
    cli.add_machine(parser, "comparison")
    add("--force", action="store_true", help="start what would take over 30 days")
    add("--no-check", action="store_true", help="do not try workloads of your own with two steps and one evaluation")
    add("--dry-run", action="store_true", help="print what would run and what it costs at most, and start nothing")
    cli.add_printing(parser)
    return parser.parse_intermixed_args(argv)


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Compare; see `--help`."""
    args = arguments(argv)
    cli.check_machine(args)
    begun, lines = time.monotonic(), EventLines.of(args)

    def say(text: str, event: str = "message", **fields: Any) -> None:
        if event == "start" and not lines.as_json:  # people read how a run ended; what goes on is told after a while
            return
        with contextlib.suppress(OSError):  # the terminal went away; the comparison must not
            lines.print(lines.line(text, time.monotonic() - begun, "", event, **fields))
        if heart is not None:
            heart.beat()

    heart: Heartbeat | None = None
    folder = _resumed(args) if args.resume is not None else _new(args, say)
    if folder is None:
        return cli.OK
    heart = Heartbeat(folder, say)
    try:
        shown = contextlib.nullcontext() if args.quiet else heart
        with experiment.start_of(folder, new=args.resume is None), shown:
            _run(pairs.read(folder), args.address, say)
    except (KeyboardInterrupt, sessions.StoppedError) as error:
        return experiment.stopped(error, "compare", folder, cli.machine_words(args))
    from tunediff.report import pairs as report  # imports matplotlib
    from tunediff.report import result_json

    told = pairs.read(folder)
    written, spent_s = str(report.write_all(told)), sessions.spent_s(folder)
    with contextlib.suppress(OSError):  # its exit code says it too
        if args.json:
            failure = report.failure(told, told.failure) if told.failure is not None else None
            cli.print_json(result_json.compare(told, failure, spent_s, written))
        else:
            block = report.block(told) | {"wall_s": spent_s, "report": written}
            print("\n".join([text.block(block), "", *report.sentences(told)]), flush=True)
    return EXITS[told.verdict]


# ------------------------------------------------------------------------------------------------------- what is asked
def _resumed(args: argparse.Namespace) -> Path:
    given = (args.name, args.budget, args.unit, args.pairs, args.resolution, args.compile, args.dry_run or None)
    if args.words or any(option is not None for option in given):
        untrue = "a limit that moves with the results would make its error rates untrue"
        raise ConfigError(f"--resume: takes both sides, budget, pairs and resolution from the folder: {untrue}")
    folder = folder_of(args.resume, args.storage, pairs.FILE).resolve()
    pairs.read(folder)
    return folder


def _new(args: argparse.Namespace, say: Say) -> Path | None:
    """The folder of a new comparison, with both sides and what was asked. Raises `ConfigError`.

    None with `--dry-run`, which prints the plan instead.
    """
    budget_s = duration_s("60s" if args.budget is None else args.budget, "--budget")
    most = MOST if args.pairs is None else args.pairs
    cli.allow(3 <= most <= 100, "--pairs", most, "a whole number from 3 to 100: two say nothing of their own noise")
    name = f"compare-{time.strftime('%Y%m%d-%H%M%S')}" if args.name is None else args.name
    folder: Path = args.storage.resolve() / name
    cli.check_name(name, folder.parent)
    cli.allow(2 * most * budget_s <= MOST_DAYS * 86400 or args.force, "--budget", args.budget,
              f"at most {MOST_DAYS} days for {most} pairs; --force starts it all the same")  # fmt: skip
    asked = _sides(args.words)
    with tempfile.TemporaryDirectory(prefix="tunediff-compare-") as elsewhere:
        sides = [_side(words, Path(elsewhere) / side) for words, side in zip(asked, pairs.SIDES, strict=True)]
        within = _resolution(args.resolution, sides[0])
        # What a cluster elsewhere has is not known before it is asked.
        device = resources.local().device if args.address is None else None
        _refuse_pointless(asked, sides, most, device)
        checked: dict[str, dict[str, Any]] = {}
        cli.warn_emulated((config.precision.amp for config in sides), args.address)
        for config in sides:
            cli.check_here(config, True)
            if args.address is None:
                resources.divided([resources.local()], *_needs([config]), strategies=[config.parallel.strategy])
            tried = not args.no_check and not args.dry_run and cfg.fingerprint(config) not in checked
            if cfg.of(config).file is not None and tried:
                checked[cfg.fingerprint(config)] = _check(config, say)
        if args.dry_run or not args.quiet:
            measured = checked.get(cfg.fingerprint(sides[0]), {})
            if cfg.of(sides[0]).file is None and args.address is None:
                measured = _evaluation(sides[0], args.dry_run, say)
            asked_for = [" ".join(words) for words in asked]
            plan = pair_plan.values(asked_for, sides, most, budget_s, args.unit or "wall", measured)
            if args.dry_run:
                cli.print_json(plan) if args.json else print("\n".join(pair_plan.lines(plan)))
                return None
            for line in pair_plan.lines(plan):
                say(line)
        content = {
            "a": " ".join(asked[0]), "b": " ".join(asked[1]), "budget_s": budget_s, "pairs": most, "within": within,
            "compile": args.compile or "charged", "unit": args.unit or "wall",
        }  # fmt: skip
        with cli.writing("--storage", folder):
            new = folder.with_name(f".{name}-{os.getpid()}")
            for config, side in zip(sides, pairs.SIDES, strict=True):
                (new / side).mkdir(parents=True)
                own = cfg.take_along(config, new / side)
                write_text(new / side / "config.yaml", cfg.dump(own, folder=new / side))
            write_text(new / pairs.FILE, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
            new.rename(folder)  # a folder of that name is complete, whenever this process is killed
    return folder


def _sides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A and B, each with what goes on top of it. Raises `ConfigError`."""
    found: list[list[str]] = []
    for word in words:
        if "=" not in word:
            found.append([word])
        elif not found:
            raise ConfigError(f"command line: {word}: on top of what? knob=value stands behind A or B")
        else:
            found[-1].append(word)
    if len(found) == 1 and len(found[0]) > 1:
        found = [[found[0][0]], found[0]]
    if len(found) != 2:
        given = " ".join(words) or "nothing"
        needed = "needs A and B, or A and knob=value for what B changes"
        raise ConfigError(f"command line: {given}: {needed}{cfg.apart(words)}")
    return found[0], found[1]


def _side(words: Sequence[str], elsewhere: Path) -> Systems:
    """The configuration of one side; another revision of its file is laid out in `elsewhere`."""
    name, at, revision = words[0].rpartition("@")
    if at and name.partition(":")[0].endswith(".py"):
        file, colon, preset = name.partition(":")
        name = f"{_at_revision(Path(file), revision, elsewhere)}{colon}{preset}"
    else:
        name = words[0]
    config: Systems = cfg.named(Path(name), words[1:], "command line")
    return cfg.override(config, {"seed": config.seed + confirmation.SEED_OFFSET})


def _at_revision(file: Path, revision: str, elsewhere: Path) -> Path:
    """The file as it was, with its whole folder, or that above its package, which it may import from.

    Raises `ConfigError`.
    """
    root = file.absolute().parent
    while (root / "__init__.py").is_file():
        root = root.parent
    there = elsewhere / file.absolute().relative_to(root)

    def git(*words: str) -> bytes:
        try:
            done = subprocess.run(["git", *words], cwd=root, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
            raise ConfigError(f"{file}@{revision}: {said.splitlines()[-1]}") from None
        return done.stdout

    def inside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
        try:
            return tarfile.data_filter(member, folder)
        except tarfile.FilterError:  # a link out of the repository, such as one to data
            return None

    # Its hash: git would take a revision that begins with a dash for an option, such as a file to write.
    resolved = git("rev-parse", "--verify", "--end-of-options", revision).decode().strip()
    archive = git("archive", "--format=tar", resolved, ".")
    with tarfile.open(fileobj=io.BytesIO(archive)) as content:
        content.extractall(elsewhere, filter=inside)
    if not there.is_file():
        raise ConfigError(f"{file}@{revision}: no such file in that revision")
    return there


def _resolution(given: str | None, config: Systems) -> float | None:
    """A share of A's value where the metric falls, else in its units, as values are compared. Raises `ConfigError`."""
    if given is None:
        return None
    metric = cfg.of(config).objective
    share = metric.mode == "min"
    allowed = f"a share of A's {metric.name} such as 2%" if share else f"a number above 0, in units of {metric.name}"
    try:
        value = float(given.removesuffix("%") if share else given) / (100 if share else 1)
    except ValueError:
        value = 0.0
    cli.allow(0 < value < math.inf and given.endswith("%") == share, "--resolution", given, allowed)
    return value


def _refuse_pointless(
    asked: Sequence[Sequence[str]], sides: Sequence[Systems], most: int, device: str | None
) -> None:  # fmt: skip
    """One configuration on the same seeds, runs that would count twice, results that cannot be compared.

    `device`: None where it is not known.
    """
    one, two = (cfg.of(config).objective for config in sides)
    if one != two:
        raise ConfigError(
            f"{asked[1][0]}: is judged by {two.name} ({two.mode}), {asked[0][0]} by {one.name} ({one.mode})"
        )
    ours, theirs = map(cfg.flat, sides)
    for knob in sorted(name for name in ours.keys() | theirs.keys() if name.startswith("evaluation.")):
        value, allowed = (values.get(knob) for values in (theirs, ours))
        cli.allow(value == allowed, knob, value, f"{allowed!r}, as A has it: both are judged alike")
    apart = sides[1].seed - sides[0].seed
    here = [cfg.effective(config, device) if device is not None else config for config in sides]
    alike = [cfg.override(config, {"seed": 0}, check=False) for config in here]
    if len(set(map(cfg.fingerprint, alike))) == 1 and not apart:
        why = cfg.not_effective(sides[1], device) if device is not None else {}
        changes = cfg.differences(sides[1], sides[0])
        idle = "".join(f" ({knob}: {reason})" for knob, reason in why.items() if knob in changes)
        hint = f"change a knob, or its seed by at least {most} to see the noise"
        raise ConfigError(f"{' '.join(asked[1])}: is what A is here, on the same seeds{idle}; {hint}")
    if 0 < abs(apart) < most:
        seed, allowed = sides[1].seed - confirmation.SEED_OFFSET, f"A's, or at least {most} away from it"
        raise ConfigError(
            f"seed: {seed} is not allowed: with {most} pairs both sides would use some seeds; allowed: {allowed}"
        )


def _check(config: Systems, say: Say) -> dict[str, Any]:
    """Try a user's workload and return what was measured of it, as `pair_plan.values` takes it."""
    from tunediff.training import check  # imports torch

    found = check.before_search(config, say)
    for line in [*found["warnings"], *(f"train(trial) never reads the knob {knob}" for knob in found["unread"])]:
        say(f"WARNING: {cfg.of(config).title}: {line}")
    keys = ("evaluation_s", "other_load_share", "disturbed")
    return {key: value for key, value in found.items() if key in keys}


def _evaluation(config: Systems, dry_run: bool, say: Say) -> dict[str, Any]:
    """Time one evaluation, look at the data and return what `pair_plan.values` takes; None: the workload cannot say.

    Raises `ConfigError` for data that cannot be used.
    """
    from tunediff.distributed import alone
    from tunediff.training import judging  # imports torch

    if dry_run:  # leaves nothing in the cache folder
        measured = judging.measured(config, alone(), evaluates=True, prepare=False)
    else:
        say("looking at the data and timing one evaluation")
        measured = judging.before_search(config, evaluates=True)
    return {**measured, "evaluation_s": evaluating.seconds_of(config, measured.get("pass_s"), {})}


def _needs(configs: Sequence[Systems]) -> tuple[list[int], list[str], str, bool]:
    """What `resources.divided` takes besides the machine."""
    sizes = sorted({config.parallel.workers for config in configs})
    values = [value for config in configs for value in resources.gpu_only(config)]
    return sizes, values, "command line", True


# ----------------------------------------------------------------------------------------------------------- its runs
def _run(told: Pairs, address: str | None, say: Say) -> None:
    """Run pairs until it is decided."""
    if told.over:
        return
    if warning := experiment.foreign(told.folder):
        print(f"WARNING: {warning}", file=sys.stderr)
    from tunediff.report.pairs import so_far  # imports matplotlib
    from tunediff.tuning import rounds  # imports Ray
    from tunediff.tuning.messages import Plan

    folder, metric = told.folder, told.metric
    rivals = [rounds.Candidate(config, {"side": side}) for config, side in zip(told.configs, pairs.SIDES, strict=True)]
    needs = _needs(told.configs)

    def shared(*machines: resources.Machine, may_come: Sequence[resources.Machine] = ()) -> resources.ResourcePartition:
        return resources.divided(machines, *needs, may_come, [one.parallel.strategy for one in told.configs])

    said = [""]

    def tell(now: Pairs) -> None:
        if now.runs and (words := so_far(now)) != said[-1]:  # a resumed one passes over the pairs that it has
            said.append(words)
            say(words, "pair", **_look_fields(now))

    def over() -> bool:
        now = pairs.read(folder)
        log_exceptions("how far it is", tell, now)
        return now.over

    def greet(context: Any) -> None:
        if url := getattr(context, "dashboard_url", None):
            say(local_ray.dashboard(url))
        say(f"at most {told.most} pairs × 2 × {text.seconds(told.budget_s)} {told.clock.what}; results {folder}")

    with contextlib.ExitStack() as stack:
        stack.enter_context(experiment.alone(folder))
        stack.enter_context(sessions.noted(folder))
        slots = stack.enter_context(experiment.workers(folder, shared, address, None, greet, told.configs))
        slots.tell(say)
        plan = Plan(
            slots=slots.prefix, experiment=folder, baseline=cfg.to_dict(told.configs[0]), source=folder.name,
            metric=metric.name, mode=metric.mode, evaluates=True, fresh=False, profile_steps=0, final={},
            budget=told.limits, deadline_s=told.limits.trial_deadline_s,
        )  # fmt: skip
        listeners = (_teller(folder, slots.actors, say), lambda *_: sessions.alive(folder))
        rounds.run(folder, rivals, told.most, plan, slots.pool, listeners, over)


def _look_fields(now: Pairs) -> dict[str, Any]:
    """What the pairs so far tell, for JSON lines."""
    from tunediff.report.result_json import effects

    return {
        "pairs": now.look.rounds, "verdict": now.verdict if now.over else None,
        **effects(now.look.differences[0], now.look.ratios),
    }  # fmt: skip


def _teller(folder: Path, slots: Sequence[Any], say: Say) -> Callable[[str, str, Mapping[str, Any]], None]:
    """Says how each run ends, here and on Ray's pages."""

    def tell(event: str, name: str, content: Mapping[str, Any]) -> None:
        if event == "point":
            return
        run, words = record.read_trial(folder / "trials" / name), f"{content['side']} seed {content['seed']}"
        fields: dict[str, Any] = {"trial": name, "side": content["side"], "seed": content["seed"]}
        if event == "end" and run is not None:
            ended = [run.status or "", run.reason]
            value = run.value(cfg.of(run.configuration).objective.name)
            fields |= {"status": run.status, "reason": run.reason, "value": value}
            if run.points and run.status == "ok":
                last, metric = run.points[-1], cfg.of(run.configuration).objective
                label, reached = last.get("label", metric.label), text.number(last.get(metric.name))
                ended = [f"{label} {reached} at {last.train_s:.1f} s"]
                ended.append(f"{last.samples / last.train_s:,.0f} {cfg.of(run.configuration).unit}/s")
            words = "  ".join([words, *filter(None, ended)])
            say(words, "end", **fields)
        elif event == "start":
            say(f"{words} start", "start", **fields)
        if slots:  # there is one as soon as a run has a place
            slots[0].note.options(name=words[:200]).remote(words)

    return tell


if __name__ == "__main__":
    sys.exit(main())
