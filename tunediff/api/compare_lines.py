"""What a comparison shows while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.api.compare_setup import Say
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.listeners import Listener
from tunediff.core.outcomes import Status


def _words(drawn: Mapping[str, Any]) -> str:
    """Return how messages name a run: its side and seed."""
    return f"{drawn['side']} seed {drawn['seed']}"


class RunLines(Listener):
    """Shows how runs end, also on Ray's pages."""

    def __init__(
        self, folder: Path, say: Say, show: Callable[[int, str], object] = lambda slot, words: None
    ) -> None:
        """`show`: shows words for a slot, of which a comparison has one."""
        self._folder, self._say, self._show = folder, say, show

    def start(self, trial: str, content: Mapping[str, Any]) -> None:
        self._show(0, _words(content))

    def end(self, trial: str, content: Mapping[str, Any]) -> None:
        run, words = record.read_trial(self._folder / "trials" / trial), _words(content)
        if run is not None:
            words = "  ".join([words, *filter(None, self._ended(run))])
            self._say(words)
        self._show(0, words)

    @staticmethod
    def _ended(run: record.TrialRecord) -> list[str]:
        """Return how a run ended, in parts of a line."""
        if not run.points or run.status != Status.OK:
            return [run.status or "", run.reason]
        workload, last = cfg.of(cfg.configuration_of(run)), run.points[-1]
        metric = workload.objective
        value = text.number(last.get(metric.name))
        words = [f"{last.get('label', metric.label)} {value} at {last.train_s:.1f} s"]
        if last.train_s:  # a command may print its own seconds behind its value
            words.append(f"{text.number(last.samples / last.train_s)} {workload.unit}/s")
        return words
