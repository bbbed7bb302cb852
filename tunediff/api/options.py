"""Options that searches and comparisons share, as commands and as calls from Python."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunediff.analysis import pairs
from tunediff.analysis.statistics import LEVEL
from tunediff.config import Metric, Systems, of
from tunediff.core.machine_options import MachineOptions
from tunediff.core.options import Options, StorageOptions, option
from tunediff.core.refusals import allow
from tunediff.integrations.services import SERVICES

MOST_PAIRS = 12
"""Default of the largest number of pairs."""
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


@dataclasses.dataclass(kw_only=True)
class VerdictOptions(Options):
    """How a comparison comes to its verdict; fixed before its first run."""

    pairs: int | None = option(None, f"pairs of runs at most, 3 to 100 (default: {MOST_PAIRS})")
    within: str | None = option(
        None, "a difference that does not matter, e.g. 2% of A's value, or 0.01 of an accuracy"
    )
    level: float = option(
        LEVEL, "probability of a wrong verdict if nothing differs (default: 0.05)", metavar="P"
    )
    one_sided: bool = option(
        False, "all of it for «better»: B is never called worse, and found sooner"
    )
    fixed: bool = option(False, "one look, after all --pairs: Student's t-test")

    def verdict_content(self, metric: Metric) -> dict[str, Any]:
        """Return what the file of a comparison says of it. Raises `ConfigError`."""
        most = MOST_PAIRS if self.pairs is None else self.pairs
        allowed = "a whole number from 3 to 100: two say nothing of their own noise"
        allow(3 <= most <= 100, "--pairs", most, allowed)
        allow(0.001 <= self.level <= 0.5, "--level", self.level, "0.001 to 0.5")
        return {
            "pairs": most,
            "within": pairs.margin(self.within, metric),
            "level": self.level,
            "one_sided": self.one_sided,
            "fixed": self.fixed,
        }


def check_files(config: Systems, evaluates: bool) -> None:
    """Refuse missing files that the workload of a training reads. Raises `ConfigError`."""
    if (check := of(config).get_hook("check_files")) is not None:
        check(config.knobs, evaluates)
