"""Write the folder of a result that a stranger can check, check one, and run its comparison again.

`compare --out` writes the files of the comparison from which its verdict follows, so that it can be
read as one: `experiment.yaml`, both sides with their code, the journal and the log of each run; and
beside them the result as JSON and as Markdown, the environment, and the SHA-256 of each file.

`verify` checks it by its journals alone: no code of the folder runs; journals, rules and digests are
data. Compared are the numbers that follow from the journals, all files, and the seeds that follow
from the code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import sides
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.sides import HOLDOUT, JUDGE
from tunediff.command import definition, worktrees
from tunediff.command.metrics import NUMBER, MetricPattern, as_number
from tunediff.command.process import LOG
from tunediff.core.errors import ConfigError
from tunediff.core.files import CODE as FOLDER
from tunediff.core.files import sha256, write_text
from tunediff.core.options import allow, check_name, check_new, timed_name, writing
from tunediff.core.outcomes import Status
from tunediff.core.text import rounded
from tunediff.core.trial_record import JOURNAL, TrialRecord
from tunediff.experiment import model
from tunediff.proof import frozen_code, locked_judge
from tunediff.report import reading, text
from tunediff.report.reading import effect_of, measured
from tunediff.report.sentences import interval
from tunediff.tuning import at_once, sessions
from tunediff.tuning.local import OUTPUT

FILE, RESULT, COMMENT = frozen_code.PROOF, "result.json", "result.md"
FILES = (
    model.FILE, sides.CODE, sides.LEDGER, sides.HOLDOUT_VALUES, JUDGE, HOLDOUT, OUTPUT,
    sessions.SESSIONS,
)  # fmt: skip
"""Files of a comparison besides its sides and its runs, of which some may not be there."""
MOST_BYTES = 10 * 2**20
"""Files of a command above this size are named, with size and digest, and not copied."""
TOLERANCE = 1e-9
"""Relative difference of a number on another machine that is rounding."""


def check_out(out: Path) -> None:
    """Refuse a folder that is there already and is not empty. Raises `ConfigError`."""
    is_empty = out.is_dir() and not any(out.iterdir())
    allow(is_empty or not out.exists(), "--out", out, "a new folder")


def write(folder: Path, out: Path) -> None:
    """Write into `out` what proves the comparison in `folder`. Raises `OSError`, `ConfigError`."""
    comparison = Comparison.read(folder)
    paths = [folder / name for name in FILES]
    for side in model.SIDES:
        paths += [folder / side / model.CONFIG]
        paths += frozen_code.regular_files(folder / side / FOLDER)
    for name in (JOURNAL, LOG, locked_judge.LOG):
        paths += (folder / "trials").glob(f"t*/{name}")
    for path in filter(Path.is_file, paths):
        copy(path, out / path.relative_to(folder))
    large = _copy_sources(comparison, out)

    result = {**reading.as_json(reading.of_sides(comparison)), "files": {}}
    del result["summary"]  # words of this version, which no check compares
    write_text(out / RESULT, json.dumps(result, indent=2, default=str) + "\n")
    write_text(out / COMMENT, text.comment(comparison) + "\n")
    runs = sorted(comparison.runs, key=lambda run: run.started)
    content = {
        "format": cfg.FORMAT,
        "order": [f"{run.drawn['side']} seed {run.seed}" for run in runs],
        "environment": runs[0].environment if runs else {},
        "not_copied": large,
        "files": {
            path.relative_to(out).as_posix(): sha256(path)
            for path in frozen_code.regular_files(out)
        },
    }
    write_text(out / FILE, json.dumps(content, indent=1) + "\n")


def copy(source: Path, target: Path) -> None:
    """Copy the content of a file; folders are made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _copy_sources(comparison: Comparison, out: Path) -> dict[str, Any]:
    """Copy the files of both commands. Return those that are too large, with size in bytes and
    digest."""
    large = dict[str, Any]()
    for side in model.SIDES if sides.of_commands(comparison.folder) else ():
        code = sides.content(comparison.folder, sides.CODE)[side]
        with contextlib.ExitStack() as undo:
            runs_in = worktrees.working_folder(comparison.folder / side)
            if not runs_in.is_dir() and code["commit"] is not None:  # the worktree is gone by now
                scratch = Path(undo.enter_context(tempfile.TemporaryDirectory()))
                undo.callback(worktrees.remove, scratch / worktrees.SOURCE)
                runs_in = worktrees.add(scratch / worktrees.SOURCE, code["commit"])
            for name, digest in code["files"].items():
                file = runs_in / Path(name).relative_to(worktrees.SOURCE)
                if file.is_file() and (size := file.stat().st_size) > MOST_BYTES:
                    large[f"{side}/{name}"] = {"bytes": size, "sha256": digest}
                elif file.is_file():
                    copy(file, out / side / name)
    return large


