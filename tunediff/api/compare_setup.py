"""Set up a comparison: read both sides, refuse what cannot be compared, and make its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import cli
from tunediff import config as cfg
from tunediff.analysis import pairs
from tunediff.config import ConfigError, Systems
from tunediff.core import listeners, machine_options, remote, text
from tunediff.core import trial_record as record
from tunediff.core.files import write_text
from tunediff.core.progress import announced
from tunediff.data.knobs import Data
from tunediff.report import pair_plan
from tunediff.report.plan import MOST_DAYS
from tunediff.search_space import duration_s, folder_of
from tunediff.search_space.model import PAIR_SEED_OFFSET
from tunediff.training import probe
from tunediff.tuning import resources

MOST = 12
"""Pairs of runs at most, unless asked otherwise."""
Say = Callable[..., None]
"""Prints a line: its text, an event and its fields."""


@dataclasses.dataclass
class CompareOptions:
    """What is asked of a comparison: the arguments of the command and of
    `tunediff.run_comparison`."""

    words: Sequence[str] = ()
    """A and B, each with `knob=value` behind it."""
    budget: str | None = None
    unit: str | None = None
    pairs: int | None = None
    resolution: str | None = None
    compile: str | None = None
    setup: str | None = None
    name: str | None = None
    storage: Path = text.STORAGE
    resume: str | None = None
    track: str | None = None
    address: str | None = None
    cpus: int | None = None
    gpus: int | None = None
    force: bool = False
    no_check: bool = False
    dry_run: bool = False

    def command(self) -> str:
        """Return the command that asks for the same."""
        return cli.command_of("compare", CompareOptions, self)


@dataclasses.dataclass(frozen=True)
class CompareRequest:
    """A new comparison that has been checked."""

    folder: Path
    side_words: tuple[list[str], list[str]]
    sides: list[Systems]
    """Configurations of A and B."""
    content: Mapping[str, Any]
    """Its file, `pairs.FILE`."""
    checked: Mapping[str, dict[str, Any]]
    """What was measured of users' workloads, by the fingerprint of the configuration."""
    temporary: Path
    """Folder with other revisions of the files, which is removed before the runs."""


def resume(options: CompareOptions) -> Path:
    """Return the folder of an earlier comparison. Raises `ConfigError`."""
    machine_options.check(options)
    listeners.check(options.track)
    fixed = (options.name, options.budget, options.unit, options.pairs, options.resolution, options.compile,
             options.setup, options.dry_run or None)  # fmt: skip
    if options.words or any(option is not None for option in fixed):
        untrue = "a limit that moves with the results would make its error rates untrue"
        raise ConfigError(
            f"--resume: takes both sides, budget, pairs and resolution from the folder: {untrue}"
        )
    folder = folder_of(str(options.resume), options.storage, pairs.FILE).resolve()
    remote.check(options.storage)
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
    budget_s = duration_s("60s" if options.budget is None else options.budget, "--budget")
    most = MOST if options.pairs is None else options.pairs
    cli.allow(
        3 <= most <= 100,
        "--pairs",
        most,
        "a whole number from 3 to 100: two say nothing of their own noise",
    )
    name = f"compare-{time.strftime('%Y%m%d-%H%M%S')}" if options.name is None else options.name
    remote.check(options.storage)
    folder: Path = options.storage.resolve() / name
    remote.pull(folder / pairs.FILE)
    cli.check_name(name, folder.parent)
    cli.allow(2 * most * budget_s <= MOST_DAYS * 86400 or options.force, "--budget", options.budget,
              f"at most {MOST_DAYS} days for {most} pairs; --force starts it all the same")  # fmt: skip
    side_words = _sides(options.words)
    with tempfile.TemporaryDirectory(prefix="tunediff-compare-") as elsewhere:
        sides = [
            _side(words, Path(elsewhere) / side)
            for words, side in zip(side_words, pairs.SIDES, strict=True)
        ]
        within = _resolution(options.resolution, sides[0])
        # What a cluster elsewhere has is not known before it is asked.
        device = resources.local().device if options.address is None else None
        _refuse_pointless(side_words, sides, most, device)
        cli.warn_emulated((config.precision.amp for config in sides), options.address)
        content = {
            "a": " ".join(side_words[0]), "b": " ".join(side_words[1]), "budget_s": budget_s, "pairs": most,
            "within": within, "compile": options.compile or "charged",
            "setup": options.setup or "free", "unit": options.unit or "wall",
        }  # fmt: skip
        names = [
            f"{side.upper()}, {words[0]}"
            for side, words in zip(pairs.SIDES, side_words, strict=True)
        ]
        checked = _check_sides(sides, names, options, say)
        yield CompareRequest(folder, side_words, sides, content, checked, Path(elsewhere).resolve())


