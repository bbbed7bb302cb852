"""Configurations: every knob of one training, declared once. `from tunediff import config as cfg`."""

from tunediff.config.files import dump, load, named, parse_overrides, read_yaml
from tunediff.config.schema import (
    ConfigError,
    Configuration,
    Knob,
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
    "ConfigError", "Configuration", "Knob", "Metric", "Quantity", "Schema", "Systems", "Workload",
    "baseline", "baseline_names", "differences", "dump", "find", "fingerprint", "flat", "flatten", "from_dict", "load",
    "named", "nest", "not_effective", "of", "override", "parse_overrides", "read_yaml", "to_dict",
    "with_absolute_paths",
]  # fmt: skip
