"""The two sides of a comparison of workloads: what was typed, other revisions of a file, and sides
that cannot be compared."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tunediff import config as cfg
from tunediff.command import worktrees
from tunediff.config import ConfigError, Systems
from tunediff.core.git import commit_of, git
from tunediff.core.refusals import allow
from tunediff.core.text import shown
from tunediff.data.knobs import Data
from tunediff.search_space.model import PAIR_SEED_OFFSET


def words_of(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return A and B, each with what goes on top of it. Raises `ConfigError`."""
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
        raise ConfigError(f"command line: {message_words}: {needed}")
    return sides[0], sides[1]


def side_of(words: Sequence[str], elsewhere: Path) -> Systems:
    """Return the configuration of a side; another revision of its file goes into `elsewhere`."""
    name, at, revision = words[0].rpartition("@")
    if at and name.partition(":")[0].endswith(".py"):
        file, colon, preset = name.partition(":")
        name = f"{_at_revision(Path(file), revision, elsewhere)}{colon}{preset}"
    else:
        name = words[0]
    config: Systems = cfg.named(Path(name), words[1:], "command line")
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
            f"{word}: {shown(other)} was loaded, which is not of that revision: both sides would"
            " run it (an editable install, or PYTHONPATH); allowed: modules beside the file, or"
            " sys.path.insert(0, …) in it of a folder beside its __file__"
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


def refuse_pointless(
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


def refuse_equal(
    side_words: Sequence[Sequence[str]], sides: Sequence[Systems], device: str | None
) -> None:
    """Refuse sides that are equal on this device, which may be unknown. Raises `ConfigError`.

    Revisions may differ in files that no fingerprint counts; they run.
    """
    if len({file.root for file in [cfg.of(side).file for side in sides] if file is not None}) > 1:
        return
    effective = [cfg.effective(one, device) if device is not None else one for one in sides]
    prints = {cfg.fingerprint(cfg.override(one, {"seed": 0}, check=False)) for one in effective}
    if len(prints) == 1 and sides[0].seed == sides[1].seed:
        why = cfg.not_effective(sides[1], device) if device is not None else {}
        changes = cfg.differences(sides[1], sides[0])
        idle = "".join(f" ({knob}: {reason})" for knob, reason in why.items() if knob in changes)
        hint = "change a knob, or compare it with itself on other seeds by --equal"
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