def _check_sides(
    sides: Sequence[Systems], names: Sequence[str], options: CompareOptions, say: Say
) -> dict[str, dict[str, Any]]:
    """Check files and room of both sides and try users' workloads; return what was measured, by
    fingerprint."""
    checked: dict[str, dict[str, Any]] = {}
    for config, name in zip(sides, names, strict=True):
        cli.check_here(config, True)
        if options.address is None:
            resources.divided(
                [resources.local()], *needs([config]), strategies=[config.parallel.strategy]
            )
        tried = (
            not options.no_check and not options.dry_run and cfg.fingerprint(config) not in checked
        )
        if cfg.of(config).file is not None and tried:
            checked[cfg.fingerprint(config)] = _check(config, name, say)
    return checked


def planned(request: CompareRequest, options: CompareOptions, say: Say) -> dict[str, Any]:
    """Return what would run and what it costs, as `pair_plan.values` does; time an evaluation for
    it."""
    config = request.sides[0]
    measured = request.checked.get(cfg.fingerprint(config), {})
    if cfg.of(config).file is None and options.address is None:
        measured = _evaluation(config, options.dry_run, say)
    names, content = [" ".join(words) for words in request.side_words], request.content
    return pair_plan.values(
        names, request.sides, content["pairs"], content["budget_s"], content["unit"], measured
    )


def create(request: CompareRequest) -> None:
    """Make the folder of a comparison, with both sides and what was asked. Raises `ConfigError`."""
    folder = request.folder
    with cli.writing("--storage", folder):
        new = folder.with_name(f".{folder.name}-{os.getpid()}")
        for config, side in zip(request.sides, pairs.SIDES, strict=True):
            (new / side).mkdir(parents=True)
            own = cfg.take_along(config, new / side)
            _replace_links(new / side, request.temporary)
            write_text(new / side / "config.yaml", cfg.dump(own, folder=new / side))
        write_text(new / pairs.FILE, cfg.to_yaml(dict(request.content)))
        new.rename(folder)  # a folder of that name is complete, whenever this process is killed


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


