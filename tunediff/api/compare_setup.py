"""Set up a comparison: read both sides, refuse what cannot be compared, and make its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import functools
import io
import itertools
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import pairs
from tunediff.analysis.targets import Counted
from tunediff.api.options import JobOptions, ProofOptions, VerdictOptions, check_files
from tunediff.config import ConfigError, Systems
from tunediff.core import listeners, machine_options, remote
from tunediff.core import trial_record as record
from tunediff.core.files import write_text
from tunediff.core.git import commit_of, git
from tunediff.core.options import option, words_option
from tunediff.core.progress import announced
from tunediff.core.refusals import allow, check_name, check_new, writing
from tunediff.data.knobs import Data
from tunediff.judge import frozen_code
from tunediff.judge.frozen_code import SideCode
from tunediff.report import pair_plan
from tunediff.report.plan import MOST_DAYS
from tunediff.search_space import duration_s, folder_of
from tunediff.search_space.model import PAIR_SEED_OFFSET
from tunediff.training import probe
from tunediff.tuning import local, resources
from tunediff.tuning.templates import kept

CODE = (".py", ".yaml", ".yml", ".json", ".toml")
"""Endings of files that decide what a training imports."""
NOT_RESUMED = (
    "budget",
    "samples",
    "compile",
    "setup",
    "unit",
    "name",
    "dry_run",
    "seed",
    "reproduce",
)
"""Options of a new comparison besides its rules."""
Say = Callable[..., None]
"""Prints a line: its text, an event and its fields."""


@dataclasses.dataclass(kw_only=True)
class CompareKeywords(VerdictOptions, ProofOptions, JobOptions):
    """Options of the command `compare` that are keywords of `tunediff.run_comparison`."""

    budget: str | float | None = option(
        None, "training seconds of a run, e.g. 90s, 10m (default: 60s)", convert=duration_s
    )
    samples: int | None = option(
        None, "training samples of a run in the place of a budget: equal steps", metavar="N"
    )
    compile: str | None = option(
        None,
        "whether compiling counts as training (default: charged)",
        choices=("charged", "free"),
    )
    setup: str | None = option(
        None,
        "whether what comes before the first batch does (default: free)",
        choices=("charged", "free"),
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
    content: Mapping[str, Any]
    """Its file, `pairs.FILE`."""
    measured: Mapping[str, Any]
    """What was measured of A, if it is of a user's workload."""
    temporary: Path
    """Folder with other revisions of the files, which is removed before the runs."""
    draws_seeds: bool
    """Whether the first seed follows from the code of both sides: the user has named none."""


def resume(options: CompareOptions) -> Path:
    """Return the folder of an earlier comparison. Raises `ConfigError`."""
    machine_options.check(options)
    listeners.check(options.track)
    new = CompareOptions()
    names = [field.name for field in dataclasses.fields(VerdictOptions)]
    names += NOT_RESUMED
    if options.words or any(getattr(options, name) != getattr(new, name) for name in names):
        untrue = "a limit that moves with the results would make its error rates untrue"
        raise ConfigError(
            f"--resume: takes both sides, budget, pairs and rules from the folder: {untrue}"
        )
    storage = Path(options.storage)
    folder = folder_of(str(options.resume), storage, pairs.FILE).resolve()
    remote.check(storage)
    for trial in record.read_trials(folder):
        if not trial.finished:
            remote.pull(folder / "trials" / trial.name, heavy=True)
    pairs.read(folder)
    return folder


