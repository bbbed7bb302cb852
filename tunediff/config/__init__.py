"""Configurations: every knob of one training, declared once. `from tunediff import config as cfg`."""

from tunediff.config.files import dump, load, named, parse_overrides, read_yaml, with_words
from tunediff.config.knobs import ConfigError, Knob, Lines, Values
from tunediff.config.schema import (
    Configuration,
    Schema,
    differences,
    fingerprint,
    flat,
    flatten,
    nest,
    not_effective,
    override,
    to_dict,
    with_absolute_paths,
)
from tunediff.config.systems import Systems
from tunediff.config.workload import Metric, Quantity, Workload, baseline, baseline_names, find, from_dict, of

__all__ = [
    "ConfigError", "Configuration", "Knob", "Lines", "Metric", "Quantity", "Schema", "Systems", "Values", "Workload",
    "baseline", "baseline_names", "differences", "dump", "find", "fingerprint", "flat", "flatten", "from_dict", "load",
    "named", "nest", "not_effective", "of", "override", "parse_overrides", "read_yaml", "to_dict",
    "with_absolute_paths", "with_words",
]  # fmt: skip
