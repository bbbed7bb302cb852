"""Options that searches and comparisons share, as commands and as calls from Python."""

from __future__ import annotations

import dataclasses

from tunediff.config import Systems, of
from tunediff.core.machine_options import MachineOptions
from tunediff.core.options import StorageOptions, option
from tunediff.integrations.services import SERVICES

UNIT_HELP = (
    "what the budget counts: training seconds (wall, the default), or these times devices (device)"
)
TRACK_HELP = "the service that shows runs: wandb, mlflow, … (docs/how-to/trackers.md)"


@dataclasses.dataclass(kw_only=True)
class RunOptions(MachineOptions, StorageOptions):
    """Options of searches and comparisons."""

    name: str | None = option(None, "name of its folder (default: what is run, and the time)")
    unit: str | None = option(None, UNIT_HELP, choices=("wall", "device"))
    track: str | None = option(None, TRACK_HELP, choices=tuple(SERVICES))
    check: bool = option(
        True, "try a workload of your own first, with two steps and two evaluations"
    )
    force: bool = option(
        False,
        "start what would take over 30 days, 100,000 trials or the whole disk, or what another"
        " machine began to run",
    )


def check_files(config: Systems, evaluates: bool) -> None:
    """Refuse missing files that the workload of a training reads. Raises `ConfigError`."""
    if (check := of(config).get_hook("check_files")) is not None:
        check(config.knobs, evaluates)
