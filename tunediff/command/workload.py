"""Make a command and its parameters a workload, so that all that runs or shows workloads takes it.

A command is kept as `tunediff_command.yaml`: how it is run and judged, and `parameters:` with the
values of the baseline. A configuration of it has these parameters as its knobs, and a seed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, cast

import yaml
from annotated_types import Ge, Lt

from tunediff.command.definition import FILE, CommandDefinition
from tunediff.command.run import POINTS
from tunediff.config import systems
from tunediff.config.code import Code
from tunediff.config.files import FORMAT_KEY, to_yaml
from tunediff.config.knobs import ConfigError, Fixed, Int, Values, section
from tunediff.config.schema import Configuration, Schema, nest
from tunediff.config.workload import Metric, Workload, find, from_dict
from tunediff.core.clock import LINE, PROCESS, TRAINING
from tunediff.core.files import FORMAT, check_format
from tunediff.core.target import Target

PARAMETERS = "parameters"
"""Key of `tunediff_command.yaml` with the parameters and their values in the baseline."""


@section
class CommandSystems(Configuration):
    """What every command has: a seed. How it uses the hardware is up to its parameters."""

    seed: Annotated[Int, Ge(0), Lt(2**31), Fixed()] = 0
    """Seed of a run; the command gets it where it names {seed}."""
    loader: ClassVar[systems.Loader] = systems.Loader(batch_size=1)
    precision: ClassVar[systems.Precision] = systems.Precision()
    memory: ClassVar[systems.Memory] = systems.Memory()
    compile: ClassVar[systems.Compile] = systems.Compile()
    evaluation: ClassVar[systems.EvaluationSection] = systems.EvaluationSection(points=POINTS)

    @property
    def devices(self) -> int:
        """Return how many devices a run occupies."""
        return self.parallel.workers

    @property
    def definition(self) -> CommandDefinition:
        """Return how its command is run and judged."""
        workload = find(self.schema.workload)
        assert isinstance(workload, CommandWorkload)
        return workload.definition

    @property
    def parallel(self) -> systems.Parallel:
        """Return what places a run: its GPUs belong to one process, that of the command."""
        gpus = self.definition.gpus
        return systems.Parallel(workers=gpus, strategy="dp") if gpus > 1 else systems.Parallel()


TAKEN = (
    "loader", "precision", "memory", "compile", "parallel", "evaluation", "devices", "workload",
    "definition",
    "knobs", "schema", "sections",
)  # fmt: skip
"""Names that configurations have for something else."""
_unwritten: dict[str, bytes] = {}
"""Contents of commands that have no file yet, by the path that stands for it."""


class CommandWorkload(Workload):
    """A workload that is a command; `definition` says how to run it."""

    @property
    def definition(self) -> CommandDefinition:
        """Return how the command is run and judged."""
        return cast(CommandDefinition, self.declared.DEFINITION)

    @property
    def clock(self) -> str:
        """Return the clock that its runs have unless they print lines about it."""
        if self.definition.time is not None:
            return TRAINING
        return PROCESS if self.definition.clock_from is None else LINE

    @property
    def unseeded(self) -> bool:
        return self.definition.unseeded

    @property
    def target(self) -> Target | None:
        """Return the target at which its runs end; None: they have none."""
        return self.definition.condition

    @functools.cached_property
    def title(self) -> str:
        """Return the command in messages."""
        return "command"

    @functools.cached_property
    def schema(self) -> Schema:
        """Return its parameters and its seed as knobs."""
        version = self.file.version if self.file is not None else ""
        return Schema(
            self.name, self.declared.Knobs, CommandSystems, version, self.title, from_dict
        )


def of_file(path: Path, where: str) -> Workload:
    """Return the workload of a `tunediff_command.yaml`. Raises `ConfigError`."""
    content = _unwritten.get(str(path))
    if content is None:
        if not path.is_file():
            raise ConfigError(f"{where}: workload: {path}: no such file")
        content = path.read_bytes()
    return _workload(str(path), content)


@functools.lru_cache(maxsize=64)  # configurations of two schemas are never equal
def _workload(name: str, content: bytes) -> Workload:
    lines = yaml.safe_load(content)
    check_format(lines.pop(FORMAT_KEY, FORMAT), f"{name}: {FORMAT_KEY}")
    knobs = _class("Knobs", nest(lines.pop(PARAMETERS, None) or {}), f"{name}: {PARAMETERS}")
    definition, path = CommandDefinition.of(lines, name), Path(name)
    declared = ModuleType("command")
    objective = Metric(
        definition.judged, "min" if definition.outcome == "time" else definition.mode
    )
    declared.__dict__.update(DEFINITION=definition, Knobs=knobs, OBJECTIVE=objective, UNIT="values")
    return CommandWorkload(name, declared, file=Code(path.parent, path, {Path(FILE): content}))


def make(definition: CommandDefinition, parameters: Values, where: str, at: str = "") -> Workload:
    """Return the workload of a command that has no file yet; `cfg.take_along` writes it.

    `at`: tells the commands of one process apart. Raises `ConfigError` for parameters that the
    command never gets, and for those that no knob can have.
    """
    definition.template.check(list(parameters), where, unseeded=definition.unseeded)
    content = to_yaml({**definition.lines, PARAMETERS: dict(parameters)}).encode()
    name = str(Path(definition.folder).absolute() / f".tunediff-command{at}" / FILE)
    _unwritten[name] = content
    workload = _workload(name, content)
    workload.schema  # noqa: B018 – refuses parameters that cannot be used
    return workload


def _class(name: str, nested: Mapping[str, Any], where: str) -> type:
    """Return a frozen dataclass of nested parameters, with their values as the defaults.

    Raises `ConfigError` for a name or a value that no knob can have.
    """
    fields: list[tuple[str, Any, Any]] = []
    for key, value in nested.items():
        if not str(key).isidentifier() or (name == "Knobs" and key in TAKEN):
            raise ConfigError(
                f"{where}: {key}: is not allowed as a name of a parameter; allowed: another name in"
                f" the command, such as {key}={{value_of_{str(key).replace('-', '_')}}}"
            )
        if isinstance(value, Mapping):
            made = _class(str(key), value, f"{where}: {key}")
            fields.append((key, made, dataclasses.field(default_factory=made)))
        elif isinstance(value, bool | int | float | str):
            fields.append((key, type(value), dataclasses.field(default=value)))
        else:
            allowed = "allowed: a number, a text, true or false"
            raise ConfigError(f"{where}: {key}: {value!r} is not allowed; {allowed}")
    return dataclasses.make_dataclass(name, fields, frozen=True)


def common_type(values: Iterable[Any]) -> type:
    """Return the type of a parameter that has all these values: float for numbers of both kinds."""
    kinds = {type(value) for value in values}
    if kinds <= {int, float}:
        return int if kinds == {int} else float
    return kinds.pop() if len(kinds) == 1 else str
