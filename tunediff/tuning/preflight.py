"""A new search of a user's workload: its folder, once two steps and two evaluations have worked."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Systems, Values
from tunediff.core.text import number
from tunediff.search_space import Dimension, SearchSpace, without
from tunediff.training import check, read_probe
from tunediff.tuning import experiment

MOST_OTHERS = 4
"""Configurations besides the baseline in which it is looked whether a knob is read."""


def create(
    folder: Path, space: SearchSpace, content: Lines, say: Callable[[str], None]
) -> tuple[SearchSpace, check.Report]:
    """Check the workload, then `experiment.create`; return the space and the report.

    The space loses the knobs that the training never reads. Raises `ConfigError` with what is wrong
    with the workload, or where nothing is left to search.
    """
    report = check.before_search(_tried(space), say)
    space = dataclasses.replace(space, baseline=cfg.found_again(space.baseline))
    useless = _useless(space, report, say)
    title, searched = space.workload.title, {dimension.name for dimension in space.dimensions}
    say(
        f"{title}: passed; {space.workload.objective.name} {number(report['value'])} after"
        f" {check.STEPS} steps"
    )
    for text in report["warnings"]:
        say(f"WARNING: {title}: {text}")
    fields = {field.name for field in dataclasses.fields(space.schema.knobs_type)}
    effects = collections.defaultdict[str, list[str]](list)
    for knob in report["unread"]:
        if knob in searched or knob.partition(".")[0] in fields:
            effect = "not searched" if knob in useless else "not effective"
            effects[effect].append(knob)
    for effect, knobs in effects.items():
        say(f"WARNING: {title}: train(trial) never reads {', '.join(knobs)}: {effect}")
    if useless:
        space, content = without(space, content, useless)
    return experiment.create(folder, space, content), report


def _useless(space: SearchSpace, report: check.Report, say: Callable[[str], None]) -> set[str]:
    """Return the searched knobs that the training never reads; correct the report.

    Raises `ConfigError` where nothing else is searched.
    """
    searched = {dimension.name for dimension in space.dimensions} - {"seed"}
    title = space.workload.title
    sections = {field.name for field in dataclasses.fields(space.schema.knobs_type)}
    if doubtful := {
        knob for knob in searched & set(report["unread"]) if knob.partition(".")[0] in sections
    }:
        say(
            f"{title}: looking whether {', '.join(sorted(doubtful))} are read in other"
            " configurations"
        )
        others = [
            cfg.override(one, {"parallel.workers": 1}, check=False)
            for one in _others(space, sections)
        ]
        doubtful &= read_probe.knobs_read(others)
        report["unread"] = [knob for knob in report["unread"] if knob not in doubtful]
    useless = searched & set(report["unread"])
    if useless and useless == searched:
        raise ConfigError(
            f"{title}: nothing to search: train(trial) never reads {', '.join(sorted(useless))};"
            " use trial.knobs, trial.loader_options and trial.autocast() where they should act (of"
            " command line parsers, argparse and absl get the knobs; others, such as tyro, keep"
            " their defaults)"
        )
    return useless if space.kind in ("search", "grid") else set()


def _others(space: SearchSpace, sections: set[str]) -> Iterator[Systems]:
    """Yield configurations in which knobs of `sections` differ from the baseline's.

    Each of up to `MOST_OTHERS` choices is in one: a knob may be read only with another's value.
    """
    baseline = cfg.flat(space.baseline)
    dimensions = [one for one in space.dimensions if one.name.partition(".")[0] in sections]
    count = max(1, min(MOST_OTHERS, max(len(one.choices or ()) for one in dimensions) - 1))
    for index in range(1, count + 1):
        changed: Values = {}
        for dimension in dimensions:
            name = dimension.name
            if dimension.active(baseline | changed):
                changed[name] = _other_value(
                    dimension, baseline.get(name), index / (count + 1), index
                )
        with contextlib.suppress(ConfigError):  # knobs that contradict each other
            yield space.config(changed)


def _other_value(dimension: Dimension, value: Any, share: float, index: int) -> Any:
    """Return the choice `index` places behind `value`, or the number at this share of a range."""
    if (choices := dimension.choices) is not None:
        return choices[((choices.index(value) if value in choices else 0) + index) % len(choices)]
    low, high, step = dimension.low, dimension.high, dimension.step or int(dimension.integer)
    number = low * (high / low) ** share if dimension.log else low + (high - low) * share
    number = low + step * round((number - low) / step) if step else number
    return int(number) if dimension.integer else number


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
