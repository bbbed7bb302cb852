"""The result of a comparison: what `--json` prints and what Python returns; see `search_result`."""

from __future__ import annotations

from typing import Literal

from tunediff.report.search_result import Configuration, Mode, Result


class ComparisonResult(Result):
    """What a comparison of two configurations has shown: `tunediff compare --json`."""

    comparison: str
    """name of the comparison"""
    a: str
    """the two sides, as they were given"""
    b: str
    changed: Configuration
    """knobs of B that differ from A"""
    verdict: Literal["better", "worse", "equivalent", "no significant difference", "failed"] | None
    """what B is compared with A; equivalent: the interval lies inside --within; null: not over
    yet"""
    failure: str | None
    """which run failed, and why"""
    metric: str
    """the objective as it is printed, and its name in files"""
    objective: str
    direction: Mode
    """which values are better"""
    a_value: float | None
    """mean and standard deviation over the runs, and these runs, pair by pair"""
    a_sd: float | None
    a_values: list[float]
    b_value: float | None
    b_sd: float | None
    b_values: list[float]
    ratio: float | None
    """B over A, where values are compared by ratios; the interval holds for looking after every
    pair, in 1 − level of comparisons (1 − 2 × level for one-sided ones)"""
    ratio_low: float | None
    ratio_high: float | None
    difference: float | None
    """B less A, where values are compared by differences"""
    difference_low: float | None
    difference_high: float | None
    resolution: float | None
    """the difference that these pairs could tell: a ratio − 1, or in units"""
    one_run_each_tells: float | None
    """the difference that one run each would tell; null while rough"""
    rough: bool
    """whether resolution comes from too few pairs (below nine) to be known to more than a factor of
    two"""
    stopped: Literal["decided", "equal", "hopeless", "spent", "open"]
    """why no further pair ran: decided, equal (--within), hopeless (more pairs would hardly
    tell), spent, or open after a failure"""
    level: float
    """probability of a wrong verdict if nothing differs; one_sided: all of it for «better»; fixed:
    one look, after all pairs"""
    one_sided: bool
    fixed: bool
    within: float | None
    """the difference that does not matter, as resolution is given; null: not given"""
    pairs: int
    """pairs that count, the most there could be, and runs that ended"""
    pairs_at_most: int
    runs: int
    disturbed_runs: int
    """runs during which others used the machine: their speed, and so their results, may be worse
    for it"""
    a_setup_s: float | None
    """median seconds of A's runs and of B's before their first batch, which the budget counts with
    --setup charged only"""
    b_setup_s: float | None
    training_s: float
    """of all runs"""
    clock: str
    """which seconds counted: process, from a line, or training; only clocks of one kind compare"""
    start_up_share: float | None
    """of the processes' seconds, before the clock began or else before the first value; null: not
    of commands"""
    wall_s: float
    """from the start of the process to the result, summed over the commands that ran the
    comparison"""
    results: str
    """folder of the comparison, and its page"""
    report: str


class PairVerdict(ComparisonResult):
    """What a comparison has shown: the keys of `PairedComparison.json()`, and sentences."""

    sentences: list[str]
    """the verdict in words"""
