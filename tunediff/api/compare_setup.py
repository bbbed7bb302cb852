"""Set up a comparison: read both sides, refuse what cannot be compared, and make its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import sides as side_files
from tunediff.analysis.comparison import Comparison
from tunediff.api import compare_sides
from tunediff.api.command_options import CommandCompareOptions
from tunediff.api.options import (
    JobOptions,
    ProofOptions,
    VerdictOptions,
    check_files,
    settings_given,
)  # fmt: skip
from tunediff.config import ConfigError, Systems
from tunediff.core import listeners, machine_options, remote
from tunediff.core import trial_record as record
from tunediff.core.options import option, words_option
from tunediff.core.refusals import allow, check_name, check_new, timed_name
from tunediff.experiment.model import FILE, Experiment
from tunediff.judge import frozen_code
from tunediff.report import plan
from tunediff.report.plan import MOST_DAYS
from tunediff.search_space import duration_s, folder_of
from tunediff.search_space.model import PAIR_SEED_OFFSET
from tunediff.training import number_formats, probe
from tunediff.tuning import local, resources
from tunediff.tuning.templates import kept

TWIN = " on other seeds"
"""What the name of B has more than A's where both sides are equal."""
Say = Callable[..., None]
"""Prints a line: its text, an event and its fields."""


@dataclasses.dataclass(kw_only=True)
class CompareKeywords(VerdictOptions, ProofOptions, JobOptions):
    """Options of the command `compare` that are keywords of `tunediff.run_comparison`."""

    budget: str | float | None = option(
        None, "training seconds of a run, e.g. 90s, 10m (default: 60s)", convert=duration_s
    )
    compile: str | None = option(
        None, "whether compiling counts as training (default: charged)", choices=("charged", "free")
    )


@dataclasses.dataclass(kw_only=True)
class CompareOptions(CompareKeywords):
    """What is asked of a comparison."""

    words: Sequence[str] = words_option("what is compared", "A [knob=value …] [B [knob=value …]]")
    resume: str | None = option(
        None, "go on with a comparison that was interrupted", metavar="NAME"
    )
    dry_run: bool = option(
        False, "print what would run and what it costs at most, and start nothing"
    )


@dataclasses.dataclass(frozen=True)
class CompareRequest:
    """A new comparison that has been checked."""

    folder: Path
    side_words: tuple[list[str], list[str]]
    sides: list[Systems]
    """Configurations of A and B."""
    experiment: Experiment
    measured: Mapping[str, Any]
    """What was measured of A, if it is of a user's workload."""
    temporary: Path
    """Folder with other revisions of the files, which is removed before the runs."""
    draws_seeds: bool
    """Whether the first seed follows from the code of both sides: the user has named none."""


def resume(options: CompareOptions | CommandCompareOptions) -> Path:
    """Return the folder of an earlier comparison. Raises `ConfigError`."""
    machine_options.check(options)
    listeners.check(options.track)
    new = (options.name, options.unit, options.reproduce, options.dry_run)
    if settings_given(options) or any(new):
        untrue = "a limit that moves with the results would make its error rates untrue"
        raise ConfigError(
            f"--resume: takes both sides, budget, pairs and rules from the folder: {untrue}"
        )
    storage = Path(options.storage)
    folder = folder_of(str(options.resume), storage).resolve()
    remote.check(storage)
    for trial in record.read_trials(folder):
        if not trial.finished:
            remote.pull(folder / "trials" / trial.name, heavy=True)
    if not Comparison.read(folder).ended:
        frozen_code.check_unedited(folder, options.force)
    return folder


def new_folder(options: CompareOptions | CommandCompareOptions) -> Path:
    """Return the folder that a new comparison will have. Raises `ConfigError`."""
    machine_options.check(options)
    listeners.check(options.track)
    options.check_proof()
    name = timed_name("compare") if options.name is None else options.name
    remote.check(Path(options.storage))
    folder = Path(options.storage).resolve() / name
    remote.pull(folder / FILE)
    check_name(name)
    check_new(folder, FILE)
    return folder


def check_days(budget_s: float, pairs: int, force: bool) -> None:
    """Refuse a comparison that takes weeks. Raises `ConfigError`."""
    allowed = f"at most {MOST_DAYS} days for {pairs} pairs; --force starts it all the same"
    allow(2 * pairs * budget_s <= MOST_DAYS * 86400 or force, "--budget", str(budget_s), allowed)


def twin(config: Any) -> Any:
    """Return an equal side whose seeds are another draw of the same stream."""
    return cfg.override(config, {"seed": config.seed + frozen_code.TWIN_DISTANCE}, check=False)


