"""What a workload declares, and where it is found.

A workload is a module with `Knobs`, `OBJECTIVE` and `train(trial)`; a package keeps the first two in `PACKAGE.knobs`
and what needs torch in `PACKAGE.train`, which is imported when something is trained. It may add `PRESETS`, named
baselines; `UNIT`, what a sample is called; `QUANTITIES`, what its points hold besides what all have; `ruler(config)`,
which says in a sentence how its objective is measured; `check_files(knobs, evaluates)`, which refuses missing files
before anything starts; `network(knobs)`, the bare model; `initial_weights(path, knobs)`;
`evaluator(config, world)`, which judges a finished model; and `MEMORY_FREE` and `MEMORY_SAVING`, names of knobs that
change next to nothing about device memory, and of lists that save the more of it the longer they are.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import typing
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

from tunediff.config.knobs import ConfigError, Lines, Values, refuse
from tunediff.config.schema import Configuration, Schema, override
from tunediff.config.systems import Systems

SHIPPED = {"diffusion": "tunediff.workloads.diffusion"}
"""Our own workloads: name and package."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """What a workload is judged by."""

    name: str
    """The key in what its evaluation returns, and in every point of a curve."""
    mode: Literal["min", "max"]
    """Which direction is better."""
    label: str = ""
    """What it is called; an evaluation may return a better `label`."""


@dataclasses.dataclass(frozen=True)
class Quantity:
    """Something that a training measures or that follows from it, as tables and axes show it."""

    label: str
    unit: str = ""
    """As shown; the name says the unit of the stored value."""
    meaning: str = ""
    scale: float = 1.0
    """Shown = stored × scale."""

    @property
    def heading(self) -> str:
        """`step (ms)`."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclasses.dataclass(frozen=True)
class Workload:
    """A workload that was found."""

    name: str
    declared: ModuleType
    """Where `Knobs` and `OBJECTIVE` stand."""
    package: str = ""

    @functools.cached_property
    def schema(self) -> Schema:
        """Its knobs and those of the systems. Raises `ConfigError` for knobs that cannot be used."""
        if (own := getattr(self.declared, "Knobs", None)) is None:
            raise ConfigError(f"{self.name}: has no class Knobs")
        return Schema(self.name, own, Systems)

    @property
    def objective(self) -> Metric:
        """What a search of it optimizes unless told otherwise."""
        return typing.cast(Metric, self.declared.OBJECTIVE)

    @property
    def presets(self) -> Mapping[str, Values]:
        """Named baselines: knobs by dotted name."""
        return getattr(self.declared, "PRESETS", {})

    @property
    def unit(self) -> str:
        """What the samples that it learns from are called: a plural, `images`, `tokens`."""
        return getattr(self.declared, "UNIT", "samples")

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """What its points hold besides what all have, by name."""
        return getattr(self.declared, "QUANTITIES", {})

    @functools.cached_property
    def code(self) -> ModuleType:
        """Where `train` stands; imports torch."""
        return importlib.import_module(f"{self.package}.train") if self.package else self.declared

    def offers(self, function: str) -> Any:
        """A function of the workload that not every workload has, or None."""
        return getattr(self.declared, function, None) or getattr(self.code, function, None)


def find(name: str, where: str = "workload") -> Workload:
    """The workload of that name, as `to_dict` writes it. Raises `ConfigError`."""
    refuse(name not in SHIPPED, f"{where}: workload: unknown name {name!r}; allowed: {', '.join(SHIPPED)}")
    return _shipped(name)


@functools.cache
def _shipped(name: str) -> Workload:
    """Once for each name: configurations of two schemas are never equal."""
    return Workload(name, importlib.import_module(f"{SHIPPED[name]}.knobs"), SHIPPED[name])


def of(config: Configuration) -> Workload:
    """The workload that a configuration belongs to."""
    return find(config.schema.workload)


def baseline_names() -> list[str]:
    """What may stand after `workload:` in a search file."""
    return [preset for shipped in SHIPPED for preset in find(shipped).presets]


def baseline(name: str, where: str = "workload") -> Any:
    """The configuration of a named baseline (`digits`, `cifar10`, `images`), not yet checked as a whole."""
    for workload in map(find, SHIPPED):
        if name in workload.presets:
            # `images` needs a path, which comes on top: rules that join knobs are applied when all of them are there.
            default = workload.schema.default()
            return override(default, workload.presets[name], where=f"workload {name}", check=False)
    raise ConfigError(f"{where}: workload: unknown name {name!r}; allowed: {', '.join(baseline_names())}")


def named_in(content: Lines, where: str) -> Workload:
    """The workload that is named in a configuration, and is taken out of it. Raises `ConfigError`."""
    missing = f"is missing: which training are these knobs of? allowed: {', '.join(SHIPPED)}"
    refuse("workload" not in content, f"{where}: workload: {missing}")
    return find(str(content.pop("workload")), where)


def from_dict(nested: Mapping[str, Any], where: str, check: bool = True) -> Any:
    """The configuration that `to_dict` wrote, of whatever workload. Raises `ConfigError`."""
    rest = dict(nested)
    return named_in(rest, where).schema.from_dict(rest, where, check)
