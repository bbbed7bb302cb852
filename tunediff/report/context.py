"""What a report is about: a search read and looked at once."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path

from tunediff.analysis import Results, confirmation, effects, failed, journals
from tunediff.analysis.comparison import Comparison, Group
from tunediff.analysis.confirmation import Confirmation
from tunediff.analysis.effects import Effect
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.importance import Importance, importance, searched
from tunediff.analysis.journals import Session
from tunediff.analysis.noise import Noise
from tunediff.analysis.speed import rate
from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core.text import pluralize
from tunediff.core.trial_record import TrialRecord
from tunediff.report.html import Html, el
from tunediff.report.style import Highlights


@dataclasses.dataclass(frozen=True)
class ReportContext:
    """A search with everything that several sections need."""

    found: Results
    unreadable: dict[str, str]
    """Journals that are left out, with the reason."""
    sessions: list[Session]
    known: Evidence
    """What it has shown."""
    confirming: str
    """About confirming runs that are not complete; '' otherwise."""
    longer: list[Comparison]
    """Its finalists with longer budgets."""
    effects: list[Effect]
    quality: Importance | None
    """Of the objective, if that is not speed."""
    throughput: Importance | None
    """Of samples per second."""
    name: str
    storage: Path
    """How a user names the search, and the folder of all searches."""
    now: float
    """Unix time."""

    @functools.cached_property
    def stars(self) -> Highlights:
        """The best trial beside the baseline."""
        return Highlights.of(self.known)

    @property
    def over(self) -> bool:
        """Whether the search has ended: all of its trials have, and so has its last session, if sessions are noted."""
        ended = self.sessions[-1].end is not None if self.sessions else False
        enough = len(self.found.trials) >= self.found.space.budget.trials
        return (ended or enough) and all(trial.finished for trial in self.found.trials)

    @property
    def unfinished(self) -> str:
        """How trials without a result ended, in a sentence: `4 trials were stopped early, 1 failed.`; '': none."""
        trials = self.found.trials
        early, bad = sum(trial.status == "pruned" for trial in trials), sum(map(failed, trials))
        words = [f"{pluralize(early, 'trial was', 'trials were')} stopped early"] * bool(early)
        words += [f"{bad:,} failed" if words else f"{pluralize(bad, 'trial')} failed"] * bool(bad)
        return f"{', '.join(words)}." if words else ""

    @property
    def told(self) -> Confirmation | None:
        """What its confirming runs say, if any of them ended."""
        return self.known.told

    @property
    def compared(self) -> Comparison | None:
        """Of a search with several seeds."""
        return self.known.compared

    @property
    def noise(self) -> Noise | None:
        """Of one run; None: not known, or every configuration has several."""
        return self.known.noise

    @property
    def label(self) -> str:
        """What the objective is called."""
        return self.found.quantity(self.found.label).label

    @property
    def unit(self) -> str:
        """What the samples are called."""
        return self.found.unit

    @property
    def budget_s(self) -> float:
        """Of a trial, in seconds of its unit."""
        return self.found.space.budget.per_trial_s

    @property
    def leader(self) -> str:
        """`the winner`, or what it may be called."""
        return "the winner" if self.known.winner else "the best trial"

    def command(self, module: str, *words: object) -> str:
        """Another command about this search, as one pastes it."""
        return text.command(module, self.name, *words, storage=self.storage)

    @property
    def rival(self) -> TrialRecord | None:
        """The baseline, if another trial is best."""
        base, winner = self.stars.baseline, self.stars.winner
        return base if base is not None and winner is not None and base.name != winner.name else None

    @property
    def crossing_s(self) -> float | None:
        """Seconds, in the unit of the budget, after which the winner is as good as the baseline at its end; None: not
        determined."""
        return self.stars.reached_s

    @property
    def crosses_before_first(self) -> bool:
        """Whether the winner is that good at its first evaluation already: when it was so first is not known."""
        return self.crossing_s is not None and self.stars.winner is not None and self.found.at_first(self.stars.winner)

    def by_weight(self) -> list[str]:
        """The searched knobs, those with the largest share of the objective's variance first."""
        one = self.quality or self.throughput
        shares = one.shares if one is not None else {}
        return sorted((dimension.name for dimension in searched(self.found)), key=lambda name: -shares.get(name, 0.0))

    def mark(self, trial: TrialRecord | None) -> str:
        """The class of a trial's row in a table."""
        color = next((what for known, _, what in self.stars.pairs() if trial and known.name == trial.name), "")
        return color and ("baseline" if color == "baseline" else "winner")


def ruler(found: Results) -> str:
    """How the objective is measured, in the words of the workload; '' where it has none, and for speed."""
    said = None if found.by_rate else found.space.workload.get_hook("evaluation_protocol")
    return str(said(found.space.baseline)) if said is not None else ""


def marked(compared: Comparison, best: Group | None) -> list[str]:
    """The classes of the rows of a table with a row for each configuration."""
    return ["baseline" if not group.changed else "winner" if group is best else "" for group in compared.groups]


def lead(*words: object) -> Html:
    """What a section says first."""
    return el("p", *words, class_="lead")


def note(*words: object) -> Html:
    """What it adds in small letters."""
    return el("p", *words, class_="note")


def read(folder: Path, name: str = "", storage: Path = text.STORAGE, now: float | None = None) -> ReportContext:
    """Everything a report needs. Raises `ConfigError` when the folder holds no search."""
    found, unreadable = journals.read(folder)
    told, confirming = _confirmed(found)
    return ReportContext(
        found=found,
        unreadable=unreadable,
        sessions=journals.sessions(folder),
        known=Evidence(found, told),
        confirming=confirming,
        longer=_longer(told),
        effects=effects.effects(found),
        quality=None if found.by_rate else importance(found, lambda trial: trial.value(found.metric), found.ratios),
        throughput=importance(found, rate),
        name=name or folder.name,
        storage=storage,
        now=time.time() if now is None else now,
    )


def _longer(told: Confirmation | None) -> list[Comparison]:
    if told is None:
        return []
    try:
        return confirmation.longer_budgets(told.compared.found, lambda place: journals.read(place)[0])
    except ConfigError:  # a folder that is no search any more
        return []


def _confirmed(found: Results) -> tuple[Confirmation | None, str]:
    """What the newest confirming runs say, and what there is to know about them."""
    if found.space.confirm is None or (folder := confirmation.latest(found)) is None:
        return None, ""
    try:
        runs, unreadable = journals.read(folder)
    except ConfigError as error:
        return None, f"The confirming runs cannot be read: {error}"
    told = confirmation.confirm(found, runs) if runs.ranked else None
    ended = sum(trial.finished for trial in runs.trials)
    unfinished = f"The confirming runs are not complete: {pluralize(ended, 'run has', 'runs have')} ended."
    said = "" if told is not None and told.over else unfinished
    said += f" {len(unreadable)} of their journals cannot be read." if unreadable else ""
    return told, said.strip()