@contextlib.contextmanager
def prepare(options: CompareOptions, say: Say) -> Iterator[CompareRequest]:
    """Check what is asked for; yield it while other revisions of its files exist. Raises
    `ConfigError`."""
    folder, budget_s = new_folder(options), duration_s(options.budget or "60s", "--budget")
    side_words = compare_sides.words_of([*options.words] * (2 if options.equal else 1))
    with tempfile.TemporaryDirectory(prefix="tunediff-compare-") as temporary:
        sides = [
            compare_sides.side_of(words, Path(temporary) / side)
            for words, side in zip(side_words, side_files.SIDES, strict=True)
        ]
        named = any(word.startswith("seed=") for words in side_words for word in words)
        named = named or any(config.seed != PAIR_SEED_OFFSET for config in sides)
        if options.seed is not None:
            allow(not named, "--seed", options.seed, "no seed= beside it")
            sides = [cfg.override(config, {"seed": options.seed}, check=False) for config in sides]
        # Judged alike: in float32, as on a CPU, unless a format is named
        if options.address is not None or resources.local().gpus:
            sides = [number_formats.pinned(config, None) for config in sides]
        if options.equal:
            sides[1] = twin(sides[1])
        _check_parallel(options, sides)
        rules = options.experiment(cfg.of(sides[0]).objective, "first")
        fits = options.better == "value" or options.target is not None
        allow(fits, "--better", options.better, "a --target: every run takes its budget")
        test = rules.test
        most = test.pairs
        check_days(budget_s, most, options.force)
        # What a cluster elsewhere has is not known before it is asked.
        device = resources.local().device if options.address is None else None
        compare_sides.refuse_pointless(side_words, sides, most)
        compare_sides.refuse_equal(side_words, sides, device)
        machine_options.warn_emulated((config.precision.amp for config in sides), options.address)
        names = [" ".join(side_words[0]), " ".join(side_words[1]) + TWIN * options.equal]
        limit = {
            "budget": float(budget_s),
            "compile": options.compile or "charged",
            "unit": options.unit or "wall",
        }
        experiment = rules.changed(
            candidates=dict(zip(side_files.SIDES, names, strict=True)), limit=limit
        )
        measured = _check_sides(sides, side_words, options, say)
        draws_seeds = options.seed is None and not named
        yield CompareRequest(
            folder, side_words, sides, experiment, measured, Path(temporary).resolve(), draws_seeds
        )


def _check_parallel(options: CompareOptions, sides: Sequence[Systems]) -> None:
    """Refuse --parallel where a run needs several devices. Raises `ConfigError`."""
    if options.parallel:
        needed = [side.parallel.workers for side in sides if side.parallel.workers > 1]
        allow(not needed, "parallel.workers", needed, "1 with --parallel, which needs the devices")
        allow(options.address is None, "--address", options.address, "none with --parallel")


def _check_sides(
    sides: Sequence[Systems], side_words: Sequence[Sequence[str]], options: CompareOptions, say: Say
) -> dict[str, Any]:
    """Check files, room and users' workloads of both sides; return what was measured of A."""
    measured = dict[tuple[str, str], dict[str, Any]]()
    for config, (name, *_), side in zip(sides, side_words, side_files.SIDES, strict=True):
        check_files(config, evaluates=True)
        if options.address is None:
            resources.divided(
                [resources.local()], *needs([config]), strategies=[config.parallel.strategy]
            )
        users = cfg.of(config).file is not None and options.check and not options.dry_run
        key = (config.schema.workload, cfg.fingerprint(config))
        if users and key not in measured:
            measured[key] = _check(config, f"{side.upper()}, {name}", say)
    return next(iter(measured.values()), {})


def planned(request: CompareRequest, options: CompareOptions, say: Say) -> dict[str, Any]:
    """Return what would run and what it costs, as `plan.of_pairs`; time an evaluation for it."""
    config = request.sides[0]
    measured = request.measured
    if cfg.of(config).file is None and options.address is None:
        of_runs = None
        if not options.dry_run:
            say("looking at the data and timing one evaluation")
            if config.parallel.processes == 1:
                of_runs = functools.partial(kept(local.TRIALS).prepare, config.schema.workload)
        measured = {**probe.before_search(config, True, not options.dry_run, prepared=of_runs)}
    names, experiment = [" ".join(words) for words in request.side_words], request.experiment
    test, limit = experiment.test, experiment.limit
    return plan.of_pairs(
        names, request.sides, test.pairs, limit.budget or 0.0, limit.unit, measured,
        experiment.devices,
    )  # fmt: skip


def _check(config: Systems, name: str, say: Say) -> dict[str, Any]:
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
    keys = ("evaluation_s", "other_load_share", "disturbed")
    return {key: value for key, value in checked.items() if key in keys}


def needs(configs: Sequence[Systems]) -> tuple[list[int], list[str], str, bool]:
    """What `resources.divided` takes besides the machine."""
    sizes = sorted({config.parallel.workers for config in configs})
    values = [value for config in configs for value in resources.gpu_only(config)]
    return sizes, values, "command line", True