def _at_revision(file: Path, revision: str, elsewhere: Path) -> Path:
    """The file as it was, with its whole folder, or that above its package, which it may import
    from.

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
            message = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
            raise ConfigError(f"{file}@{revision}: {message.splitlines()[-1]}") from None
        return done.stdout

    def inside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
        try:
            return tarfile.data_filter(member, folder)
        except tarfile.FilterError:  # a link out of the repository, such as one to data
            return None

    # Its hash: git would take a revision that begins with a dash for an option, such as a file to
    # write.
    resolved = git("rev-parse", "--verify", "--end-of-options", revision).decode().strip()
    archive = git("archive", "--format=tar", resolved, ".")
    with tarfile.open(fileobj=io.BytesIO(archive)) as content:
        content.extractall(elsewhere, filter=inside)
    if not there.is_file():
        raise ConfigError(f"{file}@{revision}: no such file in that revision")
    return there


def _resolution(text: str | None, config: Systems) -> float | None:
    """A share of A's value where the metric falls, else in its units, as values are compared.
    Raises `ConfigError`."""
    if text is None:
        return None
    metric = cfg.of(config).objective
    share = metric.mode == "min"
    allowed = (
        f"a share of A's {metric.name} such as 2%"
        if share
        else f"a number above 0, in units of {metric.name}"
    )
    try:
        value = float(text.removesuffix("%") if share else text) / (100 if share else 1)
    except ValueError:
        value = 0.0
    cli.allow(0 < value < math.inf and text.endswith("%") == share, "--resolution", text, allowed)
    return value


def _refuse_pointless(
    side_words: Sequence[Sequence[str]], sides: Sequence[Systems], most: int, device: str | None
) -> None:  # fmt: skip
    """One configuration on the same seeds, runs that would count twice, results that cannot be
    compared.

    `device`: None where it is not known.
    """
    for config in sides:
        cfg.override(
            config, {"seed": config.seed + most - 1}, where=f"the last of {most} pairs", check=False
        )
    one, two = (cfg.of(config).objective for config in sides)
    if one != two:
        raise ConfigError(
            f"{side_words[1][0]}: is judged by {two.name} ({two.mode}), {side_words[0][0]} by"
            f" {one.name} ({one.mode})"
        )
    ours, theirs = map(cfg.flat, sides)
    # Our section `data` says which real images a model is judged against, or which are held out.
    has_images = any(isinstance(getattr(config.knobs, "data", None), Data) for config in sides)
    sections = ("evaluation.", "data.") if has_images else ("evaluation.",)
    for knob in sorted(name for name in ours.keys() | theirs.keys() if name.startswith(sections)):
        if has_images and knob == "data.horizontal_flip":
            continue  # of the training alone
        value, allowed = (values.get(knob) for values in (theirs, ours))
        cli.allow(value == allowed, knob, value, f"{allowed!r}, as A has it: both are judged alike")
    seed_distance = sides[1].seed - sides[0].seed
    here = [cfg.effective(config, device) if device is not None else config for config in sides]
    alike = [cfg.override(config, {"seed": 0}, check=False) for config in here]
    if len(set(map(cfg.fingerprint, alike))) == 1 and not seed_distance:
        why = cfg.not_effective(sides[1], device) if device is not None else {}
        changes = cfg.differences(sides[1], sides[0])
        idle = "".join(f" ({knob}: {reason})" for knob, reason in why.items() if knob in changes)
        hint = f"change a knob, or its seed by at least {most} to see the noise"
        raise ConfigError(
            f"{' '.join(side_words[1])}: is what A is here, on the same seeds{idle}; {hint}"
        )
    if 0 < abs(seed_distance) < most:
        seed, allowed = sides[1].seed - PAIR_SEED_OFFSET, f"A's, or at least {most} away from it"
        raise ConfigError(
            f"seed: {seed} is not allowed: with {most} pairs both sides would use some seeds;"
            f" allowed: {allowed}"
        )


def _check(config: Systems, name: str, say: Say) -> dict[str, Any]:
    """Try the workload of the side called `name`; return what was measured of it, as
    `pair_plan.values` takes it."""
    from tunediff.training import check  # imports torch

    try:
        checked = check.before_search(config, lambda line: say(f"{name}: {line}"))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    unread = (
        [f"train(trial) never reads {', '.join(checked['unread'])}"] if checked["unread"] else []
    )
    for line in [*checked["warnings"], *unread]:
        say(f"WARNING: {name}: {line}")
    keys = ("evaluation_s", "other_load_share", "disturbed")
    return {key: value for key, value in checked.items() if key in keys}


def _evaluation(config: Systems, dry_run: bool, say: Say) -> dict[str, Any]:
    """Time one evaluation, look at the data and return what `pair_plan.values` takes.

    Raises `ConfigError` for data that cannot be used.
    """
    silent = contextlib.nullcontext()
    with silent if dry_run else announced("looking at the data and timing one evaluation", say):
        return {**probe.before_search(config, evaluates=True, prepare=not dry_run)}


def needs(configs: Sequence[Systems]) -> tuple[list[int], list[str], str, bool]:
    """What `resources.divided` takes besides the machine."""
    sizes = sorted({config.parallel.workers for config in configs})
    values = [value for config in configs for value in resources.gpu_only(config)]
    return sizes, values, "command line", True
