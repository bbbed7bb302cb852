"""The result of an experiment: what `--json` prints, `result.json` holds and Python returns.

Each class is one part. Its fields are the keys of the JSON, its docstrings the descriptions in
`tunediff/schemas/result-output.json`, which `python -m tests.json_schemas` writes. Only `summary`
has words for people; `sentences` makes them of the other keys. A description also covers the
undescribed keys below it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tunediff.analysis.targets import Requirement
from tunediff.core.clock import UnitName
from tunediff.core.outcomes import State, Status, Verdict

PAGE, JSON = "report.html", "result.json"
Configuration = dict[str, Any]
Kind = Literal["search", "confirmation", "comparison", "finished"]


class Part(BaseModel):
    """A result, or a part of one: every key is printed, and there are no others."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_serialization_defaults_required=True,
    )


class Effect(Part):
    """How the values of a candidate compare with the baseline's, or with A's."""

    kind: Literal["ratio", "difference"]
    value: float | None = None
    """with the interval that holds for all candidates and interim analyses together; null: not
    known, as of one run"""
    low: float | None = None
    high: float | None = None
    resolution: float | None = None
    """the smallest one that would be significant: a ratio − 1, or in units"""
    p: float | None = None
    """of this one alone, and corrected over all candidates by Holm's method"""
    p_holm: float | None = None


class SpeedUp(Part):
    """How many times sooner a candidate is as good as the baseline at its end."""

    value: float | None
    """with its 95 % interval; the ends are null for one pair of runs"""
    low: float | None
    high: float | None
    at_least: float | None
    """the lower bound instead, where the first evaluation is as good already"""


class Candidate(Part):
    """A configuration, command or revision with all its runs."""

    name: str
    """knobs that differ from the baseline, or what the user called it"""
    configuration: Configuration
    """knobs in which it differs from the baseline or from A; {}: that one itself"""
    trial: str | None
    """the first run that has a value"""
    verdict: Verdict | None
    """what it is compared with the baseline or with A; null: a search that runs each once"""
    runs: int
    """all runs, and those that its configuration has made fail"""
    failures: int
    missed: int = 0
    """runs that missed the target: longer than any, and not among `values`"""
    value: float | None
    """mean and standard deviation of what is compared, and these values, run by run; of seconds of
    which some are missed the median, null: it is one of those"""
    sd: float | None
    values: list[float]
    effect: Effect | None
    speedup: SpeedUp | None
    """null: not determined"""
    value_when_chosen: float | None = None
    """of a finalist, in the search by the same protocol: the difference to `value` was luck"""
    others: dict[str, list[float]] = {}
    """values of further quantities by name; of a comparison by time those of the objective"""
    samples_per_s: float | None = None
    cost: float | None = None
    """of a sample: the baseline's samples per second over those of this candidate"""
    setup_s: float | None = None
    """median seconds before the first batch"""
    evaluations: float | None = None
    """median number of values of a run"""
    digest: str | None = None
    """SHA-256 of code and configuration of a side, frozen before the first run"""
    holdout: list[float] = []
    """what a second judge says of its runs: it decided nothing"""


class Failure(Part):
    """The run whose failure ended a comparison."""

    candidate: str
    seed: int
    status: Status
    reason: str


class Gate(Part):
    """What has to be shown of B's values for its seconds to count."""

    requirement: Requirement
    """the mean of B meets the target, or B is not worse than A by the margin"""
    shown: bool
    p: float | None
    """one-sided, of a single t-test"""


class Rule(Part):
    """How a comparison comes to its verdict, fixed before its first run."""

    level: float
    """probability of a wrong verdict if nothing differs; one_sided: all of it for «better»;
    fixed: one analysis, after all rounds"""
    one_sided: bool
    fixed: bool
    within: float | None
    """the difference that does not matter, as resolution is given"""
    better_in: Literal["value", "time"]
    target: str | None
    margin: float | None
    equal_sides: bool
    """whether A was compared with itself"""
    rounds: int
    """rounds that count, the most there could be, and runs at the same time"""
    max_rounds: int
    at_once: int


class NoiseOfRun(Part):
    """The noise of one run."""

    sd: float
    """standard deviation; relative: of the logarithm, so that 0.1 is about 10 %"""
    relative: bool
    runs: int
    """runs and configurations that it was estimated from; rough: whether these are few"""
    configurations: int
    rough: bool


class Search(Part):
    """What only a search has."""

    trials: int
    """all that have begun, and how many ended how"""
    statuses: dict[Status, int]
    cost_metric: str | None
    """the second objective"""
    seeds: int
    """runs of each configuration"""
    better_than_noise: bool | None
    """whether the best differs from the baseline by more than the noise; null: not known"""
    noise: NoiseOfRun | None
    within_noise_of_best: list[str]
    """trials that may be as good"""
    seconds_to_baseline: float | None
    """when one run of the best was as good as the baseline at its end"""
    not_begun: int
    """planned trials that a search which has ended left out"""
    pareto: list[dict[str, Any]]
    """the configurations on the front of two objectives, and the rows of study.csv"""
    study: list[dict[str, Any]]


