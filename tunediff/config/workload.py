"""Find workloads, and describe what a workload declares.

A workload is a module with `Knobs`, `OBJECTIVE` and `train(trial)`: a file of the user, or one of
our packages, which declare the first two in `PACKAGE.knobs` and what needs torch in
`PACKAGE.train`, imported when a training starts. It may also declare:

- `BASELINE`: system knobs by dotted name that its baseline sets.
- `SEARCH`: spaces of these knobs for searches without a search file.
- `PRESETS`: named baselines (`mine.py:NAME` for a file), applied after `BASELINE`.
- `UNIT`: what a sample is called.
- `WARM_UP = False`: no step is trained and undone before the budget begins, for loops that collect
  their own data.
- `QUANTITIES`: what its points contain besides the quantities of all points.
- `evaluation_protocol(config)`: a sentence that says how its objective is measured.
- `check_files(knobs, evaluates)`: raises an error for missing files before anything starts.
- `network(knobs)`: the bare model.
- `MEMORY_FREE`: names of knobs that hardly affect device memory; `MEMORY_SAVING`: names of lists
  that save more memory the longer they are.
- `sample_images(network, config, request)`: yields (number of the first image, uint8 [b, C, H, W])
  for what a `tunediff.evaluation.generation.SampleRequest` asks for;
  `write_pipeline(folder, config, weights)`: writes the model for another library, `weights` being a
  function that returns its state, and returns a call that loads it. A package of ours keeps the two
  in `PACKAGE.commands`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import shutil
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from tunediff.config import code as users
from tunediff.config.code import Code
from tunediff.config.knobs import ConfigError, Lines, Values, nearest, refuse
from tunediff.config.schema import Configuration, Schema, flat, nest, neutral, override, to_dict
from tunediff.config.systems import Systems
from tunediff.core.clock import TRAINING
from tunediff.core.files import CODE
from tunediff.core.point import QUANTITIES, Quantity, in_units
from tunediff.core.target import TIME_TO_TARGET, Target
from tunediff.core.text import shown
from tunediff.core.trial_record import TrialRecord

SHIPPED = {
    "diffusion": "tunediff.workloads.diffusion",
    "classification": "tunediff.workloads.classification",
}
"""Our own workloads: name and package."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number by which models of a workload are compared."""

    name: str
    """Key in the result of its evaluation, and in every point of a curve."""
    mode: Literal["min", "max"]
    """Which direction is better."""
    label: str = ""
    """Label for users, by default the name; an evaluation may return a more precise `label`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name)


OPTIONAL = {
    "check_files": ("knobs", "evaluates"), "network": ("knobs",),
    "evaluation_protocol": ("config",), "sample_images": ("network", "config", "request"),
    "write_pipeline": ("folder", "config", "weights"),
}  # fmt: skip
"""Functions that a workload may have, and what they take."""
COMMANDS = ("sample_images", "write_pipeline")
"""Hooks of the commands that use saved models: of a package of ours, in `PACKAGE.commands`."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A workload and its declarations."""

    name: str
    declared: ModuleType
    """The module with `Knobs` and `OBJECTIVE`."""
    package: str = ""
    file: Code | None = None
    """The user's file, whose path then is `name`; None for our own workloads."""

    @functools.cached_property
    def title(self) -> str:
        """Return its name in messages."""
        return self.name if self.file is None else self.file.file.name

    @functools.cached_property
    def schema(self) -> Schema:
        """Return its knobs and the systems'. Raises `ConfigError` for unusable knobs."""
        version = self.file.version if self.file is not None else ""
        return Schema(self.name, self.declared.Knobs, Systems, version, self.title, from_dict)

    @property
    def objective(self) -> Metric:
        """Return the metric that a search optimizes unless its file names another one."""
        return typing.cast(Metric, self.declared.OBJECTIVE)

    @property
    def presets(self) -> Mapping[str, Values]:
        """Return its named baselines: knobs by dotted name."""
        return getattr(self.declared, "PRESETS", {})

    @property
    def unit(self) -> str:
        """Return what its training samples are called, as a plural: `images`, `tokens`."""
        return getattr(self.declared, "UNIT", "samples")

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """Return what its points contain besides the quantities of all points, by name."""
        return getattr(self.declared, "QUANTITIES", {})

    @property
    def clock(self) -> str:
        """Return what its seconds are; see `core.clock.ClockSummary`."""
        return TRAINING

    @property
    def unseeded(self) -> bool:
        """Return whether its runs take no seed, so that they may be one, repeated."""
        return False

    @property
    def target(self) -> Target | None:
        """Return the target at which its runs end; of commands alone."""
        return None

    @functools.cached_property
    def code(self) -> ModuleType:
        """Return the module with `train`; imports torch."""
        return importlib.import_module(f"{self.package}.train") if self.package else self.declared

    @functools.cached_property
    def commands(self) -> ModuleType | None:
        """Return the module with the hooks in `COMMANDS`, or None; ours imports no torch."""
        if not self.package:
            return self.declared
        name = f"{self.package}.commands"
        return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None

    def get_hook(self, name: str) -> Any:
        """Return a function or an object of the workload that not every workload has, or None.

        A user's function of the same name that takes other arguments is not the hook.
        """
        if name in COMMANDS:
            hook = getattr(self.commands, name, None)
        else:
            hook = getattr(self.declared, name, None) or getattr(self.code, name, None)
        if self.file is not None and hook is not None:
            try:
                inspect.signature(hook).bind(*OPTIONAL[name])
            except (KeyError, TypeError, ValueError):
                return None
        return hook


