"""A new search of a user's workload: its folder, once two steps and two evaluations have worked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Systems
from tunediff.core.text import number
from tunediff.inspector import check
from tunediff.search_space import SearchSpace
from tunediff.tuning import experiment


def create(
    folder: Path, space: SearchSpace, content: Lines, say: Callable[[str], None]
) -> tuple[SearchSpace, check.Report]:
    """Check the workload, then `experiment.create`; return the space and the report.

    Warns of searched knobs that the check has not seen read: another configuration may read them.
    Raises `ConfigError` with what is wrong with the workload, or where no searched knob is read.
    """
    report = check.before_search(_tried(space), say)
    title, searched = space.workload.title, {dimension.name for dimension in space.dimensions}
    say(
        f"{title}: passed; {space.workload.objective.name} {number(report['value'])} after"
        f" {check.STEPS} steps"
    )
    for text in report["warnings"]:
        say(f"WARNING: {title}: {text}")
    sections = {field.name for field in dataclasses.fields(space.schema.knobs_type)}
    unread = [
        knob for knob in report["unread"] if knob in searched or knob.partition(".")[0] in sections
    ]
    # where none is read, no value of any of them can lead to where one is
    if searched and searched <= {*unread}:
        raise ConfigError(
            f"{title}: nothing to search: train(trial) never reads {', '.join(sorted(searched))};"
            " use trial.knobs, trial.loader_options and trial.autocast() where they should act"
        )
    if unread:
        say(
            f"WARNING: {title}: the check never saw train(trial) read {', '.join(unread)}: searched"
            " all the same, without effect unless another configuration reads them"
        )
    return experiment.create(folder, space, content), report


def _tried(space: SearchSpace) -> Systems:
    """Return the baseline, with as few ranks and loader processes as show whether several work."""
    tried: Systems = space.baseline
    for dimension in space.dimensions:
        most = (
            max(dimension.choices)
            if dimension.choices and dimension.name.endswith(".workers")
            else dimension.high
        )
        if dimension.name == "loader.workers" and most > 0 and not tried.loader.resident:
            tried = cfg.override(tried, {dimension.name: 1}, check=False)
        if dimension.name == "parallel.workers" and most > 1 and not tried.loader.batch_size % 2:
            tried = cfg.override(tried, {dimension.name: 2}, check=False)
    return tried
