"""What is searched where no search file says so: the ranges beside a workload's knobs, and the knobs of the system."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import Lines


def infer_search_space(baseline: Any, cores: int, gpu: bool, leave: Collection[str] = ()) -> Lines:
    """`search:` around a baseline: every knob with a `Range` or `Choice`, the workload's `SEARCH` (more of it, as a
    search file has it), and what makes a training faster here.

    `cores`, `gpu`: what a training process has; `leave`: knobs that are given by hand.
    """
    searched: Lines = {}
    for knob in baseline.schema.knobs.values():
        absent = knob.member is not None and knob.member[0] not in searched and not _has(baseline, knob.name)
        if knob.space is not None and not absent:
            searched[knob.name] = knob.space
    searched |= getattr(cfg.of(baseline).declared, "SEARCH", {})
    loader, passes = baseline.loader, baseline.parallel.workers * baseline.loader.accumulation
    sizes = [loader.batch_size * times // 2 for times in (1, 2, 4, 8)]
    system: Lines = {"loader.batch_size": [size for size in sizes if size and not size % passes]}
    if not loader.resident:
        system["loader.workers"] = sorted({0, loader.workers, *(n for n in (1, 2, 4, 8) if n < cores)})
    system["precision.amp"] = _with(baseline.precision.amp, "none", "bf16")
    if gpu:
        system["precision.matmul"] = _with(baseline.precision.matmul, "highest", "high")
        system["memory.channels_last"] = [False, True]
        system["compile.mode"] = _with(baseline.compile.mode, "none", "default")
    searched |= {name: space for name, space in system.items() if name not in searched}
    return {name: space for name, space in searched.items() if name not in leave}


def completed(content: Lines, path: Path, words: Sequence[str], cores: int, gpu: bool) -> Lines:
    """A search file's content, with a `search:` where it names a user's workload and no form of its own.

    Raises `ConfigError`.
    """
    workload = content.get("workload")
    file = isinstance(workload, str) and cfg.is_users(workload.partition(":")[0])
    if not file or {"search", "grid", "trials", "ladder"} & content.keys():
        return content
    baseline = cfg.baseline(str(workload), str(path), path.parent)
    given = cfg.flatten(content.get("fixed") or {})
    baseline = cfg.override(baseline, given, f"{path}: fixed", check=False)
    given |= cfg.parse_overrides(words, baseline.schema)
    return {**content, "search": infer_search_space(cfg.override(baseline, given, "command line"), cores, gpu, given)}


def _has(baseline: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(baseline, part):
            return False
        baseline = getattr(baseline, part)
    return True


def _with(value: str, *others: str) -> list[str]:
    """Choices, the baseline's own first."""
    return list(dict.fromkeys((value, *others)))
