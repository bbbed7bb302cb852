"""Read a search once and hold what the sections of its page share."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path

from tunediff import analysis
from tunediff.analysis import Results, confirming_runs, journals
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.evidence import Evidence, of_confirming_runs
from tunediff.analysis.importance import Importance, importance, searched
from tunediff.analysis.journals import SearchSession
from tunediff.analysis.outcome import Candidate
from tunediff.analysis.speed import rate
from tunediff.core import files, text
from tunediff.core.colors import BASELINE, WINNER
from tunediff.core.trial_record import TrialRecord
from tunediff.report import reading
from tunediff.report.result import Result


@dataclasses.dataclass(frozen=True)
class Highlights:
    """The trials that have a colour in figures and tables: the baseline and the best."""

    baseline: TrialRecord | None
    winner: TrialRecord | None
    """The best trial; it may be the baseline."""
    winner_is: str
    """`winner` if several seeds show that it is better than the baseline, else `best`."""
    reached_s: float | None = None
    """Seconds after which the best is as good as the baseline at its end; None if undetermined."""

    @classmethod
    def of(cls, evidence: Evidence) -> Highlights:
        """Return the best trial and the baseline run with the same seed."""
        best, base = evidence.best, evidence.baseline_of_best
        role = "winner" if evidence.winner else "best"
        return cls(
            base, best, role, evidence.seconds_to_baseline(best) if best is not None else None
        )

    @property
    def rival(self) -> TrialRecord | None:
        """Return the best trial if it is not the baseline."""
        base, winner = self.baseline, self.winner
        is_base = base is not None and winner is not None and base.name == winner.name
        return None if is_base else winner

    def pairs(self) -> list[tuple[TrialRecord, str, str]]:
        """Return (trial, colour, role `baseline`, `best` or `winner`), the baseline first."""
        pairs = [(self.baseline, BASELINE, "baseline"), (self.rival, WINNER, self.winner_is)]
        return [(trial, color, role) for trial, color, role in pairs if trial is not None]

    def shown(self) -> list[tuple[TrialRecord, str, str]]:
        """Return `pairs` for figures: a baseline that is best is labelled with both roles."""
        is_both = f", {self.winner_is}" if self.winner is not None and self.rival is None else ""
        return [(trial, color, role + is_both) for trial, color, role in self.pairs()]

    def color(self, name: str) -> str | None:
        """Return the colour of a trial; None if it is neither of the two."""
        return next((color for trial, color, _ in self.pairs() if trial.name == name), None)

    def mark(self, trial: TrialRecord) -> str:
        """Return the CSS class of a trial's table row: `baseline`, `winner` or ''."""
        return {BASELINE: "baseline", WINNER: "winner", None: ""}[self.color(trial.name)]


@dataclasses.dataclass(frozen=True)
class ReportContext:
    """The results of a search and the analyses that several sections of the page need."""

    results: Results
    sessions: list[SearchSession]
    evidence: Evidence
    """The best trial, its speed-up and the noise, from the search and its confirming runs."""
    confirming: str
    """Sentence about confirming runs that are incomplete, or ''."""
    quality: Importance | None
    """Importance of the knobs for the objective; None: it is speed, or trials are too few."""
    throughput: Importance | None
    """Importance of the knobs for samples per second."""
    name: str
    storage: Path
    """Name of the search as the user typed it, and the folder of all searches."""
    now: float
    """Unix time at which the report is made."""

    @functools.cached_property
    def highlights(self) -> Highlights:
        return Highlights.of(self.evidence)

    @functools.cached_property
    def result(self) -> Result:
        return reading.of_search(self.evidence)

    @property
    def tested(self) -> Comparison | None:
        """Return the comparison over several seeds that the verdict rests on; None without one."""
        return self.evidence.confirmation or self.evidence.compared

    @property
    def leader(self) -> Candidate | None:
        """Return the candidate that is drawn as the winner."""
        return self.tested.winner if self.tested is not None else None

    @property
    def best_words(self) -> str:
        """Return `the winner` if several seeds show that it is better, else `the best trial`."""
        return "the winner" if self.evidence.winner else "the best trial"

    def command(self, module: str, *words: object) -> str:
        """Return a command line for this search, quoted for a shell; `module`: the command."""
        return text.command(module, self.name, *words, storage=self.storage)

    def by_weight(self) -> list[str]:
        """Return the searched knobs by their share of the objective's variance, largest first."""
        ranking = self.quality or self.throughput
        shares = ranking.shares if ranking is not None else {}
        names = [dimension.name for dimension in searched(self.results)]
        return sorted(names, key=lambda name: -shares.get(name, 0.0))


def protocol(results: Results) -> str:
    """Return the workload's description of its evaluation; '' if it has none, or for speed."""
    describe = None if results.by_rate else results.space.workload.get_hook("evaluation_protocol")
    return str(describe(results.space.baseline)) if describe is not None else ""


def read(
    folder: Path, name: str = "", storage: Path = files.STORAGE, now: float | None = None
) -> ReportContext:
    """Read a search and everything that its page needs.

    name: of the search as typed; default: the folder's. storage: folder of all searches. now: Unix
    time; default: the current time. Raises `ConfigError` if the folder holds no search.
    """
    results = analysis.read(folder)
    confirmation = confirming_runs.read(results)
    begun = results.space.confirm is not None and confirming_runs.latest(results) is not None
    is_open = begun and (confirmation is None or not confirmation.ended)
    evidence = Evidence(results, confirmation)
    if confirming_runs.folder_within(folder):
        evidence = of_confirming_runs(results, analysis.read(folder.parent))

    def quality(trial: TrialRecord) -> float | None:
        """A configuration that fails on a seed has no value, whatever its other runs reached."""
        return None if results.outcome_of(trial).failures else trial.value(results.metric)

    return ReportContext(
        results=results,
        sessions=journals.sessions(folder),
        evidence=evidence,
        confirming="The confirming runs are not complete." if is_open else "",
        quality=None if results.by_rate else importance(results, quality, results.ratios),
        throughput=importance(results, rate),
        name=name or folder.name,
        storage=storage,
        now=time.time() if now is None else now,
    )
