"""Keys, values and options that earlier versions had, with what replaces them.

Each is refused with one sentence. A search that was recorded with them can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunediff.config.knobs import Lines

LAST = "0.2.0"
"""The last version that had them."""
REMOVED = {
    "early_stopping: pause": "use early_stopping: asha, with which real searches ended level",
    "early_stopping: median": "use early_stopping: asha",
    "optimizer.name: schedule_free": "it was never ahead; use optimizer.name: adamw or muon",
    "optimizer.beta1": "it belonged to optimizer.name: schedule_free; leave it out",
    "evaluate --data": (
        "it belonged to pipelines of diffusers; judge the model that one was exported from"
    ),
    "ema: H,H": "evaluate one after the other, each with an --ema of its own",
    "pipeline of diffusers": (
        "judge the model that it was exported from, or train --initial FOLDER from it"
    ),
    "compare --resolution": (
        "it is called --within; an interval inside it is the verdict «equivalent»"
    ),
    "profile --sweep": "search loader.batch_size, or run tunediff search studies/batch_by_gpus",
    "profile --compile": (
        "a search's report says when compile.mode has paid, and so does the study compile_by_gpus"
    ),
    "paused_gib": "no trial is paused any more; leave it out",
}
"""What to use instead, by key, by `key: value` or by command-line option."""


def reason(key: str, value: object = None) -> str:
    """Return which version last had a key, value or option, and what to use; '' if none."""
    instead = REMOVED.get(key) or REMOVED.get(f"{key}: {value}")
    return f"version {LAST} had it last; {instead}" if instead is not None else ""


def without(content: Mapping[str, Any]) -> Lines:
    """Return a search file's content without removed keys and values, which its search had.

    A point or a dimension that needs one of them goes as a whole; its trials are read all the same.
    """
    kept: Lines = {}
    for key, value in content.items():
        if reason(key, value if isinstance(value, str) else None):
            continue
        if isinstance(value, Mapping):
            if _whole(value.get("when")):
                kept[key] = _without_values(key, value) if "choice" in value else without(value)
        elif isinstance(value, list):
            kept[key] = [one for one in value if not reason(key, one) and _whole(one)]
        else:
            kept[key] = value
    return kept


def _without_values(key: str, space: Mapping[str, Any]) -> Lines:
    return {**space, "choice": [value for value in space["choice"] if not reason(key, value)]}


def _whole(point: object) -> bool:
    """Return whether nothing of a point was removed."""
    return not isinstance(point, Mapping) or without(point) == point
