"""A workload of tests: a ranker of texts, better the higher its accuracy, which shows no pictures."""

from dataclasses import dataclass

from tunediff.config import Metric


@dataclass(frozen=True)
class Knobs:
    """What can be set."""

    width: int = 8
    lr: float = 0.05


OBJECTIVE = Metric("accuracy", "max")
UNIT = "tokens"
PRESETS = {"ranker": {"loader.workers": 0}}


def evaluation_protocol(config):
    return f"share of 500 queries whose answer comes first, by a net of width {config.width}"
