"""Set up a comparison: read both sides, refuse what cannot be compared, and make its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import sides as side_files
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.sides import HOLDOUT, JUDGE
from tunediff.api import sides
from tunediff.api.options import (
    CompareOptions,
    check_command,
    check_files,
    refuse_settings_of_commands,
)
from tunediff.api.sides import CommandSide
from tunediff.command import trial, worktrees
from tunediff.command.check import check as check_command_runs
from tunediff.config import ConfigError, Metric, Systems
from tunediff.core import machine, remote, text
from tunediff.core import trial_record as record
from tunediff.core.files import sha256, write_text
from tunediff.core.options import allow, check_name, check_new, flag_of, timed_name, writing
from tunediff.core.target import Target
from tunediff.experiment.model import (
    FILE,
    LEAST_PAIRS,
    MOST_PAIRS,
    Experiment,
    Limit,
    SequentialTest,
    Share,
)
from tunediff.inspector import probe
from tunediff.integrations import tracking
from tunediff.proof import frozen_code, ledger, locked_judge, proof
from tunediff.proof.frozen_code import SideCode
from tunediff.report import plan
from tunediff.report.plan import MOST_DAYS
from tunediff.search_space import folder_of
from tunediff.search_space.model import PAIR_SEED_OFFSET
from tunediff.training import number_formats
from tunediff.tuning import at_once, local, resources
from tunediff.tuning.templates import kept

Say = Callable[..., None]
"""Prints a line: its text, an event and its fields."""


@dataclasses.dataclass(frozen=True)
class NewComparison:
    """A new comparison that has been checked."""

    folder: Path
    experiment: Experiment
    configs: Sequence[Any]
    """Configurations of A and B."""
    commands: Sequence[CommandSide]
    """A and B of a comparison of commands; empty: they are workloads."""
    draws_seeds: bool
    """Whether the first seed follows from the code of both sides: the user has named none."""
    temporary: Path
    """Folder with other revisions of the files, which is removed before the runs."""
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What was measured of A, if it is of a user's workload."""

    @property
    def names(self) -> list[str]:
        return list(self.experiment.candidates.values())


# ---- the folder that is asked for
def resume(options: CompareOptions) -> Path:
    """Return the folder of an earlier comparison. Raises `ConfigError`."""
    machine.check(options)
    tracking.check(options.track)
    if options.settled or options.reproduce or options.dry_run:
        untrue = "a limit that moves with the results would make its error rates untrue"
        raise ConfigError(
            f"--resume: takes both sides, budget, pairs and rules from the folder: {untrue}"
        )
    storage = Path(options.storage)
    folder = folder_of(str(options.resume), storage).resolve()
    remote.check(storage)
    for run in record.read_trials(folder):
        if not run.finished:
            remote.pull(folder / "trials" / run.name, heavy=True)
    if not Comparison.read(folder).ended:
        frozen_code.check_unedited(folder, options.force)
    return folder


def refuse_other_than_reproduced(options: CompareOptions) -> None:
    """Refuse options that would make another comparison than that of the folder. Raises
    `ConfigError`."""
    for name, value in options.settled.items():
        if name != "name":
            flag = flag_of(name, CompareOptions.model_fields[name])
            allow(False, flag, value, "what --reproduce finds in its folder")


def _new_folder(options: CompareOptions) -> Path:
    """Return the folder that a new comparison will have. Raises `ConfigError`."""
    machine.check(options)
    tracking.check(options.track)
    if options.out is not None:
        proof.check_out(options.out)
    name = timed_name("compare") if options.name is None else options.name
    remote.check(Path(options.storage))
    folder = Path(options.storage).resolve() / name
    remote.pull(folder / FILE)
    check_name(name)
    check_new(folder, FILE)
    return folder


# ---- the experiment
@contextlib.contextmanager
def prepare(options: CompareOptions, say: Say) -> Iterator[NewComparison]:
    """Check what is asked for; yield it while other revisions of its files exist. Raises
    `ConfigError`."""
    check_command(options) if options.command else refuse_settings_of_commands(options)
    folder = _new_folder(options)
    with tempfile.TemporaryDirectory(prefix="tunediff-compare-") as temporary:
        if options.command:
            yield _of_commands(options, folder)
        else:
            yield _of_workloads(options, folder, Path(temporary), say)


