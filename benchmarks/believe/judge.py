"""How often the judge of a change is wrong, and what it finds: levels, targets, a machine that drifts, a chain.

`python -m benchmarks.believe.judge [FILE.csv]`: 3,000 comparisons of at most twelve pairs a row, half an hour on one
core. Noise of other kinds is in `equal.py`. Shares of 2.5 % are right to 0.3 %.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.believe.equal import of_rules
from benchmarks.believe.noise import REFERENCE, Numbers
from tunediff.analysis import drift
from tunediff.analysis.confirmation import FIRST_SHARE
from tunediff.analysis.online_fdr import level_of
from tunediff.analysis.sequential import Rules, look
from tunediff.analysis.statistics import BETTER, WORSE
from tunediff.analysis.targets import target_gate
from tunediff.core.target import Target
from tunediff.tuning.at_once import Turns

MOST = 12
TIME_SD, LOSS_SD = 0.005, 0.0013
"""Of the logarithm of a run's seconds, and of a run's loss: those of a speedrun."""
TARGET = Target("loss", "<=", 3.28)
DRIFT = 0.1
CHAIN, GAINS = 100, 10
"""Proposals of a chain, and how many of them are gains."""
RULES = [
    Rules(level, one_sided) for level, one_sided in itertools.product((0.05, 0.01), (False, True))
]


def settings(rules: Rules) -> dict[str, Any]:
    """Return the rules as columns."""
    return {"level": rules.level, "one_sided": rules.one_sided}


# ---- by time to a target
def of_target(
    rules: Rules, gain: float, room: float, times: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Return how often B is called better: it takes `gain` of the time less, and its mean is `room` sd of a run below
    the target."""
    better = rounds = 0
    for _ in range(times):
        seconds = np.exp(TIME_SD * rng.standard_normal((2, MOST)))
        seconds[1] *= 1 - gain
        losses = TARGET.value + LOSS_SD * (rng.standard_normal(MOST) - room)
        for many in range(3, MOST + 1):
            test = look(seconds[:, :many], MOST, rules=rules)
            verdict = test.differences[0].verdict
            shown = target_gate(losses[:many], TARGET, MOST, rules).shown
            if test.over and (verdict != BETTER or shown or many == MOST):
                break
        better += verdict == BETTER and shown
        rounds += many
    return {"part": "target", **settings(rules), "gain": gain, "room": room, "times": times, "better": better / times,
            "rounds": rounds / times}  # fmt: skip


# ---- on a machine that drifts
def drifting(
    rng: np.random.Generator, gain: float, favours: float
) -> tuple[Numbers, list[dict[str, Any]]]:
    """Return the seconds of both sides on a machine that becomes 10 % slower in the middle of a pair, and its readings.

    favours: by how much less of the drift B suffers than A, as a share of it.
    """
    seconds = np.exp(TIME_SD * rng.standard_normal((2, MOST)))
    seconds[1] *= 1 - gain
    middle, order = MOST // 2, np.arange(MOST) % 2
    for pair in range(MOST):
        for side in (0, 1):
            is_second = side != order[pair]
            if pair > middle or (pair == middle and is_second):
                seconds[side, pair] *= 1 + DRIFT * (1 - favours * side)
    reading = {"copy_s": 1.0, "loader_s": 1.0}
    readings = [
        {
            **reading,
            "pairs": pairs,
            "product_s": (1 + DRIFT * (pairs > middle)) * np.exp(0.003 * rng.standard_normal()),
        }
        for pairs in range(MOST + 1)
    ]
    return seconds, readings


