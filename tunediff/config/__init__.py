"""Configurations: every knob, declared once. Use as `from tunediff import config as cfg`."""

from tunediff.config.files import (
    FORMAT_KEY,
    dump,
    load,
    named,
    parse_overrides,
    read_yaml,
    to_yaml,
    with_words,
)
from tunediff.config.knobs import Choice, ConfigError, File, Knob, Lines, Range, Values
from tunediff.config.schema import (
    Configuration,
    Schema,
    differences,
    effective,
    fingerprint,
    flat,
    flatten,
    identity,
    nest,
    neutral,
    not_effective,
    override,
    to_dict,
    with_absolute_paths,
    with_relative_paths,
)
from tunediff.config.systems import Systems
from tunediff.config.workload import (
    Metric,
    Workload,
    baseline,
    baseline_names,
    configuration_of,
    effective_knobs,
    find,
    from_dict,
    is_command,
    is_users,
    of,
    quantities,
    remove_copy,
    take_along,
)
from tunediff.core.files import FORMAT, check_format
from tunediff.core.point import Quantity

__all__ = [
    "FORMAT", "FORMAT_KEY", "Choice", "ConfigError", "Configuration", "File", "Knob", "Lines",
    "Metric", "Quantity", "Range", "Schema", "Systems", "Values", "Workload", "baseline",
    "baseline_names", "check_format", "configuration_of", "differences", "dump", "effective",
    "effective_knobs", "find", "fingerprint", "flat", "flatten", "from_dict", "identity",
    "is_command", "is_users", "load", "named", "nest", "neutral", "not_effective", "of",
    "override", "parse_overrides", "quantities", "read_yaml", "remove_copy",
    "take_along", "to_dict", "to_yaml", "with_absolute_paths", "with_relative_paths", "with_words",
]  # fmt: skip
