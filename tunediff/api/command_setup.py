"""Set up a comparison of commands: read both sides, try them, and make its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import sides as side_files
from tunediff.api.command_options import CommandCompareOptions
from tunediff.api.compare_folder import freeze
from tunediff.api.compare_setup import TWIN, Say, check_days, new_folder, twin
from tunediff.command import trial, worktrees
from tunediff.command.check import check
from tunediff.command.definition import CommandDefinition, honesty
from tunediff.command.template import shown
from tunediff.command.workload import CommandSystems, common_type, make
from tunediff.config import ConfigError, Metric, Values
from tunediff.core import text
from tunediff.core.files import write_text
from tunediff.core.refusals import allow, writing
from tunediff.experiment.model import Experiment
from tunediff.judge.frozen_code import SideCode
from tunediff.report import plan
from tunediff.search_space.model import PAIR_SEED_OFFSET

WHERE = "command line"


@dataclasses.dataclass(frozen=True)
class Side:
    """A or B."""

    name: str
    """How messages call it."""
    definition: CommandDefinition
    parameters: Values
    revision: str | None = None

    @property
    def in_worktree(self) -> bool:
        return self.revision not in (None, worktrees.WORKING_COPY)

    def configuration(self, at: str, folder: str | Path) -> CommandSystems:
        """Return its configuration, which runs in `folder`; `at`: names it in this process."""
        definition = dataclasses.replace(self.definition, folder=str(Path(folder).absolute()))
        config: CommandSystems = make(
            definition, self.parameters, WHERE, at=f"-{at}"
        ).schema.default()
        return cfg.override(config, {"seed": PAIR_SEED_OFFSET}, check=False)


@dataclasses.dataclass(frozen=True)
class CommandCompareRequest:
    """A new comparison of commands that has been checked."""

    folder: Path
    sides: tuple[Side, Side]
    budget_s: float | None
    """Seconds of a run; None: it runs to its own end."""
    experiment: Experiment
    """See `VerdictOptions.experiment`."""
    seed: int | None = None
    """Seed of the first pair; None: it follows from the code of both sides."""

    @property
    def max_pairs(self) -> int:
        return self.experiment.test.pairs

    @property
    def at_once(self) -> int:
        """Return how many runs there are at the same time."""
        return self.experiment.devices


def prepare(options: CommandCompareOptions) -> CommandCompareRequest:
    """Check what is asked for. Raises `ConfigError`."""
    folder, both = new_folder(options), sides(options)
    budget_s = options.budget_s
    for side in both:
        side.definition.template.check(list(side.parameters), WHERE, same_seed=options.same_seed)
        side.definition.check_places(budget_s, "--run")
    definition = both[0].definition
    needed = [side.definition.gpus for side in both if side.definition.gpus > 1]
    allow(not (options.parallel and needed), "gpus", needed, "1 with --parallel")
    rules = options.experiment(Metric(definition.objective, definition.mode), options.counted)
    check_days(budget_s or 0.0, rules.test.pairs, options.force)
    return CommandCompareRequest(folder, both, budget_s, rules, options.seed)


# ---- two sides
def sides(options: CommandCompareOptions) -> tuple[Side, Side]:
    """Return A and B: of two commands, revisions, or groups of values. Raises `ConfigError`."""
    commands, revisions, groups = options.run, options.at, values_of(options.words, WHERE)
    counts = {"--run": len(commands), "--at": len(revisions), "groups of name=value": len(groups)}
    twice = [name for name, count in counts.items() if count == 2]
    if not commands or len(twice) != (not options.equal) or max(counts.values()) > 2:
        if len(commands) == 1:  # a mistyped name is no second value
            template = options.definition(commands[0], WHERE).template
            template.check([*set().union(*groups)], WHERE, same_seed=options.same_seed)
        given = ", ".join(f"{count} × {name}" for name, count in counts.items())
        raise ConfigError(
            f"{WHERE}: {given}: is not allowed; allowed: A and B differ in one thing: two --run,"
            " two --at, or name=value given twice (lr=3e-4 lr=1e-3); in nothing with --equal"
        )

    def side(index: int) -> Side:
        command = commands[min(index, len(commands) - 1)]
        revision = revisions[min(index, len(revisions) - 1)] if revisions else None
        definition = options.definition(command, WHERE)
        values = {**groups[0], **groups[min(index, len(groups) - 1)]}
        if len(commands) == 2 and not definition.template.takes_all:
            named = definition.template.parameters
            values = {name: value for name, value in values.items() if name in named}
        shown = " ".join(
            f"{name}={text.number(value) if isinstance(value, float) else value}"
            for name, value in groups[min(index, len(groups) - 1)].items()
            if len(groups) < 2 or name in groups[1]
        )
        names = {"--run": definition.title, "--at": str(revision)}
        name = names.get(twice[0], shown) if twice else definition.title + TWIN * index
        return Side(name, definition, values, revision)

    both = side(0), side(1)
    for name in both[0].definition.template.parameters:
        if name in both[1].parameters.keys() - both[0].parameters.keys():
            first = next(iter(groups[1]))
            raise ConfigError(
                f"{WHERE}: {name}={both[1].parameters[name]}: stands behind the second {first}=, so"
                f" that only B has it; allowed: before the first {first}=, for both"
            )
    if both[0] == both[1]:
        hint = "A and B must differ, or be compared by --equal"
        raise ConfigError(f"{WHERE}: {both[1].name}: is what A is; {hint}")
    return both


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
        groups[-1][name] = value
    names = {name for group in groups for name in group}
    for name in names:
        texts = [group[name] for group in groups if name in group]
        kind = common_type(map(_plain, texts))
        # The program gets what was typed: 007, 1e3 and 1_000 are no numbers on the way
        if kind in (int, float) and all(shown(kind(value)) == value for value in texts):
            convert: Callable[[str], Any] = kind
        else:
            convert = _plain if kind is bool else str
        for group in groups:
            if name in group:
                group[name] = convert(group[name])
    return groups


def _plain(value: str) -> Any:
    """Return a word as a number, true or false, or as the text that it is."""
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


# ---- plan and check
def planned(request: CommandCompareRequest) -> dict[str, Any]:
    """Return what would run, as `plan.of_pairs` does, and what differs from workloads."""
    configs = [side.configuration(f"plan-{name}", Path()) for name, side in _named(request)]
    names = [side.name for side in request.sides]
    planned = plan.of_pairs(
        names, configs, request.max_pairs, request.budget_s or 0.0, "wall", {"evaluation_s": 0.0},
        request.at_once,
    )  # fmt: skip
    definitions = [side.definition for side in request.sides]
    objective = f"{definitions[0].objective} ({definitions[0].mode})"
    return {**planned, "objective": objective, "notes": honesty(definitions)}


def _named(request: CommandCompareRequest) -> list[tuple[str, Side]]:
    return list(zip(side_files.SIDES, request.sides, strict=True))


def try_sides(request: CommandCompareRequest, say: Say) -> None:
    """Try both commands, each at its revision; warn of mistakes. Raises `ConfigError`."""
    tried: list[tuple[CommandDefinition, str | None]] = []
    for name, side in _named(request):
        if (side.definition, side.revision) in tried:
            continue
        tried.append((side.definition, side.revision))
        with contextlib.ExitStack() as stack:
            folder = Path()
            if side.in_worktree:
                new = tempfile.TemporaryDirectory(prefix="tunediff-check-")
                scratch = Path(stack.enter_context(new))
                stack.callback(worktrees.remove, scratch / worktrees.SOURCE)
                folder = worktrees.add(scratch / worktrees.SOURCE, str(side.revision))
            _try(name.upper(), side, folder, request.budget_s, say)


def _try(label: str, side: Side, folder: Path, budget_s: float | None, say: Say) -> None:
    run = trial.run_of(side.configuration(f"check-{label}", folder), Path(), budget_s)
    try:
        check(run, lambda line: say(f"{label}: {line}"))
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None


# ---- the folder
def create(request: CommandCompareRequest) -> None:
    """Make a comparison's folder: commands, worktrees of revisions. Raises `ConfigError`."""
    folder = request.folder
    new, codes = folder.with_name(f".{folder.name}-{os.getpid()}"), []
    configs = list[Any]()
    with writing("--storage", folder), contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, new, ignore_errors=True)
        for name, side in _named(request):
            (new / name).mkdir(parents=True)
            inside = runs_in = Path().absolute()
            if side.in_worktree:
                undo.callback(worktrees.remove, new / name / worktrees.SOURCE)
                inside = worktrees.add(new / name / worktrees.SOURCE, str(side.revision))
                runs_in = folder / inside.relative_to(new.absolute())
            config = cfg.take_along(side.configuration(name, runs_in), new / name)
            config = cfg.override(config, {"seed": request.seed or 0}, check=False)
            if request.experiment.test.equal and configs:
                config = twin(config)
            write_text(new / name / "config.yaml", cfg.dump(config, folder=new / name))
            configs.append(config)
            codes.append(SideCode.of(new / name, inside, working_copy=not side.in_worktree))
        seeded = any("seed" in side.definition.template.names for side in request.sides)
        freeze(new, configs, codes, draws=request.seed is None and seeded)
        request.experiment.changed(
            runner="command",
            candidates={name: side.name for name, side in _named(request)},
            limit={"budget": request.budget_s},
            same_seed=request.sides[0].definition.same_seed,
        ).write(new)
        new.rename(folder)  # a folder of that name is complete, whenever this process is killed
        undo.pop_all()
    for name in side_files.SIDES:
        worktrees.moved(folder / name / worktrees.SOURCE)
