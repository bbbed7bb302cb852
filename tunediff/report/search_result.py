"""The result of a search: what `--json` prints and what Python returns.

Each class is one result. Its fields are the keys of the JSON, its docstrings the descriptions in
`tunediff/schemas/`, which `python -m tests.json_schemas` writes. A default is what a key holds
where it does not apply. A description also covers the undescribed keys below it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tunediff.core.outcomes import Status, Verdict

Configuration = dict[str, Any]
Mode = Literal["min", "max"]


class Result(BaseModel):
    """A result, or a part of one: every key is printed, and there are no others."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_serialization_defaults_required=True,
    )


class NoiseResult(Result):
    """The noise of one run."""

    sd: float
    """standard deviation"""
    relative: bool
    """whether it is that of the logarithm, so that 0.1 is about 10 %"""
    runs: int
    """runs and configurations that it was estimated from"""
    configurations: int
    rough: bool
    """whether these are few"""


class ConfigurationResult(Result):
    """A configuration with several seeds."""

    configuration: Configuration
    """knobs in which it differs from the baseline; {}: the baseline"""
    runs: int
    """all runs, and those that ended ok"""
    finished: int
    failures: int
    """runs that its configuration has made fail"""
    value: float | None
    """mean and standard deviation over the runs"""
    sd: float | None
    values: list[float]
    """these runs"""
    ratio: float | None
    """to the baseline with its 95 % interval, where values are compared by ratios"""
    ratio_low: float | None
    ratio_high: float | None
    difference: float | None
    """from the baseline with its 95 % interval, where values are compared by differences"""
    difference_low: float | None
    difference_high: float | None
    p: float | None
    """of the difference; `p_holm`: corrected over all rows by Holm's method"""
    p_holm: float | None
    verdict: Verdict
    speedup: float | None
    """as in the result"""
    speedup_low: float | None
    speedup_high: float | None
    speedup_at_least: float | None
    samples_per_s: float | None
    """mean over the runs"""
    cost: float | None
    """of a sample: the baseline's samples per second over those of this configuration"""
    other_metrics: dict[str, dict[str, float | None]]
    """value and sd of further metrics, by name"""


class ParetoResult(Result):
    """A configuration on the Pareto front of two objectives."""

    trial: str
    configuration: Configuration
    value: float | None
    failures: int
    cost: float | None
    versus_baseline: float | None


class ConfirmationResult(Result):
    """Confirming runs of other finalists."""

    name: str
    verdict: str
    winner: Configuration | None