def _of_commands(options: CompareOptions, folder: Path) -> NewComparison:
    both = sides.of_commands(options)
    for side in both:
        side.definition.template.check(
            list(side.parameters), sides.WHERE, unseeded=options.unseeded
        )
        side.definition.check_places(options.budget_s, "--run")
    definition, seed = both[0].definition, options.seed
    allow(not options.unseeded or seed is None, "--seed", seed, "none with --unseeded")
    needed = [side.definition.gpus for side in both if side.definition.gpus > 1]
    allow(not (options.parallel and needed), "gpus", needed, "1 with --parallel")
    metric = Metric(definition.objective, definition.mode)
    names = [side.name for side in both]
    seeded = any("seed" in side.definition.template.names for side in both)
    first = 0 if seed is None else seed
    configs = [
        side.configuration(f"plan-{name}", Path(), first)
        for name, side in zip(side_files.SIDES, both, strict=True)
    ]
    if options.equal:
        configs[1] = sides.twin(configs[1])
    return NewComparison(
        folder, _experiment(options, metric, names), configs, both, seed is None and seeded, Path()
    )


def _of_workloads(
    options: CompareOptions, folder: Path, temporary: Path, say: Say
) -> NewComparison:
    side_words = sides.words_of([*options.words] * (2 if options.equal else 1))
    configs = [
        sides.side_of(words, temporary / side)
        for words, side in zip(side_words, side_files.SIDES, strict=True)
    ]
    allow(options.compile in ("charged", "free"), "--compile", options.compile, "charged, free")
    named = any(word.startswith("seed=") for words in side_words for word in words)
    named = named or any(config.seed != PAIR_SEED_OFFSET for config in configs)
    if options.seed is not None:
        allow(not named, "--seed", options.seed, "no seed= beside it")
        configs = [cfg.override(one, {"seed": options.seed}, check=False) for one in configs]
    # Judged alike: in float32, as on a CPU, unless a format is named
    if options.address is not None or resources.local().gpus:
        configs = [number_formats.pinned(config, None) for config in configs]
    if options.equal:
        configs[1] = sides.twin(configs[1])
    if options.parallel:
        needed = [one.parallel.workers for one in configs if one.parallel.workers > 1]
        allow(not needed, "parallel.workers", needed, "1 with --parallel, which needs the devices")
        allow(options.address is None, "--address", options.address, "none with --parallel")
    names = [" ".join(side_words[0]), " ".join(side_words[1]) + sides.TWIN * options.equal]
    experiment = _experiment(options, cfg.of(configs[0]).objective, names)
    fits = options.better == "value" or options.target is not None
    allow(fits, "--better", options.better, "a --target: every run takes its budget")
    files = [words[0] for words in side_words]
    sides.refuse_pointless(files, configs, experiment.test.pairs)
    sides.refuse_equal(names[1], configs)
    machine.warn_emulated((config.precision.amp for config in configs), options.address)
    draws, measured = options.seed is None and not named, _check(configs, files, options, say)
    return NewComparison(folder, experiment, configs, (), draws, temporary.resolve(), measured)


def _experiment(options: CompareOptions, metric: Metric, names: Sequence[str]) -> Experiment:
    """Return what the file of a comparison says. Raises `ConfigError`."""
    most, level, within = options.pairs, options.level, options.within
    allowed = f"a whole number from 3 to {MOST_PAIRS:,}: two say nothing of their own noise"
    allow(LEAST_PAIRS <= most <= MOST_PAIRS, "--pairs", most, allowed)
    allow(0.001 <= level <= 0.5, "--level", level, "0.001 to 0.5")
    allow(options.ledger or not options.confirm, "--confirm", options.confirm, "with --ledger")
    is_share, lower = isinstance(within, Share), metric.mode == "min"
    allowed = f"a share of A's {metric.name} such as 2%"
    allowed = allowed if lower else f"a number above 0, in units of {metric.name}"
    allow(within is None or is_share == lower, "--within", str(within), allowed)
    _check_time(options, metric)
    allowed = f"at most {MOST_DAYS} days for {most} pairs; --force starts it all the same"
    allow(
        2 * most * (options.budget_s or 0.0) <= MOST_DAYS * 86400 or options.force,
        "--budget",
        text.format_exact(options.budget_s or 0.0),
        allowed,
    )
    digests = {}
    for name in ("judge", "holdout"):
        if (file := getattr(options, name)) is not None:
            allow(file.is_file(), f"--{name}", file, "a Python file")
            digests[name] = sha256(file)
    if options.ledger:
        level = ledger.own_level(ledger.Ledger.read().level(level), options)
    return Experiment(
        kind="comparison",
        runner="command" if options.command else "workload",
        objective=metric.name,
        mode=metric.mode,
        candidates=dict(zip(side_files.SIDES, names, strict=True)),
        limit=options.part(Limit, budget=options.budget_s),
        test=options.part(SequentialTest, counted=options.counted, level=level),
        devices=len(at_once.run_devices()) if options.parallel else 1,
        unseeded=options.unseeded,
        track=options.track,
        **digests,
    )


