"""The two sides of a comparison, from what was typed: configurations, other revisions of a file,
commands; and sides that cannot be compared."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.api.options import CompareOptions, definition
from tunediff.command import worktrees
from tunediff.command.definition import CommandDefinition
from tunediff.command.template import shown as shown_value
from tunediff.command.workload import CommandSystems, common_type, make
from tunediff.config import ConfigError, Systems, Values
from tunediff.core import text
from tunediff.core.git import commit_of, git
from tunediff.core.options import allow
from tunediff.data.knobs import Data
from tunediff.proof import frozen_code
from tunediff.search_space.model import PAIR_SEED_OFFSET

WHERE = "command line"
TWIN = " on other seeds"
"""What the name of B has more than A's where both sides are equal."""


def twin(config: Any) -> Any:
    """Return an equal side whose seeds are another draw of the same stream."""
    return cfg.override(config, {"seed": config.seed + frozen_code.TWIN_DISTANCE}, check=False)


# ---- workloads
def words_of(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return A and B, each with what goes on top of it. Raises `ConfigError`."""
    sides: list[list[str]] = []
    for word in words:
        if "=" not in word:
            sides.append([word])
        elif not sides:
            raise ConfigError(f"{WHERE}: {word}: on top of what? knob=value stands behind A or B")
        else:
            sides[-1].append(word)
    if len(sides) == 1 and len(sides[0]) > 1:
        sides = [[sides[0][0]], sides[0]]
    if len(sides) != 2:
        message_words = " ".join(words) or "nothing"
        needed = "needs A and B, or A and knob=value for what B changes"
        raise ConfigError(f"{WHERE}: {message_words}: {needed}")
    return sides[0], sides[1]


def side_of(words: Sequence[str], elsewhere: Path) -> Systems:
    """Return the configuration of a side; another revision of its file goes into `elsewhere`."""
    name, at, revision = words[0].rpartition("@")
    if at and name.partition(":")[0].endswith(".py"):
        file, colon, preset = name.partition(":")
        name = f"{_at_revision(Path(file), revision, elsewhere)}{colon}{preset}"
    else:
        name = words[0]
    config: Systems = cfg.named(Path(name), words[1:], WHERE)
    refuse_working_copy(words[0], config)
    return cfg.override(config, {"seed": config.seed + PAIR_SEED_OFFSET})


def refuse_working_copy(word: str, config: Systems) -> None:
    """Refuse a revision of a file that has loaded a module of the working copy, which is that of
    both sides. Raises `ConfigError`."""
    name, at, _ = word.rpartition("@")
    file, code = Path(name.partition(":")[0]), cfg.of(config).file
    if not at or code is None or file.suffix != ".py":
        return
    loaded = sorted({*code.sources.values()})
    for other in worktrees.others(loaded, file.absolute().parent, code.root):
        raise ConfigError(
            f"{word}: {text.shown(other)} was loaded, which is not of that revision: both sides"
            " would run it (an editable install, or PYTHONPATH); allowed: modules beside the file,"
            " or sys.path.insert(0, …) in it of a folder beside its __file__"
        )


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


def refuse_pointless(names: Sequence[str], sides: Sequence[Systems], most: int) -> None:
    """Refuse sides that cannot be compared; `names`: of their files. Raises `ConfigError`."""
    one, two = (cfg.of(config).objective for config in sides)
    if one != two:
        raise ConfigError(
            f"{names[1]}: is judged by {two.name} ({two.mode}), {names[0]} by"
            f" {one.name} ({one.mode})"
        )
    _refuse_other_protocol(*sides)
    if 0 < abs(sides[1].seed - sides[0].seed) < most:
        seed = sides[1].seed - PAIR_SEED_OFFSET
        raise ConfigError(
            f"seed: {seed} is not allowed: with {most} pairs both sides would use some seeds;"
            f" allowed: A's, or at least {most} away from it"
        )


def refuse_equal(name: str, sides: Sequence[Systems]) -> None:
    """Refuse sides with equal values; `name`: of B. Raises `ConfigError`.

    Revisions may differ in files that no fingerprint counts; they run.
    """
    roots = {file.root for file in [cfg.of(side).file for side in sides] if file is not None}
    if len(roots) < 2 and len({*map(cfg.fingerprint, sides)}) == 1:
        hint = "change a knob, or compare it with itself on other seeds by --equal"
        raise ConfigError(f"{name}: A and B are identical, on the same seeds; {hint}")


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


# ---- commands
@dataclasses.dataclass(frozen=True)
class CommandSide:
    """A or B of a comparison of commands."""

    name: str
    """How messages call it."""
    definition: CommandDefinition
    parameters: Values
    revision: str | None = None

    @property
    def in_worktree(self) -> bool:
        return self.revision not in (None, worktrees.WORKING_COPY)

    def configuration(self, at: str, folder: str | Path, seed: int) -> CommandSystems:
        """Return its configuration, which runs in `folder`; `at`: names it in this process."""
        place = {"folder": str(Path(folder).absolute())}
        definition = self.definition.model_copy(update=place)
        config: CommandSystems = make(
            definition, self.parameters, WHERE, at=f"-{at}"
        ).schema.default()
        return cfg.override(config, {"seed": seed}, check=False)


def of_commands(options: CompareOptions) -> tuple[CommandSide, CommandSide]:
    """Return A and B: of two commands, revisions, or groups of values. Raises `ConfigError`."""
    commands, revisions, groups = options.command, options.at, values_of(options.words, WHERE)
    counts = {"--run": len(commands), "--at": len(revisions), "groups of name=value": len(groups)}
    twice = [name for name, count in counts.items() if count == 2]
    if len(twice) != (not options.equal) or max(counts.values()) > 2:
        if len(commands) == 1:  # a mistyped name is no second value
            template = definition(options, commands[0], WHERE).template
            template.check([*set().union(*groups)], WHERE, unseeded=options.unseeded)
        given = ", ".join(f"{count} × {name}" for name, count in counts.items())
        raise ConfigError(
            f"{WHERE}: {given}: is not allowed; allowed: A and B differ in one thing: two --run,"
            " two --at, or name=value given twice (lr=3e-4 lr=1e-3); in nothing with --equal"
        )

    def side(index: int) -> CommandSide:
        command = commands[min(index, len(commands) - 1)]
        revision = revisions[min(index, len(revisions) - 1)] if revisions else None
        defined = definition(options, command, WHERE)
        values = {**groups[0], **groups[min(index, len(groups) - 1)]}
        if len(commands) == 2 and not defined.template.takes_all:
            named = defined.template.parameters
            values = {name: value for name, value in values.items() if name in named}
        shown = " ".join(
            f"{name}={text.number(value) if isinstance(value, float) else value}"
            for name, value in groups[min(index, len(groups) - 1)].items()
            if len(groups) < 2 or name in groups[1]
        )
        names = {"--run": defined.title, "--at": str(revision)}
        name = names.get(twice[0], shown) if twice else (shown or defined.title) + TWIN * index
        return CommandSide(name, defined, values, revision)

    both = side(0), side(1)
    for name in both[0].definition.template.parameters:
        if name in both[1].parameters.keys() - both[0].parameters.keys():
            first = next(iter(groups[1]))
            raise ConfigError(
                f"{WHERE}: {name}={both[1].parameters[name]}: stands behind the second {first}=, so"
                f" that only B has it; allowed: before the first {first}=, for both"
            )
    if both[0] == both[1]:
        hint = "change one, or compare it with itself by --equal"
        raise ConfigError(f"{WHERE}: {both[1].name}: A and B are identical; {hint}")
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
        if kind in (int, float) and all(shown_value(kind(value)) == value for value in texts):
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