@contextlib.contextmanager
def prepare(options: CompareOptions, say: Say) -> Iterator[CompareRequest]:
    """Check what is asked for; yield it while other revisions of its files exist. Raises
    `ConfigError`."""
    machine_options.check(options)
    listeners.check(options.track)
    options.check_proof()
    budget_s = _budget_s(options)
    name = f"compare-{time.strftime('%Y%m%d-%H%M%S')}" if options.name is None else options.name
    remote.check(Path(options.storage))
    folder = Path(options.storage).resolve() / name
    remote.pull(folder / pairs.FILE)
    check_name(name)
    check_new(folder)
    side_words = _sides(options.words)
    with tempfile.TemporaryDirectory(prefix="tunediff-compare-") as temporary:
        sides = [
            _side(words, Path(temporary) / side)
            for words, side in zip(side_words, pairs.SIDES, strict=True)
        ]
        named = any(word.startswith("seed=") for words in side_words for word in words)
        named = named or any(config.seed != PAIR_SEED_OFFSET for config in sides)
        if options.seed is not None:
            allow(not named, "--seed", options.seed, "no seed= beside it")
            seed = {"seed": options.seed}
            sides = [cfg.override(config, seed, check=False) for config in sides]
        counted: Counted = "first" if options.samples is None else "end"
        rules = options.verdict_content(cfg.of(sides[0]).objective, counted)
        most = rules["pairs"]
        allowed = f"at most {MOST_DAYS} days for {most} pairs; --force starts it all the same"
        fits = 2 * most * budget_s <= MOST_DAYS * 86400 or options.force
        allow(fits, "--budget", str(budget_s), allowed)
        # What a cluster elsewhere has is not known before it is asked.
        device = resources.local().device if options.address is None else None
        _refuse_pointless(side_words, sides, most)
        if _are_known(sides, Path(temporary)):
            _refuse_equal(side_words, sides, most, device)
        formats = (config.precision.amp for config in sides)
        machine_options.warn_emulated(formats, options.address)
        content = {
            "a": " ".join(side_words[0]),
            "b": " ".join(side_words[1]),
            "budget_s": float(budget_s),
            **({"samples": options.samples} if options.samples is not None else {}),
            **rules,
            "compile": options.compile or "charged",
            "setup": options.setup or "free",
            "unit": options.unit or "wall",
        }
        measured = _check_sides(sides, side_words, options, say)
        sides = [cfg.found_again(config) for config in sides]
        if measured or _are_known(sides, Path(temporary)):
            _refuse_equal(side_words, sides, most, device)
        draws_seeds = options.seed is None and not named
        yield CompareRequest(
            folder, side_words, sides, content, measured, Path(temporary).resolve(), draws_seeds
        )


def _budget_s(options: CompareOptions) -> float:
    """Return the seconds of a run; 0 where its samples end it. Raises `ConfigError`."""
    if options.samples is None:
        return duration_s(options.budget or "60s", "--budget")
    allow(options.samples > 0, "--samples", options.samples, "a whole number of at least 1")
    allow(options.budget is None, "--budget", options.budget, "none with --samples")
    return 0.0


def _check_sides(
    sides: Sequence[Systems],
    side_words: Sequence[Sequence[str]],
    options: CompareOptions,
    say: Say,
) -> dict[str, Any]:
    """Check files and room of both sides and try users' workloads; return what was measured of
    A."""
    measured = dict[tuple[str, str], dict[str, Any]]()
    for config, (name, *_), side in zip(sides, side_words, pairs.SIDES, strict=True):
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
    """Return what would run and what it costs, as `pair_plan.values` does; time an evaluation for
    it."""
    config = request.sides[0]
    measured = request.measured
    if cfg.of(config).file is None and options.address is None:
        task = announced("looking at the data and timing one evaluation", say)
        with contextlib.nullcontext() if options.dry_run else task:
            of_runs = None
            if not options.dry_run and config.parallel.processes == 1:
                of_runs = functools.partial(kept(local.TRIALS).prepare, config.schema.workload)
            found = probe.before_search(config, True, not options.dry_run, prepared=of_runs)
            measured = {**found}
    names, content = [" ".join(words) for words in request.side_words], request.content
    return pair_plan.values(
        names, request.sides, content["pairs"], content["budget_s"], content["unit"], measured
    )