class Ledger(Part):
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


class Sides(Part):
    """What only a comparison of two sides has."""

    one_run_each_tells: float | None
    """the difference that one run each would tell; null while rough"""
    first_seed: int | None
    """of the first round, the next ones follow; null: there are none; seeds_drawn: from the digests
    of both sides"""
    seeds_drawn: bool
    unseeded: bool
    """whether the command takes no seed: the runs of a pair have no more in common than their time"""
    without_effect: list[str]
    """sides with runs that are equal on different seeds"""
    results_per_process: list[int]
    """fewest and most, where the mean of several runs in a process is its value; []: it has one"""
    ahead: list[int]
    """pairs in which B was ahead, and all"""
    gates: list[Gate]
    target_p: float | None
    """one-sided, of a single t-test that the mean of B's values meets the target"""
    judge_digest: str | None
    """SHA-256 of the file that judged the runs; null: they judged themselves"""
    holdout_failure: str | None
    ledger: Ledger | None


class Test(Effect):
    """A test of finished runs, against the first set or against a number."""

    method: str
    """welch, paired_t, one_sample_t or z; by ranks, where a run missed or diverged: rank_sum, sign"""
    p: float
    shown: bool
    """whether p is below its level; ahead: whether the estimate is on the better side"""
    ahead: bool


class FinishedSet(Part):
    """What only a set of finished runs has."""

    tests: dict[str, Test]
    """difference and ratio of the values, and ratio of the seconds (time), to the first set's;
    no_worse: values are worse by less than --margin; meets_target: the mean meets --target"""
    counted: int
    """runs, or pairs, of which they are"""
    irregular: dict[str, list[str]]
    """names of runs without_value or unpaired, which do not count, of those that diverged or missed
    the target, which count as worse than any, and of short ones, which ended before most"""
    evaluations: list[int]
    """fewest and most of a run, and the steps of the shortest and the longest"""
    lengths: list[float]
    runs_needed: int | None
    """of a set, to show the margin in 80 %; null: nothing to show, or over 100,000"""
    p_if_repeated: float | None
    """how often equal sets reach its p-value if they are tested after each run"""
    rank: list[int]
    """of several sets, with 95 % of resamples"""
    ahead_of_next: float | None
    """in how many resamples"""


class Finished(Part):
    """What only finished runs have."""

    paired_by: str | None
    sd: float | None
    """of a run, as given"""
    sets: list[FinishedSet]


class Result(Part):
    """What an experiment has shown."""

    name: str
    kind: Kind
    objective: str
    """what is compared, as files name it, and as it is printed"""
    metric: str
    direction: Literal["min", "max"]
    target: str | None
    budget_s: float | None
    """of a run; null: its own end"""
    budget_unit: UnitName
    clock: str
    """which seconds counted: process, from a line, or training; only clocks of one kind compare"""
    start_up_share: float | None
    """of a command's seconds, before the clock began or else before the first value"""
    verdict: Verdict | None
    """of the best candidate, or of B; null: a search that runs each configuration once"""
    state: State | None
    """how far the test is"""
    best: str | None
    """name of the candidate that leads or wins; the baseline's where that stays"""
    candidates: list[Candidate]
    """the baseline or A first; of a search with one run each, besides it, the best and those that
    would be better and failed on some seed"""
    rule: Rule | None
    rough: bool
    """whether the noise comes from too few runs to be known to more than a factor of two"""
    failure: Failure | None
    runs: int
    """that ended, and those of them during which others used the machine; null: not measured"""
    disturbed: int | None
    fewest_steps: int | None = None
    """optimizer steps of the shortest training that succeeded; null: nobody counts them"""
    workers: list[str] = []
    """what trainings ran on, hardware and threads; more than one: their values compare loosely"""
    seconds: dict[str, float]
    """wall: of the commands that ran it, from the start of each to its result; of the workers by
    part, confirming runs included"""
    device_s: float | None
    price: float | None
    files: dict[str, str]
    """paths, and commands that go on from here"""
    search: Search | None = None
    sides: Sides | None = None
    finished: Finished | None = None
    confirmations: list[Result] = []
    """what runs on new seeds have shown, the one that counts first"""
    summary: list[str] = []
    """all of it in words"""

    @property
    def baseline(self) -> Candidate | None:
        """Return the candidate with which the others are compared."""
        is_first = self.candidates and not self.candidates[0].configuration
        return self.candidates[0] if self.sides is not None or is_first else None

    @property
    def leader(self) -> Candidate | None:
        """Return the best candidate, or B."""
        if self.sides is not None:
            return self.candidates[-1]
        return next((one for one in self.candidates if one.name == self.best), None)

    @property
    def counts(self) -> Result:
        """Return what the verdict rests on: the confirmation of a search, or this result."""
        return self.confirmations[0] if self.confirmations else self
