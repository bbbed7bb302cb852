"""List the knobs of a workload: `tunediff knobs [PREFIX]`.

PREFIX is a knob (`optimizer.lr`) or a section (`timesteps`). Without --workload the knobs are those
of the digits.
"""

from __future__ import annotations

import itertools
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tunediff import cli
from tunediff import config as cfg
from tunediff.config import ConfigError, Knob, Systems
from tunediff.config.knobs import knobs_of, nearest
from tunediff.core.options import JsonOptions, option

UNITS = {"_per_s": "1/s", "_s": "s", "_mib": "MiB"}
"""Units by the ending of a knob's name."""


class KnobsOptions(JsonOptions):
    """The options of the command."""

    prefix: str = option("", "a knob or a section (default: all)", flag="PREFIX", metavar="PREFIX")
    workload: str = option(
        "digits", "digits, cifar10, images, …, or mine.py (default: digits)", metavar="NAME"
    )


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """List knobs; see `--help`."""
    options = cli.parse("knobs", __doc__, KnobsOptions, argv)
    baseline = cfg.baseline(options.workload, "--workload")
    entries = describe(baseline, options.prefix)
    if options.as_json:
        cli.print_json({"workload": options.workload, "knobs": entries})
    else:
        print("\n\n".join(map(in_words, entries)))
    return cli.OK


def describe(baseline: Systems, prefix: str = "") -> list[dict[str, Any]]:
    """Return one record for each knob whose dotted name is `prefix` or lies in that section, in
    JSON types.

    Raises `ConfigError` where there is neither such a knob nor such a section.

    Example:
        >>> describe(cfg.baseline("digits"), "optimizer.lr")[0]["default"]
        0.0002
    """
    schema = baseline.schema
    inside = [
        knob
        for knob in knobs_of(schema.type)
        if f"{knob.name}.".startswith(f"{prefix}." if prefix else "")
    ]
    if not inside:
        what = "neither a knob nor a section"
        raise ConfigError(
            f"PREFIX: {prefix!r} is not allowed: {what}; {nearest(prefix, schema.knobs)}"
        )
    inside.sort(key=lambda knob: list(schema.knobs).index(knob.name))
    values, idle = cfg.flat(baseline), cfg.not_effective(baseline, "cpu")
    # Members of a union may share a knob: it is listed once for each default that they give it.
    alike = itertools.groupby(inside, key=lambda knob: (knob.name, knob.default, knob.description))
    return [_record(list(knobs), values, idle) for _, knobs in alike]


def _record(
    knobs: Sequence[Knob], values: Mapping[str, Any], idle: Mapping[str, str]
) -> dict[str, Any]:
    """Describe equal knobs, of one union member each, as one."""
    knob, members = knobs[0], [knob.member for knob in knobs if knob.member is not None]
    # Members of a union may share a name: the baseline's value is of the member that it has.
    chosen = not members or any(values.get(union) == name for union, name in members)
    return {
        "name": knob.name,
        "type": knob.kind,
        "allowed": knob.allowed,
        "choices": list(knob.choices) if knob.choices is not None else None,
        "low": knob.low,
        "high": knob.high,
        "low_is_allowed": knob.low is not None and not knob.low_open,
        "high_is_allowed": knob.high is not None and not knob.high_open,
        "null_is_allowed": knob.optional,
        "unit": next((unit for ending, unit in UNITS.items() if knob.name.endswith(ending)), None),
        "default": list(knob.default) if isinstance(knob.default, tuple) else knob.default,
        "baseline": values.get(knob.name) if chosen else None,
        "belongs_to": (
            {"knob": members[0][0], "values": [name for _, name in members]} if members else None
        ),
        "searchable": knob.searchable,
        "search": knob.space,
        "not_effective_on_cpu": idle.get(knob.name),
        "help": " ".join(knob.description.split()),
    }


def in_words(record: Mapping[str, Any]) -> str:
    """Return one knob as a block of text for a terminal."""
    default, baseline = json.dumps(record["default"]), json.dumps(record["baseline"])
    facts = [record["allowed"], f"default {default}"]
    if baseline not in (default, "null"):
        facts.append(f"in this baseline {baseline}, which is what runs")
    if record["belongs_to"] is not None:
        facts.append(
            f"only with {record['belongs_to']['knob']} ="
            f" {' or '.join(record['belongs_to']['values'])}"
        )
    if not record["searchable"]:
        facts.append("never searched")
    lines = [f"{record['name']}: {'; '.join(facts)}"]
    lines += textwrap.wrap(record["help"], 100, initial_indent="    ", subsequent_indent="    ")
    if (reason := record["not_effective_on_cpu"]) is not None:
        lines.append(f"    Without effect on a CPU: {reason}.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
