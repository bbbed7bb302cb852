"""Which knobs a workload looks at, and which it does not."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tunediff.config import Configuration, flatten, of, systems, to_dict

T = TypeVar("T")


class Reads:
    """The dotted names of knobs that were read, also by processes that were forked since."""

    def __init__(self, names: Iterable[str]) -> None:
        self._indices = {name: index for index, name in enumerate(names)}
        self._flags = mmap.mmap(-1, len(self._indices) or 1)

    def add(self, *names: str) -> None:
        for name in names:
            if (index := self._indices.get(name)) is not None:
                self._flags[index] = 1

    def __iter__(self) -> Iterator[str]:
        return (name for name, index in self._indices.items() if self._flags[index])


def watched(knobs: T) -> tuple[T, Reads]:
    """Return a copy of a section or configuration, and what is read of it from now on."""
    read = Reads(flatten(dataclasses.asdict(knobs)))  # type: ignore[call-overload]
    return _watched(knobs, "", read), read


def _watched(knobs: Any, prefix: str, read: Reads) -> Any:
    """Return an instance of a subclass: types, fields, `asdict` work as in the user's."""
    fields = {field.name for field in dataclasses.fields(knobs)}
    if not hasattr(knobs, "__dict__"):  # slots: nobody sees who reads it
        read.add(*flatten(dataclasses.asdict(knobs), prefix=prefix))
        return knobs
    inner = {
        name: _watched(value, f"{prefix}{name}.", read)
        for name, value in vars(knobs).items()
        if name in fields and dataclasses.is_dataclass(value)
    }
    if isinstance(knobs, Configuration):  # has the workload's part twice
        inner["knobs"] = _watched(knobs.knobs, prefix, read)
    leaves = {name: prefix + name for name in fields - inner.keys()}

    def look(self: Any, name: str) -> Any:
        if name in leaves:
            read.add(leaves[name])
        elif name == "__dict__":
            read.add(*leaves.values())
        return object.__getattribute__(self, name)

    def reduce(self: Any) -> Any:
        # what reads the copy is not seen
        read.add(*flatten(dataclasses.asdict(knobs), prefix=prefix))
        return knobs.__reduce__()

    kind = type(
        type(knobs).__name__, (type(knobs),), {"__getattribute__": look, "__reduce__": reduce}
    )
    copy: Any = object.__new__(kind)
    for name, value in {**vars(knobs), **inner}.items():
        object.__setattr__(copy, name, value)
    return copy


def unread(
    config: Configuration, read: Reads, ignored: Iterable[str], own_loader: bool
) -> tuple[str, ...]:
    """Return the knobs that a user's training could have read and never did, on this rank.

    `ignored`: knobs that its framework cannot follow; `own_loader`: whether its batches come from a
    loader of its own, which need not follow the knobs of `loader`.
    """
    if not config.schema.version:  # ours read all of theirs
        return ()
    sections = {field.name for field in dataclasses.fields(config.schema.knobs_type)}
    sections |= {"loader"} if own_loader else set()
    names = [name for name in flatten(to_dict(config)) if name.partition(".")[0] in sections]
    known = {*read, *_read_by_us(config)}
    unread = [name for name in (*names, "precision.amp") if name not in known]
    return (*unread, *sorted(set(ignored) - set(unread)))


def _read_by_us(config: Any) -> set[str]:
    """Return the knobs of the section `evaluation` that the engine and `tunediff.evaluate` read;
    the command has an option in place of `evaluation.images`."""
    judges_images = of(config).get_hook("sample_images") is not None
    fields = dataclasses.fields(config.evaluation if judges_images else systems.EvaluationSection)
    return {f"evaluation.{field.name}" for field in fields} - {"evaluation.images"}
