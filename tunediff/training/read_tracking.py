"""Which knobs a workload looks at, and which it does not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tunediff.config import flatten, of, systems, to_dict
from tunediff.evaluation.knobs import Evaluation

if TYPE_CHECKING:
    from tunediff.training.session import Session


def watched(knobs: Any) -> tuple[Any, set[str]]:
    """Return a copy of the knobs, and the growing set of the dotted names of those that have been read since."""
    read: set[str] = set()
    return _watched(knobs, "", read), read


def _watched(knobs: Any, prefix: str, read: set[str]) -> Any:
    """Return an instance of a subclass, so that types, fields and `asdict` work as with the user's class."""
    if not hasattr(knobs, "__dict__"):  # slots
        return knobs
    inner = {name: value for name, value in vars(knobs).items() if dataclasses.is_dataclass(value)}
    plain = {prefix + field.name: field.name for field in dataclasses.fields(knobs) if field.name not in inner}
    leaves = {short: long for long, short in plain.items()}

    def look(self: Any, name: str) -> Any:
        if name in leaves:
            read.add(leaves[name])
        elif name == "__dict__":
            read.update(plain)
        return object.__getattribute__(self, name)

    kind = type(
        type(knobs).__name__, (type(knobs),), {"__getattribute__": look, "__reduce__": lambda _: knobs.__reduce__()}
    )
    copy: Any = object.__new__(kind)
    values = {**vars(knobs), **{name: _watched(value, f"{prefix}{name}.", read) for name, value in inner.items()}}
    for name, value in values.items():
        object.__setattr__(copy, name, value)
    return copy


def _read_elsewhere(config: Any) -> set[str]:
    """Return the knobs of our section `evaluation` that the engine and `tunediff.evaluate` read."""
    judged = isinstance(config.evaluation, Evaluation) and of(config).get_hook("sample_images") is not None
    fields = dataclasses.fields(Evaluation if judged else systems.Evaluation)
    return {f"evaluation.{field.name}" for field in fields} - {"evaluation.images"}  # the command has its own


def unread(session: Session) -> tuple[str, ...]:
    """Return the knobs of a user's workload that its training has never looked at, on this rank."""
    config = session.config
    if not config.schema.version:
        return ()
    own = {field.name for field in dataclasses.fields(config.schema.own)}
    names = [name for name in flatten(to_dict(config)) if name.partition(".")[0] in own]
    found = [name for name in names if name not in session.read_knobs | _read_elsewhere(config)]
    found += [] if session.autocast_entered else ["precision.amp"]
    code = of(config).file
    mentioned = code is not None and any(
        word in text for text in code.contents.values() for word in (b"trial.config", b".config.loader")
    )
    if session.own_loader and not mentioned:  # a loader of one's own may be made of `trial.config.loader`
        names = [f"loader.{field.name}" for field in dataclasses.fields(config.loader)]
        found += [name for name in names if name not in session.followed]
    return (*found, *sorted(session.not_followed - set(found)))
