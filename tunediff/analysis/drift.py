"""Find where the machine of a comparison has drifted, by the readings between its pairs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = "machine.jsonl"
"""File of a comparison with a line for each reading; `judge.machine_watch` writes it."""
PARTS = {"product_s": 0.05, "copy_s": 0.3, "loader_s": 0.05}
"""Seconds of the parts of the reference, and the change of each from which the machine counts as
another one: copies depend on who else uses the memory."""
SETTLED, NOISE = 2, 2.0
"""Readings that there are before a drift can be told from noise, and how many times their range it
exceeds: the short readings of short runs are noisy."""
FACTS = ("model", "gpus", "serial_digest", "driver", "kernel")


class Drift(NamedTuple):
    """What the readings of a comparison show."""

    readings: list[dict[str, Any]]
    blocks: list[int]
    """For each pair the number of its block, from 0."""
    largest: float | None
    """The largest drift, as a share of the reference before it; 0: none; None: not known."""

    @property
    def machine(self) -> dict[str, Any] | None:
        """Return what the machine is and how it was; None where there is no reading."""
        if not self.readings:
            return None
        facts: dict[str, Any] = next((one["facts"] for one in self.readings if "facts" in one), {})
        counts = [
            count for one in self.readings if (count := one.get("throttle_count")) is not None
        ]
        cards = [card for one in self.readings for card in one.get("gpus", ())]
        reasons = {card["throttle_reasons"] for card in cards} - {None, "0x0000000000000000"}
        sizes = [self.blocks.count(number) for number in sorted(set(self.blocks))]
        return {
            **{name: facts.get(name) for name in FACTS},
            "clock_mhz": self._ends("clock_mhz"),
            "temperature_c": self._ends("temperature_c"),
            "load": self._ends("load"),
            "throttled": counts[-1] > counts[0] if counts else None,
            "gpu_throttle_reasons": sorted(reasons),
            "drift": self.largest,
            "blocks": sizes,
            "neighbours": self.neighbours,
        }

    @property
    def neighbours(self) -> dict[str, float] | None:
        """Return by what share of its seconds each part of the reference takes longer where runs at
        the same time have their neighbours; None: not measured."""
        found = (one["neighbours"] for one in self.readings if "neighbours" in one)
        return next(found, None)

    def _ends(self, name: str) -> list[float]:
        """Return the least and the largest reading of a quantity; [] where it was never read."""
        read = [value for one in self.readings if (value := one.get(name)) is not None]
        return [min(read), max(read)] if read else []

    def sentence(self, rounds: str = "pairs") -> str:
        """Return that the machine drifted, and what follows, or ''; `rounds`: between readings."""
        if not self.largest:
            return ""
        change = "slower" if self.largest > 0 else "faster"
        sizes = " and ".join(str(self.blocks.count(number)) for number in sorted(set(self.blocks)))
        return (
            f"The machine drifted: its reference became {abs(self.largest):.0%} {change}; the"
            f" {rounds} before and after are blocks ({sizes} {rounds})."
        )


NO_READINGS = Drift([], [], None)


def blocks_of(rounds: int, drifts: Sequence[int], at_once: int, candidates: int) -> list[int]:
    """Return the block of each of `rounds`: the machine between two drifts (`drifts`: the block of
    each round by them), and the devices on which the runs of a round are at the same time.

    Where a round has more runs than there are devices, every round has all of them.
    """
    groups, drifts = max(1, at_once // candidates), drifts or [0]
    return [drifts[min(n, len(drifts) - 1)] * groups + n % groups for n in range(rounds)]


def neighbours_sentence(neighbours: Mapping[str, float] | None) -> str:
    """Return how much runs at the same time disturb each other; '' where they do not."""
    slow = {
        part.removesuffix("_s"): share
        for part, share in (neighbours or {}).items()
        if share > PARTS[part]
    }
    if not slow:
        return ""
    parts = ", ".join(f"{part} {share:.0%}" for part, share in slow.items())
    return (
        f"Runs at the same time slow each other: {parts}. What uses less of what they share,"
        " memory above all, gains from that; one run at a time would not show it."
    )


def read(folder: Path) -> Drift:
    """Return the drift of the machine of a comparison."""
    readings = []
    if (folder / FILE).is_file():
        for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
            try:
                readings.append(json.loads(line))
            except ValueError:  # a kill cut the last line
                continue
    return of(readings)


def of(readings: Sequence[dict[str, Any]]) -> Drift:
    """Return the blocks of pairs between which a reference changed by more than `PARTS` allows.

    Two readings in a row must show it: one alone is a passing load. A pair during which it changed
    belongs to the block before: its difference, which the drift has disturbed, widens the noise.
    """
    blocks, block, since, drifts = list[int](), 0, list[dict[str, Any]](), list[float]()
    for number, reading in enumerate(readings):
        blocks += [block] * (reading["pairs"] - len(blocks))
        # Both compared with all readings of the block so far, not with the neighbour: a slow drift
        # of small steps is one as well
        following = readings[number : number + 2]
        changes = [_change(since, one) for one in following] if since else []
        if len(changes) > 1 and changes[0] * changes[1] > 0:
            drifts.append(changes[0])
            # Before the first pair there is nothing that could be another block
            block, since = block + bool(blocks), []
        since.append(reading)
    largest = max(drifts, key=abs, default=0.0) if readings else None
    return Drift(list(readings), blocks, largest)


def _change(before: Sequence[dict[str, Any]], now: dict[str, Any]) -> float:
    """Return the relative change of that part of the reference which has changed most for its
    share; 0 if none has by more than that, or than what the readings before differ by."""
    if len(before) < SETTLED:
        return 0.0
    changes, excess = dict[str, float](), dict[str, float]()
    for part, share in PARTS.items():
        earlier = sorted(reading[part] for reading in before)
        changes[part] = math.log(now[part] / statistics.median(earlier))
        # The range of the readings of this machine: that of short ones on a busy one is large
        noise = NOISE * math.log(earlier[-1] / earlier[0])
        excess[part] = abs(changes[part]) / max(share, noise)
    most = max(PARTS, key=lambda part: excess[part])
    return math.expm1(changes[most]) if excess[most] > 1 else 0.0
