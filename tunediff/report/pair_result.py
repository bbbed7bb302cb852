"""The result of a comparison: what `--json` prints and what Python returns; see `search_result`."""

from __future__ import annotations

from typing import Literal

from tunediff.core.outcomes import State, Verdict
from tunediff.report.search_result import Configuration, Mode, Result


class LedgerResult(Result):
    """The place of a comparison in the ledger of its repository."""

    number: int
    """from 1"""
    budget: float
    """share of all kept changes that may be expected to be none, and the rule that keeps it"""
    rule: str
    level: float
    """what this comparison spent: probability of a wrong «better»"""
    kept: int
    """changes that were better so far, and those since the head was confirmed last"""
    kept_since_confirmed: int
    confirmed: str | None
    """the commit that was confirmed last, or the first one"""
    recheck_due: bool
    """whether the head is to be compared with it again: --ledger --confirm"""


class ComparisonResult(Result):
    """What a comparison of two configurations has shown: `tunediff compare --json`."""

    comparison: str
    """name of the comparison"""
    a: str
    """the two sides, as they were given"""
    b: str
    changed: Configuration
    """knobs of B that differ from A"""
    verdict: Verdict
    """what B is compared with A; equivalent: the interval lies inside --within; quality_not_shown:
    B takes less time, and its values are not shown to be good enough; one_run_repeated: by --same-seed
    all runs of a side are equal, so the noise of a training is not known; open: not over yet"""
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
    stopped: State
    """why no further pair ran: decided, equal (--within), hopeless (more pairs would hardly
    tell), spent, or open after a failure"""
    level: float
    """probability of a wrong verdict if nothing differs; one_sided: all of it for «better»; fixed:
    one look, after all pairs"""
    one_sided: bool
    fixed: bool
    equal_sides: bool
    """whether A was compared with itself, B on other seeds (--equal)"""
    within: float | None
    """the difference that does not matter, as resolution is given; null: not given"""
    pairs: int
    """pairs that count, the most there could be, and runs that ended"""
    pairs_at_most: int
    runs_at_once: int
    """runs at the same time, on equal devices; 1: one after the other"""
    better_in: Literal["value", "time"]
    """what is compared: the values of the objective, or seconds, which then are a_values and
    b_values"""
    target: str | None
    """what B has to reach, and the one-sided p-value of a single t-test that its mean does"""
    target_p: float | None
    quality_shown: bool | None
    """whether B's values are shown to be good enough for its time to count; null: nothing is to be
    shown"""
    a_quality: list[float]
    """by time: the values of the objective, pair by pair"""
    b_quality: list[float]
    runs: int
    disturbed_runs: int | None
    """runs during which others used the machine: their speed, and so their results, may be worse
    for it; null: not measured, as of commands"""
    a_setup_s: float | None
    """median seconds of A's runs and of B's before their first batch, which the budget of a command
    counts alone"""
    b_setup_s: float | None
    training_s: float
    """of all runs"""
    first_seed: int
    """seed of the first pair, the next ones follow; seeds_drawn: whether it follows from the
    digests of both versions, which nobody chose"""
    seeds_drawn: bool
    a_digest: str | None
    """SHA-256 of the code and the configuration of A and of B, frozen before the first run; null:
    code.json is gone"""
    b_digest: str | None
    seeds_without_effect: list[str]
    """runs of one side, or of both, that are equal on different seeds"""
    judge_digest: str | None
    """SHA-256 of the file that judged the runs; null: they judged themselves"""
    holdout_a_values: list[float]
    """what a second judge says of the runs, shown when it is over: it decided nothing"""
    holdout_b_values: list[float]
    holdout_failure: str | None
    """why the second judge has no values; null: it has, or there is none"""
    ledger: LedgerResult | None
    """null: without --ledger"""
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
