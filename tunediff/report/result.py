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
    """value: the estimate; low, high: its interval, which holds for all candidates and interim
    analyses together; null: not known, as after one run"""
    low: float | None = None
    high: float | None = None
    resolution: float | None = None
    """the smallest effect that would be significant: a ratio − 1, or in units of the objective"""
    p: float | None = None
    """p: p-value of this candidate alone; p_holm: corrected over all candidates by Holm's method"""
    p_holm: float | None = None


class SpeedUp(Part):
    """How many times sooner a candidate is as good as the baseline at its end."""

    value: float | None
    """value: the estimate; low, high: its 95 % interval, null for one pair of runs"""
    low: float | None
    high: float | None
    at_least: float | None
    """a lower bound, given instead if the first evaluation is already as good"""


class Candidate(Part):
    """A configuration, command or revision with all its runs."""

    name: str
    """knobs that differ from the baseline, or the user's name for it"""
    configuration: Configuration
    """knobs that differ from the baseline or from A; {}: it is the baseline or A"""
    trial: str | None
    """the first run that has a value"""
    verdict: Verdict | None
    """how it compares with the baseline or A; null: a search that runs each configuration once"""
    runs: int
    """runs: all runs; failures: those that its configuration has made fail"""
    failures: int
    missed: int = 0
    """runs that missed the target; they count as longer than any, and are not among `values`"""
    value: float | None
    """values: objective or seconds of each run; value, sd: their mean and standard deviation. If
    runs missed the target, value is the median, null if that is a missed one"""
    sd: float | None
    values: list[float]
    effect: Effect | None
    speedup: SpeedUp | None
    """effect, speedup: compared with the baseline or with A; null: not determined"""
    value_when_chosen: float | None = None
    """value of a finalist in the search, by the same protocol; its lead over `value` was luck"""
    others: dict[str, list[float]] = {}
    """values of further quantities by name; in a comparison by time, those of the objective"""
    samples_per_s: float | None = None
    cost: float | None = None
    """samples_per_s: training speed; cost: the baseline's samples per second over this one's"""
    setup_s: float | None = None
    """median seconds before the first batch"""
    evaluations: float | None = None
    """median number of values of a run"""
    digest: str | None = None
    """SHA-256 of code and configuration of a side, frozen before the first run"""
    holdout: list[float] = []
    """values of its runs by the second judge, which decides nothing"""


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
    """level: probability of a wrong verdict if nothing differs; one_sided: all of it for «better»;
    fixed: one analysis, after all rounds"""
    one_sided: bool
    fixed: bool
    within: float | None
    """within: a difference that does not matter, in the unit of `resolution`"""
    better_in: Literal["value", "time"]
    target: str | None
    margin: float | None
    equal_sides: bool
    """whether A was compared with itself"""
    rounds: int
    """rounds: pairs or seeds that count; max_rounds: the most there could be; at_once: runs at the
    same time"""
    max_rounds: int
    at_once: int


class NoiseOfRun(Part):
    """The noise of one run."""

    sd: float
    """sd: standard deviation; relative: whether of the logarithm, so that 0.1 is about 10 %"""
    relative: bool
    runs: int
    """runs, configurations: those that it was estimated from; rough: whether these are few"""
    configurations: int
    rough: bool


class Search(Part):
    """What only a search has."""

    trials: int
    """trials: all that have begun; statuses: how many ended with each status"""
    statuses: dict[Status, int]
    cost_metric: str | None
    """the second objective"""
    seeds: int
    """seeds: runs of each configuration"""
    better_than_noise: bool | None
    """whether the best differs from the baseline by more than the noise; null: not known"""
    noise: NoiseOfRun | None
    within_noise_of_best: list[str]
    """within_noise_of_best: trials that may be as good as the best"""
    seconds_to_baseline: float | None
    """seconds after which one run of the best had reached the baseline's last value"""
    not_begun: int
    """planned trials that were not begun when the search ended"""
    pareto: list[dict[str, Any]]
    """pareto: configurations on the front of two objectives; study: the rows of study.csv"""
    study: list[dict[str, Any]]


class Ledger(Part):
    """The place of a comparison in the ledger of its repository."""

    number: int
    """from 1"""
    budget: float
    """budget: expected share of kept changes without effect, at most; rule: how it is divided"""
    rule: str
    level: float
    """level: what this comparison spent, the probability of a wrong «better»"""
    kept: int
    """kept: changes that were better; kept_since_confirmed: those since the last recheck"""
    kept_since_confirmed: int
    confirmed: str | None
    """the commit that was confirmed last, or the first one"""
    recheck_due: bool
    """whether the head is to be compared with it again: --ledger --confirm"""


