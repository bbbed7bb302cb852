"""What a comparison shows while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis.pairs import Pairs
from tunediff.api.compare_setup import Say
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.listeners import Listener
from tunediff.report.trial_warnings import TrialWarnings
from tunediff.report.words import effects


def look_fields(now: Pairs) -> dict[str, Any]:
    """Return what the pairs so far tell, for JSON lines."""
    return {
        "pairs": now.look.rounds, "verdict": now.verdict if now.over else None,
        **effects(now.look.differences[0], now.look.ratios),
    }  # fmt: skip


def _words(drawn: Mapping[str, Any]) -> str:
    """Return how messages name a run: its side and seed."""
    return f"{drawn['side']} seed {drawn['seed']}"


class RunLines(Listener):
    """Shows how runs end, also on Ray's pages, and warns of different hardware."""

    def __init__(
        self, folder: Path, say: Say, show: Callable[[int, str], object] = lambda slot, words: None
    ) -> None:
        """`show`: shows words for a slot, of which a comparison has one."""
        self._folder, self._say, self._show = folder, say, show
        runs = {_words(trial.drawn): trial for trial in record.read_trials(folder)}
        self._warnings = TrialWarnings(runs, say)

    def start(self, trial: str, content: Mapping[str, Any]) -> None:
        words = _words(content)
        self._say(f"{words} start", "start", **self._fields(trial, content))
        self._show(0, words)

    def end(self, trial: str, content: Mapping[str, Any]) -> None:
        run, words = record.read_trial(self._folder / "trials" / trial), _words(content)
        if run is not None:
            self._warnings.look_at(words, run)
            words = "  ".join([words, *filter(None, self._ended(run))])
            value = run.value(cfg.of(run.configuration).objective.name)
            fields = {"status": run.status, "reason": run.reason, "value": value}
            self._say(words, "end", **self._fields(trial, content), **fields)
        self._show(0, words)

    @staticmethod
    def _fields(trial: str, content: Mapping[str, Any]) -> dict[str, Any]:
        return {"trial": trial, "side": content["side"], "seed": content["seed"]}

    @staticmethod
    def _ended(run: record.TrialRecord) -> list[str]:
        """Return how a run ended, in parts of a line."""
        if not run.points or run.status != "ok":
            return [run.status or "", run.reason]
        workload, last = cfg.of(run.configuration), run.points[-1]
        metric = workload.objective
        value = text.number(last.get(metric.name))
        return [
            f"{last.get('label', metric.label)} {value} at {last.train_s:.1f} s",
            f"{text.number(last.samples / last.train_s)} {workload.unit}/s",
        ]
