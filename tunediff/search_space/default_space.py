"""Infer a search space from the ranges declared with a workload's knobs, and system knobs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import Lines
from tunediff.config.knobs import refuse
from tunediff.search_space.searched_knobs import spread


def infer_search_space(
    baseline: Any,
    cores: int,
    gpu: bool,
    leave: Collection[str] = (),
    emulated: Collection[str] = (),
    engine: bool = True,
) -> Lines:
    """Return the section `search:` for a baseline.

    It contains every knob that declares a `Range` or `Choice`, then the workload's `SEARCH`
    (written as in a search file), then the system knobs that can make a training faster on this
    machine. `cores`, `gpu`: the hardware of a training process; `leave`: knobs that the user's file
    sets, which are not searched; `emulated`: values of `precision.amp` that would be slower here;
    `engine`: false where the engine trains nothing, and has no knobs.
    Raises `ConfigError` for a `SEARCH` that is no dictionary.
    """
    # Knobs of the workload, and of a union's member that the baseline has or the search draws
    searched: Lines = {}
    values = cfg.flat(baseline)
    for knob in baseline.schema.knobs.values():
        absent = (
            knob.member is not None and knob.member[0] not in searched and knob.name not in values
        )
        if knob.space is not None and not absent:
            searched[knob.name] = knob.space
    workload = cfg.of(baseline)
    search = getattr(workload.declared, "SEARCH", {})
    refuse(
        not isinstance(search, dict),
        f"{workload.title}: SEARCH is {search!r}; it needs a dictionary",
    )
    searched |= spread(search, f"{workload.title}: SEARCH")
    system = _of_system(baseline, cores, gpu, emulated) if engine else {}
    searched |= {name: space for name, space in system.items() if name not in searched}
    return {name: space for name, space in searched.items() if name not in leave}


def _of_system(baseline: Any, cores: int, gpu: bool, emulated: Collection[str]) -> Lines:
    """Return the spaces of system knobs, around the baseline's values."""
    loader, passes = baseline.loader, baseline.parallel.workers * baseline.loader.accumulation
    sizes = [loader.batch_size * times // 2 for times in (1, 2, 4, 8)]
    most = baseline.schema.knobs["loader.batch_size"].high
    system: Lines = {
        "loader.batch_size": [size for size in sizes if 0 < size <= most and not size % passes]
    }
    if not loader.resident:
        system["loader.workers"] = sorted(
            {0, loader.workers, *(n for n in (1, 2, 4, 8) if n < cores)}
        )
    system["precision.amp"] = _with(baseline.precision.amp, "none", "bf16")
    if not gpu:
        system["precision.amp"] = [
            value
            for value in system["precision.amp"]
            if value not in emulated or value == baseline.precision.amp
        ]
        if len(system["precision.amp"]) == 1:
            del system["precision.amp"]
    if gpu:
        system["precision.matmul"] = _with(baseline.precision.matmul, "highest", "high")
        system |= {
            "memory.channels_last": [False, True],
            "precision.cudnn_benchmark": [False, True],
        }
        system["compile.mode"] = _with(baseline.compile.mode, "none", "default")
    return system


def completed(
    content: Lines,
    path: Path,
    words: Sequence[str],
    cores: int,
    gpu: bool,
    emulated: Collection[str] = (),
    engine: bool = True,
) -> Lines:
    """Return a search file's content, with an inferred `search:` if it names only a workload.

    `words`: `knob=value` that change its baseline. Raises `ConfigError`.
    """
    workload = content.get("workload")
    file = isinstance(workload, str) and cfg.is_users(workload.partition(":")[0])
    if not file or {"search", "grid", "trials", "ladder"} & content.keys():
        return content
    baseline = cfg.baseline(str(workload), str(path), path.parent)
    fixed = cfg.flatten(content.get("fixed") or {}, f"{path}: fixed")
    baseline = cfg.override(baseline, fixed, f"{path}: fixed", check=False)
    baseline = cfg.override(baseline, cfg.parse_overrides(words, baseline.schema), "command line")
    return {
        **content,
        "search": infer_search_space(baseline, cores, gpu, fixed, emulated, engine),
    }


def _with(value: str, *others: str) -> list[str]:
    """Return the choices without duplicates, the baseline's own value first."""
    return list(dict.fromkeys((value, *others)))