def _check_time(options: CompareOptions, metric: Metric) -> None:
    """Refuse what contradicts `--better`. Raises `ConfigError`."""
    by_time = options.better == "time"
    for name in ("target", "margin"):
        value = getattr(options, name)
        allow(value is None or by_time, f"--{name}", value, "none without --better time")
    if by_time:
        allow(options.within is None, "--within", options.within, "none with --better time")
        is_gated = options.target is not None or options.margin is not None
        allow(
            is_gated, "--better", "time", "a --target or a --margin: what is fast need not be good"
        )
    if options.target is not None:
        Target.of_objective(options.target, metric.name, metric.mode, "--target")


def _check(
    configs: Sequence[Systems], names: Sequence[str], options: CompareOptions, say: Say
) -> dict[str, Any]:
    """Check files, room and users' workloads of both sides; return what was measured of A."""
    measured = dict[tuple[str, str], dict[str, Any]]()
    for config, name, side in zip(configs, names, side_files.SIDES, strict=True):
        check_files(config, evaluates=True)
        if options.address is None:
            resources.divided(
                [resources.local()], *needs([config]), strategies=[config.parallel.strategy]
            )
        users = cfg.of(config).file is not None and options.check and not options.dry_run
        key = (config.schema.workload, cfg.fingerprint(config))
        if users and key not in measured:
            measured[key] = _check_workload(config, f"{side.upper()}, {name}", say)
    return next(iter(measured.values()), {})


def _check_workload(config: Systems, name: str, say: Say) -> dict[str, Any]:
    """Try the workload of the side called `name`; return what was measured of it, as
    `plan.of_pairs` takes it."""
    from tunediff.inspector import check  # imports torch

    try:
        checked = check.before_search(config, lambda line: say(f"{name}: {line}"), True)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    warnings = list(checked["warnings"])
    if checked["unread"]:
        warnings.append(f"train(trial) never reads {', '.join(checked['unread'])}")
    for line in warnings:
        say(f"WARNING: {name}: {line}")
    return {"evaluation_s": checked["evaluation_s"]}


def needs(configs: Sequence[Systems]) -> tuple[list[int], list[str], str, bool]:
    """What `resources.divided` takes besides the machine."""
    sizes = sorted({config.parallel.workers for config in configs})
    values = [value for config in configs for value in resources.gpu_only(config)]
    return sizes, values, "command line", True


def planned(new: NewComparison, options: CompareOptions, say: Say) -> dict[str, Any]:
    """Return what would run and what it costs, as `plan.of_pairs`; time an evaluation for it."""
    config, measured, experiment = new.configs[0], new.measured, new.experiment
    if new.commands:
        measured = {"evaluation_s": 0.0}
    elif cfg.of(config).file is None and options.address is None:
        of_runs = None
        if not options.dry_run:
            say("reading the data and timing one evaluation")
            if config.parallel.processes == 1:
                of_runs = functools.partial(kept(local.TRIALS).prepare, config.schema.workload)
        measured = {**probe.before_search(config, True, not options.dry_run, prepared=of_runs)}
    values = plan.of_pairs(new.names, new.configs, experiment, measured)
    if new.commands:
        values["objective"] = f"{experiment.objective} ({experiment.mode})"
    return values


