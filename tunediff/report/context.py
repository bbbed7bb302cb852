"""Read a search once and hold everything that the sections of its report share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from pathlib import Path

from tunediff.analysis import Results, effects, journals
from tunediff.analysis.comparison import Comparison, Group
from tunediff.analysis.confirmation import (
    Confirmation,
    counting,
    folder_within,
    latest,
    longer_budgets,
)
from tunediff.analysis.effects import Effect
from tunediff.analysis.evidence import Evidence, of_confirming_runs
from tunediff.analysis.importance import Importance, importance, searched
from tunediff.analysis.journals import Session
from tunediff.analysis.speed import rate
from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core.text import pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report.html import Html, el
from tunediff.report.style import Highlights
from tunediff.tuning.sessions import confirming_folders


@dataclasses.dataclass(frozen=True)
class ReportContext:
    """The results of a search and the analyses that several sections of the report need."""

    results: Results
    unreadable: dict[str, str]
    """Reasons by trial name, for the journals that cannot be read and are left out."""
    sessions: list[Session]
    evidence: Evidence
    """The best trial, its speed-up and the noise, from the search and its confirming runs."""
    confirming: str
    """Sentence about confirming runs that are incomplete or unreadable; '' if there is nothing to
    say."""
    confirming_results: list[Results]
    """Results of every folder of confirming runs, those with longer budgets included; the totals
    count them."""
    longer: list[Comparison]
    """One comparison of the finalists for each longer budget."""
    effects: list[Effect]
    quality: Importance | None
    """Importance of the knobs for the objective; None if the objective is speed or there are too
    few trials."""
    throughput: Importance | None
    """Importance of the knobs for samples per second."""
    name: str
    storage: Path
    """Name of the search as the user typed it, and the folder of all searches."""
    now: float
    """Unix time at which the report is made."""

    @functools.cached_property
    def highlights(self) -> Highlights:
        """Return the two trials that figures and tables highlight: the best and the baseline."""
        return Highlights.of(self.evidence)

    @property
    def over(self) -> bool:
        """Whether the search has ended."""
        return journals.over(self.results, self.sessions)

    @property
    def label(self) -> str:
        return self.results.title

    @property
    def unit(self) -> str:
        return self.results.unit

    @property
    def budget_s(self) -> float:
        """Return the budget of one trial, in seconds of the budget's unit."""
        return self.results.space.budget.per_trial_s

    @property
    def leader(self) -> str:
        """Return `the winner` if several seeds show that it is better than the baseline, else `the
        best trial`."""
        return "the winner" if self.evidence.winner else "the best trial"

    def command(self, module: str, *words: object) -> str:
        """Return a command line for this search that can be pasted into a shell; `module`: name of
        the command."""
        return text.command(module, self.name, *words, storage=self.storage)

    @property
    def rival(self) -> TrialRecord | None:
        """Return the baseline if another trial is best, else None."""
        base, winner = self.highlights.baseline, self.highlights.winner
        return (
            base if base is not None and winner is not None and base.name != winner.name else None
        )

    def by_weight(self) -> list[str]:
        """Return the searched knobs, sorted by their share of the objective's variance, largest
        first."""
        ranking = self.quality or self.throughput
        shares = ranking.shares if ranking is not None else {}
        return sorted(
            (dimension.name for dimension in searched(self.results)),
            key=lambda name: -shares.get(name, 0.0),
        )

    def mark(self, trial: TrialRecord | None) -> str:
        """Return the CSS class of a trial's table row: `baseline`, `winner` or ''."""
        pairs = self.highlights.pairs()
        role = next(
            (role for marked_trial, _, role in pairs if trial and marked_trial.name == trial.name),
            "",
        )
        return role and ("baseline" if role == "baseline" else "winner")


def protocol(results: Results) -> str:
    """Return the workload's description of its evaluation protocol.

    '' if the workload has no `evaluation_protocol` or the objective is speed.
    """
    describe = None if results.by_rate else results.space.workload.get_hook("evaluation_protocol")
    return str(describe(results.space.baseline)) if describe is not None else ""


def marked(compared: Comparison, best: Group | None) -> list[str]:
    """Return the CSS class of every row of a table with one row per configuration."""
    return [
        "baseline" if not group.changed else "winner" if group is best else ""
        for group in compared.groups
    ]


def lead(*words: object) -> Html:
    """Return the first paragraph of a section."""
    return el("p", *words, class_="lead")


def note(*words: object) -> Html:
    """Return a paragraph in small type."""
    return el("p", *words, class_="note")


def read(
    folder: Path, name: str = "", storage: Path = text.STORAGE, now: float | None = None
) -> ReportContext:
    """Read a search and everything that its report needs.

    name: of the search as the user typed it; default: the folder's name. storage: folder of all
    searches. now: Unix time; default: the current time. Raises `ConfigError` if the folder holds no
    search.
    """
    results, unreadable = journals.read(folder)
    confirmation, confirming = _confirmed(results)
    evidence = Evidence(results, confirmation)
    if folder_within(folder):
        evidence = of_confirming_runs(results, journals.read(folder.parent)[0])
    return ReportContext(
        results=results,
        unreadable=unreadable,
        sessions=journals.sessions(folder),
        evidence=evidence,
        confirming=confirming,
        confirming_results=_confirming_results(folder),
        longer=_longer(confirmation),
        effects=effects.effects(results),
        quality=(
            None
            if results.by_rate
            else importance(results, functools.partial(_quality, results), results.ratios)
        ),
        throughput=importance(results, rate),
        name=name or folder.name,
        storage=storage,
        now=time.time() if now is None else now,
    )


def _quality(results: Results, trial: TrialRecord) -> float | None:
    """Return the value of a trial; None where its configuration fails on a seed."""
    return None if results.outcome_of(trial).failures else trial.value(results.metric)


def _confirming_results(folder: Path) -> list[Results]:
    """Return the results of all confirming runs of a search; folders that cannot be read are left
    out."""
    results = list[Results]()
    for place in confirming_folders(folder):
        with contextlib.suppress(ConfigError):  # it has been removed or damaged since
            results.append(journals.read(place)[0])
    return results


def _longer(confirmation: Confirmation | None) -> list[Comparison]:
    """Return the comparisons of the finalists with longer budgets; [] if there are none."""
    if confirmation is None:
        return []
    try:
        return longer_budgets(
            confirmation.compared.results, lambda folder: journals.read(folder)[0]
        )
    except ConfigError:  # the folder has been removed or changed since
        return []


def _confirmed(results: Results) -> tuple[Confirmation | None, str]:
    """Return the comparison of the newest confirming runs, and a sentence if they are incomplete or
    unreadable."""
    if results.space.confirm is None or (folder := latest(results)) is None:
        return None, ""
    try:
        runs, unreadable = journals.read(folder)
    except ConfigError as error:
        return None, f"The confirming runs cannot be read: {error}"
    confirmation = counting(results, runs, lambda place: journals.read(place)[0])
    # Say how far the runs are, unless the comparison is decided.
    ended = sum(trial.finished for trial in runs.trials)
    unfinished = (
        f"The confirming runs are not complete: {pluralize(ended, 'run has', 'runs have')} ended."
    )
    message = "" if confirmation is not None and confirmation.over else unfinished
    message += f" {len(unreadable)} of their journals cannot be read." if unreadable else ""
    return confirmation, message.strip()