# ---- check
@dataclasses.dataclass(frozen=True)
class CheckedFolder:
    """What the check of one folder has found."""

    folder: Path
    comparison: Comparison
    files: Mapping[str, str]
    """SHA-256 of its files by name."""
    faults: list[str]
    """What is not as the folder says; empty: verified."""
    notes: list[str]
    """What a reader should know, and is no fault."""

    @property
    def values(self) -> dict[str, Any]:
        """Return the result of the check, for `verify --json`."""
        return {
            "folder": str(self.folder),
            "a": self.comparison.names[0],
            "b": self.comparison.names[1],
            "verified": not self.faults,
            "faults": self.faults,
            "notes": self.notes,
            **measured(self.comparison),
        }


def verify(folder: Path) -> CheckedFolder:
    """Check a folder that `compare --out` has written. Raises `ConfigError` for another one."""
    for name in (FILE, RESULT, model.FILE, sides.CODE):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder}: has no {name}; allowed: what tunediff compare --out has written"
            )
    said, result, code = (sides.content(folder, name) for name in (FILE, RESULT, sides.CODE))
    comparison = Comparison.read(folder)
    cfg.check_format(said.get("format"), f"{folder / FILE}: format")
    files, large = said.get("files", {}), said.get("not_copied", {})
    computed = measured(comparison)
    computed["sides"] |= {"first_seed": code["first_seed"], "seeds_drawn": code["drawn"]}
    for side, candidate in zip(model.SIDES, computed["candidates"], strict=True):
        candidate["name"] = comparison.experiment.candidates[side]
        candidate["digest"] = code[side]["digest"]
    faults = [
        *_other_files(folder, files),
        *_other_rules(comparison),
        *other_numbers(computed, result),
        *_other_comment(folder / COMMENT, comparison),
        *_other_code(folder, code, large),
        *_other_runs(comparison, code),
        *_other_judges(comparison),
    ]
    notes = [f"{name}: {file['bytes']} bytes, is not there" for name, file in large.items()]
    notes += filter(None, [frozen_code.not_counted(code)])
    notes += [f"{name}: was edited while it ran" for name in code.get(worktrees.EDITED, ())]
    notes += [] if code["drawn"] else ["its first seed was chosen, or it has none"]
    return CheckedFolder(folder, comparison, files, faults, notes)


def _other_files(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    """Yield each file that is missing, changed, new or a link since the folder was written."""
    found = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if (path.is_symlink() or not path.is_dir()) and path != folder / FILE
    }
    for name, digest in files.items():
        if name not in found:
            yield f"{name}: is missing"
        elif found[name].is_symlink() or sha256(found[name]) != digest:
            yield f"{name}: has been changed"
    yield from (f"{name}: was not there" for name in found.keys() - files.keys())


def _other_rules(comparison: Comparison) -> Iterator[str]:
    """Yield each rule that `compare` refuses; a ledger's levels may be small."""
    level, most = comparison.rules.level, comparison.rules.max_rounds
    has_ledger = (comparison.folder / sides.LEDGER).is_file()
    if not (0.001 <= level <= 0.5 or (0 < level < 0.5 and has_ledger)):
        yield f"{model.FILE}: level: {level} is not allowed; allowed: 0.001 to 0.5"
    if not model.LEAST_PAIRS <= most <= model.MOST_PAIRS:
        allowed = f"{model.LEAST_PAIRS} to {model.MOST_PAIRS:,}"
        yield f"{model.FILE}: pairs: {most} is not allowed; allowed: {allowed}"