def quantities(workload: Workload) -> dict[str, Quantity]:
    """Return the quantities of a workload's points, by name: every point's, objective, its own."""
    objective = workload.objective
    objectives = {objective.name: Quantity(objective.label or objective.name)}
    objectives[TIME_TO_TARGET] = Quantity("time to target", "s", "until the target was met")
    return in_units(QUANTITIES, workload.unit) | objectives | dict(workload.quantities)


def find(name: str, where: str = "workload", folder: Path = Path()) -> Workload:
    """Return the workload that `to_dict` names; users' files are relative to `folder`.

    Raises `ConfigError`, also for a file that cannot be imported or lacks a required declaration.
    """
    if name in SHIPPED:
        return _shipped(name)
    refuse(
        not is_users(name),
        f"{where}: workload: unknown name {name!r}; allowed: {', '.join(SHIPPED)}, {FILES}",
    )
    if is_command(name):
        return commands.workload((folder / name).absolute(), where)
    file = users.locate(name, where, folder)
    source = file.read_bytes()  # a script may train for hours when it is imported
    script = "any script is searched as it is by command: (docs/how-to/commands.md)"
    has_knobs = any(word in source for word in (b"Knobs", b"import *"))
    refuse(not has_knobs, f"{shown(file)}: {NO_KNOBS}; it was not run; {script}")
    workload = _users(str(file), users.read(file).version)
    assert workload.file is not None
    users.load(workload.file)
    return workload


FILES = "a file such as mine.py, or package.module"


@dataclasses.dataclass(frozen=True)
class Commands:
    """What the package of commands, which stands on this one, does for it."""

    workload: Callable[[Path, str], Workload]
    """Returns the workload of a command's definition; where it is named, for errors."""
    search_file: Callable[[Lines, str, Path], Lines]
    """Returns the search file of a workload for one with `command:`, its name, where it runs."""
    run: Callable[..., Iterator[Any]]
    """Runs a trial: yields its points and its end; see `command/trial.py`."""


commands = typing.cast(Commands, None)
"""Registered by `tunediff/command/__init__.py`, which `tunediff/__init__.py` imports."""


def is_users(name: str) -> bool:
    """Return whether a workload's name is that of a file or module of the user."""
    module = "." in name and all(part.isidentifier() for part in name.split("."))
    return (
        name.endswith(".py")
        or is_command(name)
        or (module and not name.endswith((".yaml", ".yml", ".json", ".toml")))
    )


def is_command(name: str) -> bool:
    """Return whether a workload's name is that of a command's definition."""
    return Path(name).name == "tunediff_command.yaml"


NO_KNOBS = "has no class Knobs; write @dataclass(frozen=True) above  class Knobs:"


@functools.cache
def _users(name: str, version: str) -> Workload:
    """Import a user's workload and check its declarations, once for each content of the file."""
    code = users.read(Path(name))
    workload, place = Workload(name, users.load(code), file=code), shown(code.file)
    knobs: Any
    knobs, objective, train = (
        getattr(workload.declared, part, None) for part in ("Knobs", "OBJECTIVE", "train")
    )
    refuse(not inspect.isclass(knobs), f"{place}: {NO_KNOBS}")
    metric = 'OBJECTIVE = Metric("accuracy", "max")'
    refuse(
        not isinstance(objective, Metric),
        f"{place}: OBJECTIVE is {objective!r}; it needs a line such as  {metric}",
    )
    modes, mode = ("min", "max"), typing.cast(Metric, objective).mode
    refuse(
        mode not in modes, f"{place}: OBJECTIVE: mode {mode!r} is not allowed; allowed: min, max"
    )
    refuse(not callable(train), f"{place}: has no function train(trial)")
    try:
        inspect.signature(typing.cast(Any, train)).bind("trial")
    except TypeError as error:
        raise ConfigError(f"{place}: train must take one argument, the trial: {error}") from None
    _check_dictionaries(workload, place)
    workload.schema  # noqa: B018 – Knobs that cannot be used are refused here
    return workload