def create(request: CompareRequest) -> None:
    """Make the folder of a comparison, with both sides and what was asked. Raises `ConfigError`."""
    folder, own_configs = request.folder, list[Any]()
    with writing("--storage", folder):
        new = folder.with_name(f".{folder.name}-{os.getpid()}")
        for config, side in zip(request.sides, pairs.SIDES, strict=True):
            (new / side).mkdir(parents=True)
            own_configs.append(cfg.take_along(config, new / side))
            _replace_links(new / side, request.temporary)
            write_text(new / side / "config.yaml", cfg.dump(own_configs[-1], folder=new / side))
        codes = [SideCode.of(new / side) for side in pairs.SIDES]
        freeze(new, own_configs, codes, request.draws_seeds)
        write_text(new / pairs.FILE, cfg.to_yaml(dict(request.content)))
        new.rename(folder)  # a folder of that name is complete, whenever this process is killed


def freeze(new: Path, configs: Sequence[Any], codes: Sequence[SideCode], draws: bool) -> None:
    """Write the code of both sides into the folder of a comparison, and give them their seeds."""
    seed = configs[0].seed
    if draws:
        seed = frozen_code.drawn_seed([code.digest for code in codes])
        for config, side in zip(configs, pairs.SIDES, strict=True):
            seeded = cfg.override(config, {"seed": seed}, check=False)
            write_text(new / side / "config.yaml", cfg.dump(seeded, folder=new / side))
    frozen_code.write(new, codes, seed, draws)


def _replace_links(folder: Path, temporary: Path) -> None:
    """Replace links into a folder that is removed before the runs by copies of the data."""
    for link in [path for path in folder.rglob("*") if path.is_symlink()]:
        data = link.resolve()
        if (
            data.is_relative_to(temporary) and data.exists()
        ):  # git may not hold what a link in a revision names
            link.unlink()
            if data.is_dir():
                shutil.copytree(data, link, symlinks=True)
            else:
                shutil.copy2(data, link)


