"""A new search of a user's workload: its folder, once two steps and two evaluations have worked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Systems
from tunediff.core.text import number
from tunediff.inspector import check
from tunediff.search_space import SearchSpace
from tunediff.tuning import experiment

SEVERAL = {"loader.workers": 1, "parallel.workers": 2}
"""Knobs whose least value that shows whether several processes work is tried, where it is searched."""


def create(
    folder: Path, space: SearchSpace, content: Lines, say: Callable[[str], None]
) -> tuple[SearchSpace, check.Report]:
    """Check the workload, then `experiment.create`; return the space and the report.

    Warns of searched knobs that the check has not seen read: another configuration may read them.
    Raises `ConfigError` with what is wrong with the workload, or where no searched knob is read.
    """
    tried: Systems = space.baseline
    for dimension in space.dimensions:
        least = SEVERAL.get(dimension.name)
        if least is not None and least <= max(dimension.choices or [dimension.high]):
            with contextlib.suppress(ConfigError):  # such as a batch that two cannot share
                tried = cfg.override(tried, {dimension.name: least})
    report = check.before_search(tried, say)
    title, searched = space.workload.title, {dimension.name for dimension in space.dimensions}
    value = f"{space.workload.objective.name} {number(report['value'])}"
    say(f"{title}: passed; {value} after {check.STEPS} steps")
    unread = searched.intersection(report["unread"])
    # where none is read, no value of any of them can lead to where one is
    if searched and unread == searched:
        raise ConfigError(
            f"{title}: nothing to search: train(trial) never reads {', '.join(sorted(searched))};"
            " use trial.knobs, trial.loader_options and trial.autocast() where they should act"
        )
    never = f"the check never saw train(trial) read {', '.join(sorted(unread))}: searched all the"
    effect = " same, without effect unless another configuration reads them"
    for warning in [*report["warnings"], *[never + effect] * bool(unread)]:
        say(f"WARNING: {title}: {warning}")
    return experiment.create(folder, space, content), report
