"""Configurations: every knob, declared once. Use as `from tunediff import config as cfg`."""

from tunediff.config.configurations import (
    differences,
    effective,
    fingerprint,
    flat,
    neutral,
    not_effective,
    override,
    with_absolute_paths,
    with_relative_paths,
)
from tunediff.config.files import (
    FORMAT,
    FORMAT_KEY,
    check_format,
    dump,
    load,
    named,
    parse_overrides,
    read_yaml,
    to_yaml,
    with_words,
)
from tunediff.config.knobs import Choice, ConfigError, File, Knob, Lines, Range, Values
from tunediff.config.schema import Configuration, Schema, flatten, nest, to_dict
from tunediff.config.systems import Systems
from tunediff.config.workload import (
    Metric,
    Quantity,
    Workload,
    baseline,
    baseline_names,
    find,
    from_dict,
    is_command,
    is_users,
    of,
    remove_copy,
    take_along,
)

__all__ = [
    "FORMAT", "FORMAT_KEY", "Choice", "ConfigError", "Configuration", "File", "Knob", "Lines",
    "Metric", "Quantity",
    "Range", "Schema", "Systems", "Values", "Workload", "baseline", "baseline_names",
    "check_format",
    "differences", "dump", "effective", "find", "fingerprint", "flat", "flatten",
    "from_dict",
    "is_command", "is_users", "load", "named", "nest",
    "neutral", "not_effective",
    "of", "override", "parse_overrides", "read_yaml", "remove_copy",
    "take_along",
    "to_dict", "to_yaml", "with_absolute_paths", "with_relative_paths", "with_words",
]  # fmt: skip