def _sides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A and B, each with what goes on top of it. Raises `ConfigError`."""
    sides: list[list[str]] = []
    for word in words:
        if "=" not in word:
            sides.append([word])
        elif not sides:
            raise ConfigError(
                f"command line: {word}: on top of what? knob=value stands behind A or B"
            )
        else:
            sides[-1].append(word)
    if len(sides) == 1 and len(sides[0]) > 1:
        sides = [[sides[0][0]], sides[0]]
    if len(sides) != 2:
        message_words = " ".join(words) or "nothing"
        needed = "needs A and B, or A and knob=value for what B changes"
        raise ConfigError(
            f"command line: {message_words}: {needed}{cfg.missing_equals_hint(words)}"
        )
    return sides[0], sides[1]


def _side(words: Sequence[str], elsewhere: Path) -> Systems:
    """The configuration of one side; another revision of its file is laid out in `elsewhere`."""
    name, at, revision = words[0].rpartition("@")
    if at and name.partition(":")[0].endswith(".py"):
        file, colon, preset = name.partition(":")
        name = f"{_at_revision(Path(file), revision, elsewhere)}{colon}{preset}"
    else:
        name = words[0]
    config: Systems = cfg.named(Path(name), words[1:], "command line")
    return cfg.override(config, {"seed": config.seed + PAIR_SEED_OFFSET})


def _at_revision(file: Path, revision: str, target: Path) -> Path:
    """Write the folder of a file as it was into `target`, and return the file.

    The folder is that above its package, from which it may import. Raises `ConfigError`.
    """
    root = file.absolute().parent
    while (root / "__init__.py").is_file():
        root = root.parent
    copy = target / file.absolute().relative_to(root)

    def inside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
        try:
            return tarfile.data_filter(member, folder)
        except tarfile.FilterError:  # a link out of the repository, such as one to data
            return None

    where = f"{file}@{revision}"
    commit = commit_of(root, revision, where)
    archive = git(root, "archive", "--format=tar", commit, ".", where=where)
    with tarfile.open(fileobj=io.BytesIO(archive)) as content:
        content.extractall(target, filter=inside)
    if not copy.is_file():
        raise ConfigError(f"{where}: no such file in that revision")
    return copy


def _refuse_pointless(
    side_words: Sequence[Sequence[str]], sides: Sequence[Systems], most: int
) -> None:
    """Refuse sides that cannot be compared. Raises `ConfigError`."""
    for config in sides:
        last = f"the last of {most} pairs"
        cfg.override(config, {"seed": config.seed + most - 1}, where=last, check=False)
    one, two = (cfg.of(config).objective for config in sides)
    if one != two:
        raise ConfigError(
            f"{side_words[1][0]}: is judged by {two.name} ({two.mode}), {side_words[0][0]} by"
            f" {one.name} ({one.mode})"
        )
    _refuse_other_protocol(*sides)
    if 0 < abs(sides[1].seed - sides[0].seed) < most:
        seed = sides[1].seed - PAIR_SEED_OFFSET
        raise ConfigError(
            f"seed: {seed} is not allowed: with {most} pairs both sides would use some seeds;"
            f" allowed: A's, or at least {most} away from it"
        )


def _are_known(sides: Sequence[Systems], temporary: Path) -> bool:
    """Return whether fingerprints say that sides are equal that were not tried.

    A file may import by name, later, what lies beside it: that must be equal too. `temporary`: the
    folder with other revisions.
    """
    files = [cfg.of(config).file for config in sides]
    roots = {file.root for file in files if file is not None}
    if len(roots) < 2:
        return True
    revisions = [root for root in roots if root.is_relative_to(temporary)]
    for root in roots.difference(revisions) if revisions else ():  # the working copy
        if git(root, "ls-files", "--others", "--exclude-standard", "*.py", where=str(root)):
            return False
    pairs_of_roots = [(one, other) for one in revisions for other in roots - {one}]
    return bool(revisions) and not any(itertools.starmap(_lacks, pairs_of_roots))


def _lacks(revision: Path, other: Path) -> bool:
    """Return whether a folder lacks a file of code or settings of a revision, or has another."""
    for path in revision.rglob("*"):
        if path.suffix in CODE and path.is_file():
            counterpart = other / path.relative_to(revision)
            if not counterpart.is_file() or not filecmp.cmp(path, counterpart, shallow=False):
                return True
    return False


def _refuse_equal(
    side_words: Sequence[Sequence[str]], sides: Sequence[Systems], most: int, device: str | None
) -> None:
    """Refuse sides that are equal on this device, which may be unknown. Raises `ConfigError`."""
    effective = [cfg.effective(one, device) if device is not None else one for one in sides]
    prints = {cfg.fingerprint(cfg.override(one, {"seed": 0}, check=False)) for one in effective}
    if len(prints) == 1 and sides[0].seed == sides[1].seed:
        why = cfg.not_effective(sides[1], device) if device is not None else {}
        changes = cfg.differences(sides[1], sides[0])
        idle = "".join(f" ({knob}: {reason})" for knob, reason in why.items() if knob in changes)
        hint = f"change a knob, or its seed by at least {most} to see the noise"
        raise ConfigError(
            f"{' '.join(side_words[1])}: is what A is here, on the same seeds{idle}; {hint}"
        )


def _refuse_other_protocol(a: Systems, b: Systems) -> None:
    """Refuse sides that are evaluated differently. Raises `ConfigError`."""
    a_values, b_values = cfg.flat(a), cfg.flat(b)
    # The section `data` of our workloads says what a model is judged against.
    has_images = any(isinstance(getattr(side.knobs, "data", None), Data) for side in (a, b))
    sections = ("evaluation.", "data.") if has_images else ("evaluation.",)
    for knob in sorted(name for name in a_values | b_values if name.startswith(sections)):
        if has_images and knob == "data.horizontal_flip":
            continue  # of the training alone
        value, expected = b_values.get(knob), a_values.get(knob)
        allowed = f"{expected!r}, as A has it: both are judged alike"
        allow(value == expected, knob, value, allowed)


def _check(config: Systems, name: str, say: Say) -> dict[str, Any]:
    """Try the workload of the side called `name`; return what was measured of it, as
    `pair_plan.values` takes it."""
    from tunediff.training import check  # imports torch

    try:
        checked = check.before_search(config, lambda line: say(f"{name}: {line}"))
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