def other_numbers(computed: Mapping[str, Any], said: Mapping[str, Any]) -> Iterator[str]:
    """Yield each key of the result that the journals contradict."""
    for key, value in computed.items():
        other: Any = said.get(key)
        are_numbers = isinstance(value, float) and isinstance(other, int | float)
        if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
            value, other = (
                {f"{key}[{index}]": one for index, one in enumerate(of)} for of in (value, other)
            )
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from other_numbers(value, other)
        elif value != other and not (are_numbers and math.isclose(value, other, rel_tol=TOLERANCE)):
            yield f"{key}: {other} in {RESULT}, {value} by the journals"


def _other_comment(file: Path, comparison: Comparison) -> Iterator[str]:
    """Yield what the text for a pull request says otherwise: verdict, difference, pairs."""
    text = re.sub(" +", " ", file.read_text("utf-8", "replace") if file.is_file() else "")
    first, test = text.partition("\n")[0], comparison.analysis
    verdict, effect = (
        f"**tunediff: {comparison.verdict}.**",
        interval(effect_of(test.differences[0], test.ratios)),
    )
    if not first.startswith(verdict):
        yield f"{file.name}: does not begin with {verdict}"
    for shown in re.findall(r"\S+ \(\S+ … \S+\)", first):
        if shown != effect:
            yield f"{file.name}: {shown}, which does not follow from the journals"
    # A run without a value shows how it ended
    rows = [
        [
            rounded(value) or str((run and run.status) or "")
            for run, value in zip(*pair, strict=True)
        ]
        for pair in zip(comparison.rounds, comparison.values.T.tolist(), strict=True)
    ]
    found = re.findall(r"^\| (\d+ \| \S* ?\| \S* ?)\|", text, re.MULTILINE)
    expected = [f"{number} | {a} | {b} " for number, (a, b) in enumerate(rows, 1)]
    for row in dict.fromkeys([*found, *expected]):
        if (row in found) != (row in expected):
            yield f"{file.name}: pair {row}does not follow from the journals"


def _other_code(folder: Path, code: Mapping[str, Any], large: Mapping[str, Any]) -> Iterator[str]:
    """Yield what contradicts the digests of the code: files, configurations, and the first seed."""
    for side in model.SIDES:
        copied = frozen_code.SideCode.of(folder / side)
        files = {**copied.files, **frozen_code.digests(folder / side, worktrees.SOURCE)}
        frozen = code[side]["files"]
        for name, digest in frozen.items():
            if (file := large.get(f"{side}/{name}")) is not None:
                files.setdefault(name, file["sha256"])
            if files.get(name) != digest:
                yield f"{side}/{name}: is not the file that ran"
        for name in sorted(files.keys() - frozen.keys()):
            yield f"{side}/{name}: was not there when the code was frozen"
        recomputed = dataclasses.replace(copied, files=files).digest
        if recomputed != code[side]["digest"]:
            yield f"{side}: its digest is not that of its files and its configuration"
    digests, first = [code[side]["digest"] for side in model.SIDES], code["first_seed"]
    if code["drawn"] and first != frozen_code.drawn_seed(digests):
        yield f"first_seed: {first} does not follow from the digests of the code"