class Sides(Part):
    """What only a comparison of two sides has."""

    one_run_each_tells: float | None
    """smallest significant difference with one run each; null while the noise is roughly known"""
    first_seed: int | None
    """first_seed: of the first round, the next ones follow; null: no seeds; seeds_drawn: whether it
    follows from the digests of both sides"""
    seeds_drawn: bool
    unseeded: bool
    """whether the command takes no seed, so that the runs of a pair share only their time"""
    without_effect: list[str]
    """sides whose runs are equal on different seeds"""
    results_per_process: list[int]
    """fewest and most results of a process whose value is a mean of runs; []: one result"""
    ahead: list[int]
    """two numbers: pairs in which B was ahead, and all pairs"""
    gates: list[Gate]
    target_p: float | None
    """one-sided, of a single t-test that the mean of B's values meets the target"""
    judge_digest: str | None
    """judge_digest: SHA-256 of the file that judged the runs; null: they judged themselves"""
    holdout_failure: str | None
    ledger: Ledger | None


class Test(Effect):
    """A test of finished runs, against the first set or against a number."""

    method: str
    """welch, paired_t, one_sample_t or z; by ranks, where a run missed or diverged: rank_sum, sign"""
    p: float
    shown: bool
    """shown: whether p is below its level; ahead: whether the estimate is on the better side"""
    ahead: bool


class FinishedSet(Part):
    """What only a set of finished runs has."""

    tests: dict[str, Test]
    """difference and ratio of the values, and ratio of the seconds (time), to the first set's;
    no_worse: values are worse by less than --margin; meets_target: the mean meets --target"""
    counted: int
    """runs or pairs that the tests use"""
    irregular: dict[str, list[str]]
    """names of runs without_value or unpaired, which do not count, of those that diverged or missed
    the target, which count as worse than any, and of short ones, which ended before most"""
    evaluations: list[int]
    """evaluations: fewest and most of a run; lengths: steps of the shortest and the longest run"""
    lengths: list[float]
    runs_needed: int | None
    """runs of a set that show the margin in 80 % of cases; null: no margin, or over 100,000"""
    p_if_repeated: float | None
    """how often equal sets reach this p-value if they are tested after each run"""
    rank: list[int]
    """rank of the set among several, with its 95 % interval by resampling"""
    ahead_of_next: float | None
    """share of the resamples in which it is ahead of the next set"""


class Finished(Part):
    """What only finished runs have."""

    paired_by: str | None
    sd: float | None
    """paired_by: pattern that pairs runs; sd: standard deviation of a run, as given"""
    sets: list[FinishedSet]


class Result(Part):
    """What an experiment has shown."""

    name: str
    kind: Kind
    objective: str
    """what is compared: objective is its name in files, metric its printed name, direction whether
    less or more is better, target the value to reach"""
    metric: str
    direction: Literal["min", "max"]
    target: str | None
    budget_s: float | None
    """budget_s: seconds of a run, null: it ends by itself; budget_unit: of which seconds"""
    budget_unit: UnitName
    clock: str
    """which seconds counted: process, from a line, or training; only clocks of one kind compare"""
    start_up_share: float | None
    """share of a command's seconds before its clock began, or else before its first value"""
    verdict: Verdict | None
    """verdict on the best candidate, or on B; null: a search that runs each configuration once"""
    state: State | None
    """how far the test is, and why it ended"""
    best: str | None
    """name of the candidate that leads or wins; the baseline's name if none is better"""
    candidates: list[Candidate]
    """candidates: the baseline or A first; a search with one run each has the best one besides, and
    those that would be better and failed on some seed; rule: how the verdict is reached"""
    rule: Rule | None
    rough: bool
    """rough: whether the noise is known to a factor of two at best; failure: what ended it"""
    failure: Failure | None
    runs: int
    """runs: those that ended; disturbed: those during which others used the machine, null: not
    measured"""
    disturbed: int | None
    fewest_steps: int | None = None
    """optimizer steps of the shortest training that succeeded; null: not counted"""
    workers: list[str] = []
    """hardware and threads of the trainings; with more than one, small differences mean nothing"""
    seconds: dict[str, float]
    """seconds: wall of its commands, and seconds of the workers by part, confirming runs included;
    device_s: training seconds × devices; price: what these cost"""
    device_s: float | None
    price: float | None
    files: dict[str, str]
    """files: paths, and commands that go on from here; search, sides, finished: what only one kind
    of result has, else null"""
    search: Search | None = None
    sides: Sides | None = None
    finished: Finished | None = None
    confirmations: list[Result] = []
    """results of runs on new seeds, the one that counts first"""
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