def try_commands(new: NewComparison, say: Say) -> None:
    """Try both commands, each at its revision; warn of mistakes. Raises `ConfigError`."""
    tried = list[Any]()
    for label, side in zip(side_files.SIDES, new.commands, strict=False):
        if (key := (side.definition, side.revision)) in tried:
            continue
        tried.append(key)
        with contextlib.ExitStack() as stack:
            folder = Path()
            if side.in_worktree:
                scratch = tempfile.TemporaryDirectory(prefix="tunediff-check-")
                source = Path(stack.enter_context(scratch)) / worktrees.SOURCE
                stack.callback(worktrees.remove, source)
                folder = worktrees.add(source, str(side.revision))
            config = side.configuration(f"check-{label}", folder, PAIR_SEED_OFFSET)
            run = trial.run_of(config, Path(), new.experiment.limit.budget)
            try:
                check_command_runs(run, functools.partial(_say_of, label, say))
            except ConfigError as error:
                raise ConfigError(f"{label}: {error}") from None


def _say_of(label: str, say: Say, line: str) -> None:
    say(f"{label}: {line}")


# ---- its folder
def create(new: NewComparison, options: CompareOptions) -> None:
    """Make the folder of a comparison, with both sides and what was asked. Raises `ConfigError`."""
    folder, codes, configs = new.folder, list[SideCode](), list[Any]()
    making = folder.with_name(f".{folder.name}-{os.getpid()}")
    with writing("--storage", folder), contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, making, ignore_errors=True)
        for number, name in enumerate(side_files.SIDES):
            (side := making / name).mkdir(parents=True)
            config, of_code = new.configs[number], dict[str, Any]()
            if new.commands:
                command, inside = new.commands[number], Path().absolute()
                runs_in = inside
                if command.in_worktree:
                    undo.callback(worktrees.remove, side / worktrees.SOURCE)
                    inside = worktrees.add(side / worktrees.SOURCE, str(command.revision))
                    runs_in = folder / inside.relative_to(making.absolute())
                config = command.configuration(name, runs_in, config.seed)
                of_code = {"runs_in": inside, "working_copy": not command.in_worktree}
            configs.append(cfg.take_along(config, side))
            _replace_links(side, new.temporary)
            write_text(side / "config.yaml", cfg.dump(configs[-1], folder=side))
            codes.append(SideCode.of(side, **of_code))
        versions = {(code.digest, config.seed) for code, config in zip(codes, configs, strict=True)}
        if len(versions) == 1:
            hint = "change one, or compare it with itself by --equal"
            raise ConfigError(f"compare: A and B are identical but for what git ignores; {hint}")
        _freeze(making, configs, codes, new.draws_seeds)
        locked_judge.lock(options.judge, JUDGE, making)
        locked_judge.lock(options.holdout, HOLDOUT, making)
        new.experiment.write(making)
        if options.ledger:
            ledger.check(making, options.confirm)
        making.rename(folder)  # a folder of that name is complete, whenever this process is killed
        undo.pop_all()
    for name in side_files.SIDES:
        worktrees.moved(folder / name / worktrees.SOURCE)


def _freeze(new: Path, configs: Sequence[Any], codes: Sequence[SideCode], draws: bool) -> None:
    """Write the code of both sides into the folder of a comparison, and give them their seeds,
    which stay as far from each other as they are."""
    seed = before = configs[0].seed
    if draws:
        seed = frozen_code.drawn_seed([code.digest for code in codes])
        for config, side in zip(configs, side_files.SIDES, strict=True):
            seeded = cfg.override(config, {"seed": config.seed - before + seed}, check=False)
            write_text(new / side / "config.yaml", cfg.dump(seeded, folder=new / side))
    frozen_code.write(new, codes, seed, draws)


def _replace_links(folder: Path, temporary: Path) -> None:
    """Replace links into a folder that is removed before the runs by copies of the data."""
    for link in [path for path in folder.rglob("*") if path.is_symlink()]:
        data = link.resolve()
        # git may not hold what a link in a revision names
        if data.is_relative_to(temporary) and data.exists():
            link.unlink()
            if data.is_dir():
                shutil.copytree(data, link, symlinks=True)
            else:
                shutil.copy2(data, link)