def of_drift(
    rules: Rules,
    gain: float,
    favours: float,
    with_blocks: bool,
    times: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return what comparisons by seconds say on a machine that drifts."""
    better = worse = rounds = 0
    for _ in range(times):
        seconds, readings = drifting(rng, gain, favours)
        for many in range(3, MOST + 1):
            blocks = drift.of(readings[: many + 1]).blocks if with_blocks else []
            test = look(seconds[:, :many], MOST, rules=rules, blocks=blocks)
            if test.over:
                break
        better += test.differences[0].verdict == BETTER
        worse += test.differences[0].verdict == WORSE
        rounds += many
    return {"part": "drift", **settings(rules), "gain": gain, "favours": favours, "blocks": with_blocks,
            "times": times, "better": better / times, "worse": worse / times, "rounds": rounds / times}  # fmt: skip


# ---- at the same time on several devices
def devices_of(candidates: int, at_once: int) -> NDArray[np.int_]:
    """Return the device of each run [candidates, rounds] that are at the same time."""
    turns, found = Turns(candidates, at_once), np.zeros((candidates, MOST), int)
    runs = [(candidate, number) for number in range(MOST) for candidate in turns.order(number)]
    size = turns.groups * candidates if turns.is_a_round_together else at_once
    for begin in range(0, len(runs), size):
        wave = runs[begin : begin + size]
        for run, device in zip(wave, turns.devices(wave), strict=True):
            found[run] = device
    return found


def of_parallel(
    rules: Rules, gain: float, devices: int, unequal: float, times: int, rng: np.random.Generator,
    candidates: int = 2,
) -> dict[str, Any]:  # fmt: skip
    """Return what comparisons by seconds say whose runs are at the same time on several devices, on which candidates
    take turns, and all of which have a speed of their own.

    unequal: standard deviation of the logarithm of a device's speed. A round has noise that its runs share.
    candidates: two sides, or a baseline and the finalists of a search, of which the first has the gain.
    """
    groups, better, worse, rounds = max(1, devices // candidates), 0, 0, 0
    of_pair, places = np.arange(MOST), devices_of(candidates, devices)
    for _ in range(times):
        speed, wave = (
            unequal * rng.standard_normal(devices), TIME_SD * rng.standard_normal(MOST)[of_pair // groups]
        )  # fmt: skip
        noise = TIME_SD * rng.standard_normal((candidates, MOST))
        seconds = np.exp(noise + speed[places] + wave)
        seconds[1] *= 1 - gain
        for many in range(groups, MOST + 1, groups):  # a look after each wave
            test = look(seconds[:, :many], MOST, rules=rules, blocks=list(of_pair[:many] % groups))
            if test.over:
                break
        verdicts = [difference.verdict for difference in test.differences]
        better += BETTER in verdicts
        worse += WORSE in verdicts
        rounds += many
    return {"part": "parallel", **settings(rules), "gain": gain, "devices": devices, "unequal": unequal, "times": times,
            "candidates": candidates, "better": better / times, "worse": worse / times,
            "rounds": rounds / times}  # fmt: skip


# ---- a chain
def of_chain(
    name: str,
    level: Callable[[list[bool]], float],
    gain: float,
    pairs: int,
    chains: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return what is kept of a hundred proposals with ten gains of `gain` sd of a run, one-sided at levels that follow
    from what was kept before."""
    found = none = 0
    shares = list[float]()
    for _ in range(chains):
        gains, kept = rng.permutation([gain] * GAINS + [0.0] * (CHAIN - GAINS)), list[bool]()
        for one in gains:
            rules = Rules(level(kept), one_sided=True)
            values = np.exp(0.15 * (rng.standard_normal((2, pairs)) - [[0], [one]]))
            for many in range(3, pairs + 1):
                if (test := look(values[:, :many], pairs, rules=rules)).over:
                    break
            kept.append(test.differences[0].verdict == BETTER)
        true = sum(better for better, one in zip(kept, gains, strict=True) if one)
        found, none = found + true, none + sum(kept) - true
        shares.append((sum(kept) - true) / max(1, sum(kept)))
    return {"part": "chain", "rule": name, "gain": gain, "pairs": pairs, "times": chains, "found": found / chains,
            "none": none / chains, "false_share": float(np.mean(shares))}  # fmt: skip


def lord(kept: list[bool]) -> float:
    """Return the level of the next comparison, down to the next of twenty a decade: bounds are simulated once each."""
    return float(10 ** (np.floor(20 * np.log10(level_of(kept, 0.05))) / 20))


def rows(times: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return all rows."""
    for rules, fixed, gain in itertools.product(RULES, (False, True), (0.0, 1.0, 2.0)):
        yield of_rules(
            dataclasses.replace(rules, fixed=fixed), gain, times, np.random.default_rng(seed)
        )
    for rules in RULES:
        for gain, room in ((0.0, 3.0), (0.02, 0.0), (0.01, 2.0), (0.02, 2.0)):
            yield of_target(rules, gain, room, times, np.random.default_rng(seed))
    for rules in RULES:
        for gain, favours, with_blocks in itertools.product((0.0, 0.02), (0.0, 0.2), (False, True)):
            if not (gain and favours):
                yield of_drift(
                    rules, gain, favours, with_blocks, times, np.random.default_rng(seed)
                )
    for rules in RULES:
        for devices, unequal, gain in itertools.product((2, 4, 8), (0.0, 0.01), (0.0, 0.01)):
            yield of_parallel(rules, gain, devices, unequal, times, np.random.default_rng(seed))
    for devices, unequal, gain in itertools.product((2, 3, 6), (0.0, 0.005), (0.0, 0.01)):
        rules = Rules(0.05 * FIRST_SHARE)
        yield of_parallel(rules, gain, devices, unequal, times, np.random.default_rng(seed), 3)
    for gain, pairs in ((2.0, 12), (2.0, 20), (1.0, 20)):
        for name, level in (
            ("5 % each", lambda kept: 0.05),
            ("LORD++", lord),
        ):
            yield of_chain(name, level, gain, pairs, times // CHAIN, np.random.default_rng(seed))


if __name__ == "__main__":
    file = sys.argv[1] if len(sys.argv) > 1 else REFERENCE / "believe" / "judge.csv"
    found = list[dict[str, Any]]()
    for row in rows(3000, seed=0):
        found.append(row)
        print(row, flush=True)
        pd.DataFrame(found).to_csv(file, index=False)
