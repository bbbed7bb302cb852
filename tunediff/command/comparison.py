"""Compare two commands, two values of a parameter, or two revisions: pairs of runs, without Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import pairs
from tunediff.command import trial
from tunediff.command.check import check
from tunediff.command.definition import CommandDefinition
from tunediff.command.workload import CommandSystems, common_type, make
from tunediff.config import ConfigError, Values
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.files import write_text
from tunediff.core.journal import repeat_lost
from tunediff.core.lock import alone
from tunediff.search_space.model import PAIR_SEED_OFFSET
from tunediff.tuning import sessions

Say = Callable[..., None]
SOURCE = "source"
"""Folder of a side with the git worktree of its revision."""
EVERY_S = 30.0
"""Seconds between two lines about a run."""


@dataclasses.dataclass(frozen=True)
class Side:
    """A or B."""

    name: str
    """How messages call it."""
    definition: CommandDefinition
    parameters: Values
    revision: str | None = None


def values_of(words: Sequence[str], where: str) -> list[dict[str, Any]]:
    """Return the groups of `name=value`; a name that comes again begins the next one.

    A parameter has one type in all groups. Raises `ConfigError`.
    """
    groups: list[dict[str, Any]] = [{}]
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ConfigError(f"{where}: {word} is not understood; allowed: name=value")
        if name in groups[-1]:
            groups.append({})
        groups[-1][name] = _plain(value)
    names = {name for group in groups for name in group}
    types = {name: common_type(group[name] for group in groups if name in group) for name in names}
    return [{name: types[name](value) for name, value in group.items()} for group in groups]


def _plain(value: str) -> Any:
    """Return a word as a number, true or false, or as the text that it is."""
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def sides(
    commands: Sequence[str],
    revisions: Sequence[str],
    words: Sequence[str],
    settings: Mapping[str, Any],
) -> tuple[Side, Side]:
    """Return A and B of two commands, two revisions, or two groups of values. Raises `ConfigError`.

    `settings`: further fields of `CommandDefinition`.
    """
    where = "command line"
    groups = values_of(words, where)
    counts = {"--run": len(commands), "--at": len(revisions), "groups of name=value": len(groups)}
    twice = [name for name, count in counts.items() if count == 2]
    if not commands or len(twice) != 1 or max(counts.values()) > 2:
        given = ", ".join(f"{count} × {name}" for name, count in counts.items())
        raise ConfigError(
            f"{where}: {given}: is not allowed; allowed: A and B differ in one thing: two --run, two"
            " --at, or name=value given twice (lr=3e-4 lr=1e-3)"
        )

    def side(index: int) -> Side:
        command = commands[min(index, len(commands) - 1)]
        revision = revisions[min(index, len(revisions) - 1)] if revisions else None
        definition = CommandDefinition(command=command, **settings)
        definition.check(where)
        values = groups[min(index, len(groups) - 1)]
        if len(commands) == 2 and not definition.template.takes_all:
            named = definition.template.parameters
            values = {name: value for name, value in values.items() if name in named}
        shown = " ".join(
            f"{name}={text.number(value) if isinstance(value, float) else value}"
            for name, value in values.items()
        )
        name = {"--run": command, "--at": str(revision)}.get(twice[0], shown)
        return Side(name, definition, values, revision)

    both = side(0), side(1)
    if both[0] == both[1]:
        raise ConfigError(f"{where}: {both[1].name}: is what A is; A and B must differ")
    return both


# ---- the folder of a comparison
def create(
    folder: Path, both: tuple[Side, Side], budget_s: float | None, most: int, within: float | None
) -> None:
    """Make the folder of a comparison: both commands, and worktrees of their revisions."""
    new = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        for name, side in zip(pairs.SIDES, both, strict=True):
            (new / name).mkdir(parents=True)
            definition = side.definition
            if side.revision not in (None, "."):
                at = worktree(folder / name / SOURCE, new / name / SOURCE, str(side.revision))
                definition = dataclasses.replace(definition, folder=str(at))
            else:
                definition = dataclasses.replace(
                    definition, folder=str(Path(definition.folder).absolute())
                )
            workload = make(definition, side.parameters, "command line", at=f"-{name}")
            config = cfg.override(
                workload.schema.default(), {"seed": PAIR_SEED_OFFSET}, check=False
            )
            kept = cfg.take_along(config, new / name)
            write_text(new / name / "config.yaml", cfg.dump(kept, folder=new / name))
        content = {
            "a": both[0].name, "b": both[1].name, "budget_s": budget_s or 0.0, "pairs": most, "within": within,
            "compile": "charged", "setup": "charged", "unit": "wall",
        }  # fmt: skip
        write_text(new / pairs.FILE, cfg.to_yaml(content))
        new.rename(folder)  # a folder of that name is complete, whenever this process is killed
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    for name in pairs.SIDES:
        _git(Path(), "worktree", "repair", str(folder / name / SOURCE), check=False)


def worktree(later: Path, path: Path, revision: str) -> Path:
    """Check a revision out into `path`, which becomes `later`; return the folder to run in there.

    What git ignores at the top of the repository (data, say) is linked. Raises `ConfigError`.
    """
    top = Path(_git(Path(), "rev-parse", "--show-toplevel"))
    commit = _git(top, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    _git(top, "worktree", "add", "--detach", "--force", str(path.absolute()), commit)
    for entry in top.iterdir():
        hidden = entry.name.startswith(".") or entry.name in ("__pycache__", "ray_results")
        if not hidden and not (path / entry.name).exists():
            (path / entry.name).symlink_to(entry)
    return later.absolute() / Path.cwd().relative_to(top)


def _git(folder: Path, *words: str, check: bool = True) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=check
        )
    except (OSError, subprocess.CalledProcessError) as error:
        message = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        raise ConfigError(f"--at: {words[-1]}: {message}") from None
    return done.stdout.strip()


def remove_worktrees(folder: Path) -> None:
    """Remove the worktrees of a comparison that is over; the revisions stay in its file."""
    for name in pairs.SIDES:
        if (path := folder / name / SOURCE).is_dir():
            _git(Path(), "worktree", "remove", "--force", str(path), check=False)


# ---- running
def checked(both: tuple[Side, Side], budget_s: float | None, say: Say) -> None:
    """Try both commands; warn of what cannot be right. Raises `ConfigError`."""
    tried: list[CommandDefinition] = []
    for name, side, other in zip(pairs.SIDES, both, reversed(both), strict=True):
        if side.definition in tried or side.revision not in (None, "."):
            continue
        tried.append(side.definition)
        workload = make(side.definition, side.parameters, "command line", at=f"-check-{name}")
        config: CommandSystems = workload.schema.default()
        run = trial.run_of(config, Path(), budget_s)
        same = side.definition == other.definition
        ends = {
            key: [value]
            for key, value in other.parameters.items()
            if key in side.parameters and same
        }
        result = check(run, ends, functools.partial(_labelled, say, name))
        say(
            f"{name}: its first value after {result.first_value_s:.1f} s; the clock is that of: {result.clock}"
        )
        for warning in result.warnings:
            say(f"WARNING: {name}: {warning}")


def _labelled(say: Say, name: str, line: str) -> None:
    say(f"{name}: {line}")


def run_pairs(folder: Path, command: str, say: Say) -> pairs.Pairs:
    """Run pairs until it is decided; every other pair in the opposite order.

    A machine that slows down then favours neither side. `command`: what is typed to go on.
    Returns the comparison.
    """
    with alone(folder), sessions.noted(folder, command):
        repeat_lost(folder)
        while not (now := pairs.read(folder)).over:
            for number in _open_runs(now):
                run_one(now, number, say)
                if pairs.read(folder).over:
                    break
    return now


def _open_runs(now: pairs.Pairs) -> list[int]:
    """Return the numbers of the runs that the first pair without a result lacks, in their order."""
    number = next(
        (
            i
            for i, pair in enumerate(now.runs)
            if any(run is None or not run.finished for run in pair)
        ),
        len(now.runs),
    )
    both = [2 * number, 2 * number + 1]
    order = both[::-1] if number % 2 else both
    ended = {run.number for pair in now.runs for run in pair if run is not None and run.finished}
    return [index for index in order if index not in ended]


def run_one(now: pairs.Pairs, number: int, say: Say) -> None:
    """Run one side of a pair, and say how it goes."""
    side, seed = pairs.SIDES[number % 2], now.configs[number % 2].seed + number // 2
    config = cfg.override(now.configs[number % 2], {"seed": seed}, check=False)
    folder, called = now.folder / "trials" / f"t{number:04d}", f"{side} seed {seed}"
    run = trial.run_of(config, folder.absolute(), now.budget_s or None)
    say(f"{called} start", "start", trial=folder.name, side=side, seed=seed)
    said = time.monotonic()
    for point in trial.follow(run, config, {"side": side, "seed": seed}, number):
        if time.monotonic() - said >= EVERY_S:
            said = time.monotonic()
            say(f"{called}  {point.train_s:.0f} s  {_value(now, point)}")
    ended = record.read_trial(folder)
    assert ended is not None
    value = ended.value(now.metric.name)
    words = (
        _value(now, ended.points[-1]) if value is not None else f"{ended.status}: {ended.reason}"
    )
    at = f" at {ended.points[-1].train_s:.1f} s" if ended.points else ""
    fields = {"trial": folder.name, "side": side, "seed": seed, "status": ended.status}
    say(f"{called}  {words}{at}", "end", **fields, reason=ended.reason, value=value)


def _value(now: pairs.Pairs, point: Any) -> str:
    value = point.get(now.metric.name)
    return f"{now.metric.label} {text.number(value)}" if value is not None else ""


def clocks(now: pairs.Pairs) -> Iterator[str]:
    """Yield what the seconds of the runs are, for the end of a comparison."""
    found = [
        clock
        for pair in now.runs
        for run in pair
        if run is not None
        and (clock := trial.clock_of(now.folder / "trials" / run.name)) is not None
    ]
    if not found:
        return
    kinds = sorted({clock.kind for clock in found})
    share = sum(clock.start_up_s for clock in found) / max(
        1e-9, sum(clock.process_s for clock in found)
    )
    yield (
        f"The clock: {', '.join(kinds)}; {share:.0%} of the processes' seconds came before"
        f" {'it began' if kinds != ['process'] else 'their first value'}."
    )
    worst = max((clock.disagreement or 0.0 for clock in found), key=abs)
    if worst:
        yield f"The commands' own seconds differ by up to {worst:+.0%} from the judge's."


def least_within(words: str | None, mode: str) -> float | None:
    """Return `--resolution` as a share of A's value, or in units of the metric for `max`."""
    if words is None:
        return None
    share = mode == "min"
    try:
        value = float(words.removesuffix("%")) / (100 if share else 1)
    except ValueError:
        value = 0.0
    if not (0 < value < math.inf and words.endswith("%") == share):
        allowed = "a share such as 2%" if share else "a number above 0, in units of the metric"
        raise ConfigError(f"--resolution: {words} is not allowed; allowed: {allowed}")
    return value