def _check_dictionaries(workload: Workload, place: str) -> None:
    """Raise `ConfigError` for a declaration that is no dictionary where one is needed."""
    declared = {
        name: getattr(workload.declared, name, {}) for name in ("BASELINE", "PRESETS", "QUANTITIES")
    }
    if isinstance(presets := declared["PRESETS"], Mapping):
        declared |= {f"PRESETS[{name!r}]": values for name, values in presets.items()}
    for name, values in declared.items():
        refuse(
            not isinstance(values, Mapping), f"{place}: {name} is {values!r}; it needs a dictionary"
        )


@functools.cache
def _shipped(name: str) -> Workload:
    """Return a shipped workload, always the same object: two schemas are never equal."""
    return Workload(name, importlib.import_module(f"{SHIPPED[name]}.knobs"), SHIPPED[name])


def of(config: Configuration) -> Workload:
    """Return the workload that a configuration belongs to."""
    return find(config.schema.workload)


def baseline_names() -> list[str]:
    """Return the names that may follow `workload:` in a search file."""
    return [preset for shipped in SHIPPED for preset in find(shipped).presets]


def baseline(name: str, where: str = "workload", folder: Path = Path()) -> Any:
    """Return the configuration of a baseline (`digits`, `cifar10`) or a user's file.

    Of a file `mine.py`, `mine.py:NAME` selects one of its `PRESETS`. The configuration is not yet
    checked as a whole. Raises `ConfigError`.
    """
    # The caller adds the path of `images`: rules that join knobs apply when all are known.
    for workload in map(find, SHIPPED):
        if name in workload.presets:
            return _baseline(workload, workload.presets[name], f"workload {name}")
    file, colon, preset = name.rpartition(":") if ":" in name else (name, "", "")
    refuse(
        not is_users(file),
        f"{where}: workload: unknown name {name!r}; allowed: {', '.join(baseline_names())},"
        f" {FILES}",
    )
    workload = find(file, where, folder)
    unknown = (
        f"{where}: workload: {file} has no preset {preset!r};"
        f" {nearest(preset, workload.presets) if colon else ''}"
    )
    refuse(colon and preset not in workload.presets, unknown)
    return _baseline(workload, workload.presets.get(preset, {}), workload.title)


def _baseline(workload: Workload, values: Values | Mapping[str, Any], where: str) -> Any:
    values = {**getattr(workload.declared, "BASELINE", {}), **values}
    return override(workload.schema.default(), values, where=where, check=False)


def named_in(content: Lines, where: str, folder: Path = Path()) -> Workload:
    """Take the workload's name out of a configuration's content. Raises `ConfigError`."""
    allowed = f"allowed: {', '.join(SHIPPED)}, {FILES}"
    refuse("workload" not in content, f"{where}: workload: is missing; {allowed}")
    return find(str(content.pop("workload")), where, folder)


def from_dict(nested: Mapping[str, Any], where: str, check: bool = True) -> Any:
    """Return the configuration that `to_dict` wrote, of any workload. Raises `ConfigError`."""
    rest = dict(nested)
    return named_in(rest, where).schema.from_dict(rest, where, check)


def take_along(config: Configuration, folder: Path) -> Any:
    """Return the configuration with its workload's file, if it is a user's, copied into `folder`.

    Raises `ConfigError` where another file is there.
    """
    copies = folder.absolute() / CODE
    if (code := of(config).file) is None or code.file.is_relative_to(copies):
        return config
    copy = code.copy(copies)
    return from_dict({**to_dict(config), "workload": str(copy)}, str(copy), check=False)


def remove_copy(config: Configuration, folder: Path) -> None:
    """Remove what `take_along` copied into `folder`, unless the configuration is the copy's."""
    copies = folder.absolute() / CODE
    if (code := of(config).file) is not None and not code.file.is_relative_to(copies):
        shutil.rmtree(copies, ignore_errors=True)
        users.read_copy.cache_clear()


# ---- configurations of trials, as their journals have them
def configuration_of(trial: TrialRecord) -> Any:
    """Return a trial's configuration. Raises `ConfigError` if its knobs are not valid (any more)."""
    return from_dict(nest(trial.config), trial.name, check=False)


def effective_knobs(trial: TrialRecord) -> Values:
    """Return a trial's knobs with ineffective ones at fixed values: equal for equal trainings.

    If workload or knobs are not valid any more, return them unchanged.
    """
    try:
        return flat(neutral(configuration_of(trial), trial.not_effective))
    except ConfigError:
        return dict(trial.config)
