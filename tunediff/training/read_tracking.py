"""Which knobs a workload looks at, and which it does not."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from tunediff.config import Configuration, flatten, of, systems, to_dict
from tunediff.evaluation.knobs import Evaluation

if TYPE_CHECKING:
    from tunediff.training.session import Session

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
    """Return an instance of a subclass, so that types, fields and `asdict` work as with the user's
    class."""
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
        read.add(
            *flatten(dataclasses.asdict(knobs), prefix=prefix)
        )  # what reads the copy is not seen
        return knobs.__reduce__()

    kind = type(
        type(knobs).__name__, (type(knobs),), {"__getattribute__": look, "__reduce__": reduce}
    )
    copy: Any = object.__new__(kind)
    for name, value in {**vars(knobs), **inner}.items():
        object.__setattr__(copy, name, value)
    return copy


def _read_elsewhere(config: Any) -> set[str]:
    """Return the knobs of our section `evaluation` that the engine and `tunediff.evaluate` read."""
    judged = (
        isinstance(config.evaluation, Evaluation)
        and of(config).get_hook("sample_images") is not None
    )
    fields = dataclasses.fields(Evaluation if judged else systems.Evaluation)
    return {f"evaluation.{field.name}" for field in fields} - {
        "evaluation.images"
    }  # the command has its own


def unread(session: Session) -> tuple[str, ...]:
    """Return the knobs that a user's training could have looked at and never did, on this rank."""
    config = session.config
    if not config.schema.version:
        return ()
    sections = {field.name for field in dataclasses.fields(config.schema.own)}
    sections |= {"loader"} if session.own_loader else set()  # `trial.batches` follows them all
    names = [name for name in flatten(to_dict(config)) if name.partition(".")[0] in sections]
    read = {*session.read_knobs, *_read_elsewhere(config)}
    unread = [name for name in (*names, "precision.amp") if name not in read]
    return (*unread, *sorted(session.not_followed - set(unread)))