def _other_runs(comparison: Comparison, code: Mapping[str, Any]) -> Iterator[str]:
    """Yield what contradicts the side of a run: its name, configuration, seed and log."""
    folder = comparison.folder
    for row, side in enumerate(model.SIDES):
        expected = cfg.flatten(cfg.read_yaml(folder / side / model.CONFIG))
        expected = {
            k: v for k, v in expected.items() if k not in (cfg.FORMAT_KEY, "workload", "seed")
        }
        file = folder / side / FOLDER / definition.FILE
        command = cfg.read_yaml(file) if file.is_file() else {}
        for number, pair in enumerate(comparison.rounds):
            if (run := pair[row]) is None:
                continue
            if run.drawn.get("side") != side:
                yield f"{run.name}: is a run of {run.drawn.get('side')}, not of {side}"
            for knob, value in expected.items():
                if (ran := run.config.get(knob)) != value:
                    yield f"{run.name}: {knob} was {ran}, not {value} as in {side}/{model.CONFIG}"
            seed = (
                code["first_seed"]
                + number
                + row * comparison.rules.equal * frozen_code.TWIN_DISTANCE
            )
            if code["drawn"] and run.seed != seed:
                yield f"{run.name}: its seed is {run.seed}, not {seed}"
            yield from _other_log(folder / "trials" / run.name, run, comparison, command)


def _other_log(
    place: Path, run: TrialRecord, comparison: Comparison, command: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the value of a run that is not among the numbers of the log from which it was read."""
    is_judged = comparison.metric != comparison.objective
    log = place / (locked_judge.LOG if is_judged else LOG)
    is_mean = str(command.get("reduce", "last")).startswith("mean")
    is_read = is_judged or (command and command.get("metrics") is None and not is_mean)
    if run.status != Status.OK or not is_read or not log.is_file():
        return
    text, value = log.read_text(errors="replace"), run.value(comparison.metric)
    pattern = MetricPattern(
        comparison.objective, None if is_judged else command.get("pattern"), "pattern"
    )
    printed = {pattern.find(line) for line in text.splitlines()}
    printed |= {as_number(word) for word in re.findall(NUMBER, text, re.IGNORECASE)}
    if value not in printed and text.count("(the log ends here;") == 0:
        yield f"{place.name}/{log.name}: has no {value}, the value of the run by its journal"


def _other_judges(comparison: Comparison) -> Iterator[str]:
    """Yield each judge that is not the one that was locked."""
    for key, name in (("judge", JUDGE), ("holdout", HOLDOUT)):
        digest = getattr(comparison.experiment, key)
        if digest is not None and sha256(comparison.folder / name) != digest:
            yield f"{name}: is not the {key} that was locked"


# ---- run it again
def reproduce(source: Path, storage: Path, name: str | None, say: Callable[[str], object]) -> Path:
    """Make a new comparison with both sides, the rules and the seeds of the folder `source`.

    Commands run in the copy of their files; what their folder lacks, such as data that git ignores,
    is linked from the working folder. Raises `ConfigError` for a folder that has been changed, and
    for runs at the same time on other devices than this machine has.
    """
    checked = verify(source)
    if checked.faults:
        raise ConfigError(f"{source}: is not as it was written: {checked.faults[0]}")
    at_once.as_it_began(checked.comparison.at_once)  # refuses what this machine cannot run
    name = name or timed_name("reproduce")
    folder = storage.resolve() / name
    check_name(name)
    check_new(folder)
    new = folder.with_name(f".{folder.name}-{os.getpid()}")
    parts = (model.FILE, sides.CODE, JUDGE, HOLDOUT, *model.SIDES)
    with writing("--storage", folder):
        for file in checked.files:  # what has a digest, and nothing else
            if file.partition("/")[0] in parts:
                copy(source / file, new / file)
        for side in model.SIDES:
            _run_in_copy(new / side, folder / side)
        new.rename(folder)
    a, b = checked.comparison.names
    say(f"runs the code in {source}: A is {a}, B is {b}")
    return folder


def _run_in_copy(new: Path, side: Path) -> None:
    """Let the command of a side run in its copied files, if it is a command."""
    file = new / FOLDER / definition.FILE
    if not file.is_file():
        return
    runs_in, copy = Path().absolute(), new / worktrees.SOURCE
    if copy.is_dir():
        worktrees.link(os.listdir(runs_in), runs_in, copy)
        runs_in = side.absolute() / worktrees.SOURCE
    content = cfg.read_yaml(file)
    write_text(file, cfg.to_yaml({**content, "folder": str(runs_in)}))
