"""Print the progress of a search, one line per event."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunediff.analysis import Results, confirmation, disturbed
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.following import MANY, Following, Throttle
from tunediff.analysis.outcome import failed
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.listeners import Listener
from tunediff.core.progress import EventLines
from tunediff.core.trial_record import TrialRecord
from tunediff.report import plan
from tunediff.report.heartbeat import Heartbeat
from tunediff.report.mixed_hardware import MixedHardware
from tunediff.report.remaining import RemainingTime
from tunediff.report.verdicts import OTHERS
from tunediff.report.words import beside, noted
from tunediff.search_space import SearchSpace
from tunediff.tuning import warm_start


class Console(Listener):
    """Print one line per event."""

    def __init__(
        self, folder: Path, space: SearchSpace, lines: EventLines | None = None,
        planned: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Read the trials that the folder already has.

        lines: formats and prints events. planned: the plan of the search, as `plan.values` returns
        it; the first estimate of the remaining time.
        """
        self.folder, self.space = folder, space
        begun = time.monotonic()
        self._lines = lines or EventLines(begun=begun)
        self.quiet = self._lines.quiet
        self._heartbeat = Heartbeat(folder, self.say, self._called)
        self.confirming = confirmation.folder_within(folder)
        self._following, self._results_throttle = Following(folder), Throttle()
        self._remaining = RemainingTime(
            folder, space, planned, begun, may_end_earlier=bool(self.confirming)
        )
        self._read()
        self._remaining.begin(self._done())
        self._printed: set[tuple[str, int]] = set()
        self._mixed_hardware = MixedHardware(self._earlier(), self.say)

    def _read(self) -> list[TrialRecord]:
        """Read new journal lines and return the trials that have ended since.

        The results are rebuilt at most as often as `Throttle` allows, because that is slow for
        thousands of trials.
        """
        ended = self._following.read()
        if self._results_throttle.due(len(self._following.records)):
            with self._results_throttle.timed():
                self.results = Results(self.folder, self.space, self._following.trials)
                self.evidence = Evidence(self.results)
                if (
                    len(self.results.trials) > MANY
                ):  # compute these inside the timed block; otherwise on demand
                    self._best()
                    self._left()
        return ended

    def __enter__(self) -> Console:
        if not self.quiet:
            self._heartbeat.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.__exit__()

    def say(self, text: str, event: str = "message", **fields: Any) -> None:
        """Print a line with the seconds since the start, unless quiet.

        event, fields: the same content as values, for JSON lines.
        """
        if not self.quiet:
            self._heartbeat.beat()
            try:
                self._print(self._lines.line(text, event, self.confirming, **fields))
            except OSError:  # the terminal was closed; the search goes on
                self.quiet = True

    def _print(self, line: str) -> None:
        self._lines.print(line)

    def greet(self, dashboard: str | None) -> None:
        """Print the line on Ray's dashboard, the folder and the plan before the first trial."""
        if dashboard is not None:
            self.say(dashboard)
        self.say(f"results {self.folder}")
        plan_lines = (
            plan.start_lines(planned) if (planned := self._remaining.planned) is not None else []
        )
        for line in [*plan.skipped(self.space), *plan_lines]:
            self.say(line)
        budget = self.space.budget
        many = text.pluralize(budget.trials, "trial")
        self.say(
            f"{many} × {text.seconds(budget.per_trial_s)} {budget.clock.what}; starting the workers"
        )
        self._heartbeat.workers_requested()

    def say_reused(self, device: str, here: Mapping[str, Any] | None) -> None:
        """Print how much of an earlier search is reused; for the arguments see
        `environment.differences`."""
        if not self.results.trials and (warm := warm_start.describe(self.space, device, here)):
            self.say(warm)

    def start(self, trial: str, content: Mapping[str, Any]) -> None:
        self.listen("start", trial, content)

    def point(self, trial: str, content: Mapping[str, Any]) -> None:
        self.listen("point", trial, content)

    def end(self, trial: str, content: Mapping[str, Any]) -> None:
        self.listen("end", trial, content)

    def listen(self, event: str, name: str, content: Mapping[str, Any]) -> None:
        """Handle an event of a trial: `start`, `point` or `end`."""
        if self.quiet:
            return
        if event == "start":
            self._remaining.start()
            self._heartbeat.workers_requested()
        else:
            for ended in self._read():
                if ended.status == "skipped":  # no event announces skipped trials
                    line = (
                        f"{self._called(ended.name)} skipped  {ended.reason} "
                        f" {self._changed(ended.drawn)}"
                    )
                    self.say(line, "end", **self._ended(ended))
        trial = self._following.records.get(name)
        if trial is not None:
            self._mixed_hardware.look_at(self._called(name), trial)
        self._print_event(event, name, trial, content)

    def _earlier(self) -> dict[str, TrialRecord]:
        """Return the trials so far, before confirming runs those of the search, by the names that
        are printed."""
        own = {self._called(name): trial for name, trial in self._following.records.items()}
        if not self.confirming:
            return own
        folder = self.folder.parents[len(Path(self.confirming).parts) - 1]
        return {trial.name: trial for trial in record.read_trials(folder)} | own

    def _print_event(
        self, event: str, name: str, trial: TrialRecord | None, content: Mapping[str, Any]
    ) -> None:
        if event == "start":
            drawn = {
                knob: value for knob, value in content.items() if knob in self.space.schema.knobs
            }
            line = f"{self._called(name)} start  {self._changed(drawn)}"
            self.say(line, "start", trial=self._called(name), changes=self.space.changed(drawn))
        elif trial is None:
            return
        elif event == "point" and (name, content.get("index", 0)) not in self._printed:
            self._printed.add((name, content.get("index", 0)))
            reached = {"seconds": content[trial.along], "value": content.get(self.results.metric)}
            reached |= {"index": content.get("index", 0), "samples_per_s": content["samples_per_s"]}
            line = f"{self._called(name)} {self._point(trial, content)}"
            self.say(line, "point", trial=self._called(name), **reached)
        elif event == "end":
            self.say(f"{self._called(name)} {self._end(trial)}", "end", **self._ended(trial))

    def _ended(self, trial: TrialRecord) -> dict[str, Any]:
        """Return the fields of the event `end`."""
        value = trial.value(self.results.metric)
        return {
            "trial": self._called(trial.name), "status": trial.status, "reason": trial.reason, "value": value,
            "changes": self.space.changed(trial.drawn),
        }  # fmt: skip

    def _point(self, trial: TrialRecord, point: Mapping[str, Any]) -> str:
        words, metric = (
            [f"{point[trial.along]:6.1f} {self.results.clock.short}"],
            self.results.metric,
        )
        if not self.results.by_rate and metric in point:
            words.append(f"{self.results.label} {text.number(point[metric])}")
            words += self._beside(self._versus(trial, point["index"], point[metric]))
        others = [OTHERS] if point.get("disturbed") is True else []
        return "  ".join([*words, f"{point['samples_per_s']:.0f} {self.results.unit}/s", *others])

    def _end(self, trial: TrialRecord) -> str:
        results, value = self.results, trial.value(self.results.metric)
        words = (
            ["ok"]
            if trial.status == "ok"
            else [trial.status or self._unended(trial), trial.remarks]
        )
        if value is not None:
            point = trial.points[-1]
            words += [
                f"{point[trial.along]:.1f} {results.clock.short}",
                f"{results.label} {text.number(value)}",
            ]
            words += self._beside(results.versus_baseline(trial))
            # of the whole training; a point has the rate since the one before
            average = f"{point['samples'] / point['train_s']:.0f} {results.unit}/s on average"
            words += [
                average,
                self._changed(trial.drawn),
                results.outcome_of(trial).failure_note,
                trial.remarks,
            ]
        words += [OTHERS] if disturbed(trial) else []
        if left := self._left():
            left = f"{self._done()}/{self.space.budget.trials}, {left}"
        return "  ".join(word for word in [*words, self._best(), left] if word)

    def _unended(self, trial: TrialRecord) -> str:
        if (lost := record.was_lost(self.folder / "trials" / trial.name)) is None:
            return "?"
        reason = (
            "leaves its node, which is draining," if lost.get("draining") else "has lost its node"
        )
        return f"{reason} and will go on from its checkpoint"

    def _versus(self, trial: TrialRecord, index: int, value: float) -> float | None:
        """Compare a value with the baseline's value at the same evaluation; None if there is
        none."""
        base = self.results.baseline_of(trial)
        base = None if base is not None and (failed(base) or base.status == "pruned") else base
        same = (
            next((point for point in base.points if point["index"] == index), None)
            if base is not None
            else None
        )
        of_base = same.get(self.results.metric) if same is not None else None
        return self.results.versus(value, of_base)

    def _beside(self, versus: float | None) -> list[str]:
        """Return `0.53× baseline` or `+0.012 vs. baseline` as a list; [] if the comparison is not
        known."""
        ratio_or_difference = beside(versus, self.results.ratios)
        mark = "×" if self.results.ratios else " vs."
        return [f"{ratio_or_difference}{mark} baseline"] if ratio_or_difference else []

    def _changed(self, drawn: Mapping[str, object]) -> str:
        return text.knobs(self.space.changed(drawn))

    def _best(self) -> str:
        best = (
            self.evidence.best if self.space.seeds == 1 else None
        )  # with several seeds no single run is the best
        if best is None:
            return ""
        outcome = self.evidence.outcome(best)
        return noted(f"best {best.name} {text.number(outcome.value)}", outcome)

    def _called(self, name: str) -> str:
        """Return a trial's name as other commands take it: `t0003`, or `confirm/t0003` for a
        confirming run."""
        return f"{self.confirming}/{name}" if self.confirming else name

    def _done(self) -> int:
        return self._following.ended

    def _left(self) -> str:
        return self._remaining.words(self._done(), self.results)
