"""A new search of a user's workload: its folder, once two steps and one evaluation have worked."""

from __future__ import annotations

import collections
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Systems
from tunediff.core.text import number
from tunediff.search_space import SearchSpace, without
from tunediff.training import check
from tunediff.tuning import experiment


def create(
    folder: Path, space: SearchSpace, content: Lines, own: bool, say: Callable[[str], None]
) -> tuple[SearchSpace, check.Report]:  # fmt: skip
    """Call `experiment.create` and check the copy of the workload there; return the space and the check's report.

    `own`: the space is not of a search file; it loses the knobs that turn out to change nothing.
    Raises `ConfigError` with what is wrong with the workload; the folder is gone then.
    """
    created = experiment.create(folder, space, content)
    copy, original = created.workload.file, space.workload.file
    assert copy is not None
    assert original is not None
    try:
        report = check.before_search(_tried(created), say)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)  # nothing of it can be resumed
        if isinstance(error, ConfigError):  # the user knows the original
            raise ConfigError(str(error).replace(str(copy.root), str(original.root))) from None
        raise
    title, searched = created.workload.title, {dimension.name for dimension in created.dimensions}
    say(f"{title}: passed; {created.workload.objective.name} {number(report['value'])} after {check.STEPS} steps")
    for text in report["warnings"]:
        say(f"WARNING: {title}: {text}")
    fields = {field.name for field in dataclasses.fields(created.schema.own)}
    useless = searched & set(report["unread"]) if own else set()
    effects = collections.defaultdict[str, list[str]](list)
    for knob in report["unread"]:
        if knob in searched or knob.partition(".")[0] in fields:
            effect = "not searched" if knob in useless else "searched" if knob in searched else "not effective"
            effects[effect].append(knob)
    for effect, knobs in effects.items():
        say(f"WARNING: {title}: train(trial) never reads {', '.join(knobs)}: {effect}")
    if not useless or useless == searched:
        return created, report
    shutil.rmtree(folder)
    return experiment.create(folder, *without(space, content, useless)), report


def _tried(space: SearchSpace) -> Systems:
    """Return the baseline, with as few ranks and loader processes as show whether several work."""
    tried: Systems = space.baseline
    for dimension in space.dimensions:
        most = max(dimension.choices) if dimension.choices and dimension.name.endswith(".workers") else dimension.high
        if dimension.name == "loader.workers" and most > 0 and not tried.loader.resident:
            tried = cfg.override(tried, {dimension.name: 1}, check=False)
        if dimension.name == "parallel.workers" and most > 1 and not tried.loader.batch_size % 2:
            tried = cfg.override(tried, {dimension.name: 2}, check=False)
    return tried