class SearchResult(Result):
    """What a search has shown: `tunediff search --json`."""

    search: str
    """name of the search"""
    metric: str
    """the objective as it is printed, and its name in files"""
    objective: str
    direction: Mode
    """which values are better"""
    cost_metric: str | None
    """the second objective, such as peak_memory_mib"""
    target: str | None
    """what a trial is to reach in the least seconds, such as accuracy>=0.95"""
    seeds: int
    """runs of each configuration"""
    trials: int
    """all that have begun, and those that were skipped"""
    statuses: dict[Status, int]
    """how many trials ended so"""
    headline: str
    """what the search has shown, in a sentence: the first of its report"""

    best_trial: str | None
    """name of the best trial"""
    best_configuration: Configuration | None
    """knobs in which it differs from the baseline, by dotted name; {}: the baseline"""
    best_verdict: Verdict | None
    """null: without several seeds"""
    best_value: float | None
    """mean over its runs in the search"""
    best_values: list[float]
    """these runs"""
    best_failures: int
    """further runs, which its configuration has made fail: diverged, out of memory, past the
    deadline, or an error"""
    baseline_value: float | None
    """the same of the baseline"""
    baseline_values: list[float]
    baseline_failures: int

    speedup: float | None
    """how many times sooner the best is as good as the baseline, with its 95 % interval; the ends
    are null for one pair of runs"""
    speedup_low: float | None
    speedup_high: float | None
    speedup_at_least: float | None
    """the lower bound instead, where the first evaluation is as good already; the three above are
    null then"""
    speedup_means: str | None
    """begins with mean with 95 % interval, one pair of runs, or lower bound"""
    speedup_unknown: str | None
    """why it is not determined; the speed-up is null then"""
    seconds_to_baseline: float | None
    """of one pair of runs: when the best was as good as the baseline at its end"""

    noise: NoiseResult | None
    """of one run"""
    within_noise_of_best: list[str]
    """names of the trials that may be as good"""
    better_than_noise: bool | None
    """whether the best differs from the baseline by more than the noise"""
    nothing_to_confirm: str | None
    """why there was no configuration to run again; null where one was, and where confirming was
    switched off"""
    not_begun: str | None
    """how many of the planned trials a search that has ended left out, and why; null where there
    are none, and where it was interrupted"""
    disturbed_trials: int | None
    """trials during which others used the machine"""
    unmoved_trials: int
    """all trials, where the objective moved in none of them by more than the noise; else 0"""

    confirmed: bool | None = None
    """whether new seeds show a finalist to be better; null: nothing was confirmed"""
    winner: Configuration | None = None
    """its configuration, where confirmed"""
    finalist: Configuration | None = None
    """where nothing is confirmed: the best finalist in the search that finished a confirming run"""
    confirmed_metric: str | None = None
    """what decided on new seeds: a final evaluation has a name of its own"""
    confirmed_value: float | None = None
    """of the winner or finalist on new seeds: mean, standard deviation, and the runs"""
    confirmed_sd: float | None = None
    confirmed_values: list[float] = []
    confirmed_failures: int = 0
    """further runs on new seeds that failed"""
    confirmed_baseline_value: float | None = None
    """the same of the baseline"""
    confirmed_baseline_sd: float | None = None
    confirmed_baseline_values: list[float] = []
    confirmed_baseline_failures: int = 0
    confirmed_ratio: float | None = None
    """to the baseline with its 95 % interval, where values are compared by ratios"""
    confirmed_ratio_low: float | None = None
    confirmed_ratio_high: float | None = None
    confirmed_difference: float | None = None
    """from the baseline with its 95 % interval, where values are compared by differences"""
    confirmed_difference_low: float | None = None
    confirmed_difference_high: float | None = None
    value_when_chosen: float | None = None
    """by the same protocol, before and after the choice: the difference was luck"""
    value_on_new_seeds: float | None = None
    other_confirmations: list[ConfirmationResult] = []
    """what the search has confirmed with other finalists: folder, verdict, winner"""
    confirmed_configurations: list[ConfigurationResult] = []
    """the baseline and each finalist"""
    confirm_runs_at_once: int = 1
    """confirming runs at the same time"""

    configurations: list[ConfigurationResult]
    """with several seeds, each configuration"""
    conclusions: list[str]
    """with several seeds: the result in sentences"""
    study_rows: list[dict[str, Any]]
    """of a study: the rows of study.csv"""
    pareto_rows: list[ParetoResult]
    """with two objectives; values are means over the runs of a configuration, as best_value"""

    wall_s: float
    """from the start of the process to the result, summed over the commands that ran the search"""
    training_s: float
    """what the trainings used, confirming runs included; null: not measured"""
    device_s: float | None = None
    price: float | None = None
    data_wait_s: float
    """where the other seconds went, those of confirming runs included"""
    compile_s: float
    evaluation_s: float
    checkpoint_s: float
    setup_s: float
    overhead_s: float
    clock: str
    """which seconds counted: process, from a line, or training; only clocks of one kind compare"""
    start_up_share: float | None
    """of the processes' seconds, before the clock began or else before the first value; null: not
    of commands"""
    confirm_wall_s: float
    """the confirming runs alone"""
    confirm_training_s: float

    results: str
    """folder of the search, and in it trials.csv and curves.png"""
    table: str
    curves: str
    comparison: str | None = None
    """further files, where the search has them"""
    pareto: str | None = None
    study_table: str | None = None
    study_figure: str | None = None
    study: str
    """Optuna's study"""
    samples: str | None = None
    """images of the best trial"""
    confirmation: str | None = None
    """table of the confirming runs"""
    export: str | None = None
    """the command that exports the best"""
    report: str
    """the page report.html, or the command that writes it"""


FILES = tuple(list(SearchResult.model_fields)[list(SearchResult.model_fields).index("results") :])
"""Keys of files and commands; they say nothing about the search itself."""


class SearchVerdict(SearchResult):
    """What a search has shown: the keys of `Search.json()`, and sentences."""

    sentences: list[str]
    """the verdict of the confirming runs in words; empty without them"""
