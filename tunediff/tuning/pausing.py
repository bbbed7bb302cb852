"""The paused trials of a search: which of them goes on, and how much disk their checkpoints may take. Imports no Ray.

A trial is paused by a line in its journal, so that a search that was killed finds it paused again. Its checkpoint was
written before its point was reported. It gives up its slot, and is proposed again under its name, as a trial whose
node was lost is: any slot may continue it, in this session or a later one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunediff.analysis.following import Following
from tunediff.config import Values
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.trial_record import CHECKPOINT, End, TrialRecord
from tunediff.search_space import SearchSpace
from tunediff.tuning import curve_model
from tunediff.tuning.allocation import Decision, Promotion, loss, runs_through
from tunediff.tuning.trial_spec import TrialSpec


class Pausing:
    """Asks a rule which trials pause and continue, and keeps those that are paused."""

    def __init__(self, space: SearchSpace, experiment: Path, priors: Sequence[TrialRecord] = ()) -> None:
        """`experiment`: the folder of the search; `priors`: `warm_start.reused_trials`, which the model reads too."""
        self._space, self._experiment, self._rule = space, experiment, Promotion(space)
        self._following, self._priors = Following(experiment), priors
        self._specs: dict[str, TrialSpec] = {}

    @property
    def specs(self) -> list[TrialSpec]:
        """Return the trials that are paused."""
        return list(self._specs.values())

    def add(self, spec: TrialSpec) -> None:
        """Keep a trial whose journal says that it is paused."""
        self._specs[spec.name] = spec

    def take(self, name: str) -> TrialSpec:
        """Return a paused trial that is not kept any more: it goes on, or ends."""
        return self._specs.pop(name)

    def after_point(self, name: str, index: int) -> Decision:
        """Return what a trial does after point `index`; a pause is on disk then. Raises `OSError` if the disk is full.

        The points before a pause are reported again when a trial continues, and were decided before.
        """
        records = {trial.name: trial for trial in self._records()}
        trial = records[name]
        is_new = not trial.finished and bool(trial.points) and trial.points[-1].index == index > trial.paused_at
        last = index >= self._space.baseline.evaluation.points
        if not is_new or last or runs_through(self._space, trial.drawn):
            return Decision.GO_ON
        decision = self._rule.after_point(trial, list(records.values()))
        if decision is Decision.PAUSE:
            Journal(self._experiment / "trials" / name).write("paused", index=index)
        return decision

    def next_trial(self, may_draw: bool) -> str | None:
        """Return the name of the paused trial that continues on a free slot; None: none does; see `Promotion`."""
        return self._rule.next_trial(self._records(), may_draw)

    def propose(self, number: int) -> Values | None:
        """Return the knobs of a new configuration by the curves of all trials, see `curve_model.propose`."""
        return curve_model.propose(self._space, [*self._priors, *self._records()], number)

    def left(self, name: str) -> float:
        """Return the share of its budget that a paused trial has not spent, from 0 to 1."""
        trial = record.read_trial(self._specs[name].folder)
        return 1 - trial.points[-1].index / self._space.baseline.evaluation.points if trial is not None else 1.0

    def beyond_disk_limit(self) -> Iterator[tuple[str, str]]:
        """Yield paused trials whose checkpoints are too many, the worst first, each with the reason to end it."""
        sizes = {spec.name: _checkpoint_bytes(spec.folder) for spec in self.specs}
        worst_first = sorted(
            (trial for trial in self._records() if trial.name in sizes),
            key=lambda trial: loss(self._space, trial), reverse=True,
        )  # fmt: skip
        limit_gib = self._space.paused_gib
        for trial in worst_first:
            if sum(sizes.values()) <= limit_gib * 2**30:
                return
            del sizes[trial.name]
            yield trial.name, f"{_paused(trial)}; checkpoints of paused trials took over paused_gib = {limit_gib:g}"

    def reason_never_continued(self, name: str) -> str:
        """Return why a paused trial ends at the end of the search."""
        trial = record.read_trial(self._specs[name].folder)
        return f"{_paused(trial)} and not continued: others were better" if trial is not None else ""

    def _records(self) -> list[TrialRecord]:
        """Return all trials; paused are only those that have not been taken."""
        self._following.read()
        taken = (trial.paused and trial.name not in self._specs for trial in self._following.trials)
        return [
            dataclasses.replace(trial, paused=False) if gone else trial
            for trial, gone in zip(self._following.trials, taken, strict=True)
        ]


def end_paused(spec: TrialSpec, reason: str) -> None:
    """End a paused trial as `pruned`; its checkpoint goes. Raises `OSError` if the disk is full."""
    journal = Journal(spec.folder)
    trial = record.read_trial(spec.folder)
    last = trial.points[-1] if trial is not None and trial.points else None
    journal.end_trial(End("pruned", reason, dict(last.seconds) if last else {}, last.steps if last else 0))


def _paused(trial: TrialRecord) -> str:
    return f"paused after {trial.points[-1].train_s:.1f} s" if trial.points else "paused"


def _checkpoint_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return (folder / CHECKPOINT).stat().st_size
    return 0
