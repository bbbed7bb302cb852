"""Print the progress of a search: one line per event, and what it does when it was long silent."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunediff import config as cfg
from tunediff.analysis import Results, confirming_runs, disturbed
from tunediff.analysis.evidence import Evidence
from tunediff.analysis.journals import Following, Throttle
from tunediff.analysis.outcome import failed
from tunediff.core import disk, text
from tunediff.core.listeners import Listener
from tunediff.core.outcomes import Status
from tunediff.core.progress import DOING, EventLines, log_exceptions
from tunediff.core.trial_record import TrialRecord
from tunediff.report import plan, sentences
from tunediff.search_space import SearchSpace
from tunediff.tuning import sessions

SILENCE_S = 60.0
"""Silent seconds until a line is printed."""
PARTS = {
    "setup": "preparing", "compile": "compiling", "train": "training",
    "evaluation": "evaluating", "checkpoint": "saving",
}  # fmt: skip


class Heartbeat:
    """Print progress lines from a background thread inside a `with` block.

    Call `beat` for every line that is printed otherwise; it restarts the wait.
    """

    def __init__(
        self, folder: Path, say: Callable[[str], None], display_name: Callable[[str], str] = str,
        limit_s: float | None = None,
    ) -> None:  # fmt: skip
        """Prepare the thread for a search in this folder. `say`: prints a line; `display_name`: of
        a trial; `limit_s`: after which it is ended."""
        self._folder, self._say, self._display_name = folder, say, display_name
        self._at_most = "" if limit_s is None else f" (at most {text.seconds(limit_s)})"
        self._over, self._last = threading.Event(), time.monotonic()
        # Trials of an interrupted search may have left such files; clocks of files lag a little.
        self._begun = time.time() - 1.0

    def __enter__(self) -> Heartbeat:
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def beat(self) -> None:
        """Restart the wait, because a line was printed."""
        self._last = time.monotonic()

    def _run(self) -> None:
        while not self._over.wait(min(1.0, SILENCE_S / 4)):
            if time.monotonic() - self._last >= SILENCE_S:
                log_exceptions("the heartbeat", lambda: self._say(self.doing()))
                self.beat()

    def doing(self) -> str:
        """Return what the trial does whose work was noted last.

        Example: `t0001 evaluating for 40s: sampling 64 images: 120 of 640 steps, about 35s left`.
        """
        files = (self._folder / "trials").glob(f"*/{DOING}")
        with contextlib.suppress(FileNotFoundError):  # of a trial that ends meanwhile
            noted = [(file.stat().st_mtime, file) for file in files]
            if noted and max(noted)[0] >= self._begun:
                file = max(noted)[1]
                progress = json.loads(file.read_text())
                spent, part = text.seconds(time.time() - progress["since"]), progress["part"]
                limit = self._at_most if part == "train" else ""
                work = f": {progress['work']}" if progress["work"] else ""
                name = self._display_name(file.parent.name)
                return f"{name} {PARTS[part]} for {spent}{limit}{work}"
        return f"starting the workers for {text.seconds(time.monotonic() - self._last)}"


class Console(Listener):
    """Print one line per event."""

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        lines: EventLines | None = None,
        planned: Mapping[str, Any] | None = None,
    ) -> None:
        """Read the trials that the folder already has.

        lines: formats and prints events. planned: the plan of the search, as `plan.values` returns
        it.
        """
        begun = time.monotonic()
        self.folder, self.space = folder, space
        self.lines = lines or EventLines(begun=begun)
        self.quiet = self.lines.quiet
        self.confirming = confirming_runs.folder_within(folder)
        self.following, self._results_throttle = Following(folder), Throttle()
        limit_s = space.budget.trial_deadline_s
        self._heartbeat = Heartbeat(folder, self.say, self.display_name, limit_s)
        self._planned, self._begun = planned, begun
        self._spent_before_s, self._last_end = sessions.all_spent_s(folder), begun
        self._stages = [self.lines.begun, begun] if planned is not None else []
        """When the command began, what runs trials, Ray was ready, the first trial; empty once it
        was said where the seconds to the first step went."""
        self._ended_before = space.budget.trials
        self._read()
        self._ended_before = self.following.ended

    def __enter__(self) -> Console:
        if not self.quiet:
            self._heartbeat.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.__exit__()

    # ---- reading
    def _read(self) -> list[TrialRecord]:
        """Read new journal lines and return the trials that have ended since.

        The results are rebuilt at most as often as `Throttle` allows, slow for thousands of trials.
        """
        if ended := self.following.read():
            self._last_end = time.monotonic()
        if self._results_throttle.due(len(self.following.records)):
            with self._results_throttle.timed():
                self.results = Results(self.folder, self.space, self.following.trials)
                self.evidence = Evidence(self.results)
                self.best_words()  # inside the timed block: slow for thousands of trials
        return ended

    # ---- printing
    def say(self, message: str) -> None:
        """Print a line with the seconds since the start, unless quiet."""
        if self.quiet:
            return
        self._heartbeat.beat()
        try:
            self.print_line(self.lines.line(message, self.confirming))
        except OSError:  # the terminal was closed; the search goes on
            self.quiet = True

    def print_line(self, line: str) -> None:
        """Print a formatted line. Raises `OSError`."""
        self.lines.print(line)

    def greet(self, dashboard: str | None) -> None:
        """Print Ray's dashboard, the folder and the plan before the first trial."""
        planned, budget = self._planned, self.space.budget
        trials = text.pluralize(budget.trials, "trial")
        for line in (
            *([dashboard] if dashboard is not None else []),
            f"results {self.folder}",
            *(plan.skipped(self.space) if planned is None else plan.start_lines(planned)),
            f"{trials} × {text.seconds(budget.per_trial_s)} {budget.clock.what};"
            " starting the workers",
        ):
            self.say(line)
        self._stages += [time.monotonic()] * bool(self._stages)

    def _say_first_step(self, event: str, content: Mapping[str, Any]) -> None:
        """Say, at the first trial's first point, where the seconds to its first step went."""
        if event == "start" and len(self._stages) == 3:
            self._stages.append(time.monotonic())
        if event != "point" or len(self._stages) != 4:
            return
        names = ("data, evaluation and Ray" if self.space.workload.file is None else "checks",
                 "what runs trials", "its worker")  # fmt: skip
        parts = dict(zip(names, (b - a for a, b in itertools.pairwise(self._stages)), strict=True))
        parts["set-up"] = content.get("before_first_batch_s") or 0.0
        parts["the step"] = content.get("first_step_s") or 0.0
        shares = ", ".join(f"{name} {text.seconds(value)}" for name, value in parts.items())
        self.say(f"first step after {text.seconds(sum(parts.values()))}: {shares}")
        self._stages = []

    # ---- events
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
        self._say_first_step(event, content)
        if event != "start":
            for ended in self._read():
                if ended.status == Status.SKIPPED:  # no event announces skipped trials
                    line = f"skipped  {ended.reason}  {self.changes(ended.drawn)}"
                    self._say_of(ended.name, line)
        trial = self.following.records.get(name)
        self.print_event(event, name, trial, content)

    def print_event(
        self, event: str, name: str, trial: TrialRecord | None, content: Mapping[str, Any]
    ) -> None:
        """Print what an event says."""
        if event == "start":
            knobs = self.space.schema.knobs
            drawn = {knob: value for knob, value in content.items() if knob in knobs}
            self._say_of(name, f"start  {self.changes(drawn)}")
        elif trial is None:
            return
        elif event == "end":
            self._say_of(name, self._end_line(trial))
        else:
            self._say_of(name, self._point_line(trial, content))

    def _say_of(self, name: str, message: str) -> None:
        self.say(f"{self.display_name(name)} {message}")

    def _point_line(self, trial: TrialRecord, point: Mapping[str, Any]) -> str:
        results, metric = self.results, self.results.metric
        words = [f"{point[trial.along]:6.1f} {results.clock.short}"]
        if results.by_time and (on_way := results.curve_quantity).name in point:
            words.append(f"{on_way.title} {text.number(point[on_way.name])}")
        elif not results.by_rate and metric in point:
            words.append(f"{results.label} {text.number(point[metric])}")
            words.append(self._compared(self.versus_at(trial, point["index"], point[metric])))
        words.append(self._rate(text.number(point["samples_per_s"])))
        words.append(sentences.OTHERS if point.get("disturbed") is True else "")
        return "  ".join(filter(None, words))

    def _rate(self, rate: str, how: str = "") -> str:
        """Return a rate in words; how often a command prints a value says nothing."""
        is_command = cfg.is_command(self.space.workload.name)
        return "" if is_command else f"{rate} {self.results.unit}/s{how}"

    def _end_line(self, trial: TrialRecord) -> str:
        results, value = self.results, trial.value(self.results.metric)
        folder = self.folder / "trials" / trial.name
        words = [trial.status or str(disk.recorded_fault(folder) or "goes on from its checkpoint")]
        if value is None:
            words.append(sentences.of_trial(trial))
        else:
            point = trial.points[-1]
            # Of the whole training; a point has the rate since the one before.
            rate = f"{point['samples'] / point['train_s']:.0f}"
            words += [
                f"{point[trial.along]:.1f} {results.clock.short}",
                f"{results.label} {text.number(value)}",
                self._compared(results.versus_baseline(trial)),
                self._rate(rate, " on average"),
                self.changes(trial.drawn),
                results.outcome_of(trial).failure_note,
                sentences.of_trial(trial),
            ]
        words += [sentences.OTHERS if disturbed(trial) else "", self.best_words()]
        if left := self.remaining_words():
            words.append(f"{self.following.ended}/{self.space.budget.trials}, {left}")
        return "  ".join(filter(None, words))

    # ---- shared with the live table
    def display_name(self, name: str) -> str:
        """Return a trial's name as commands take it: `t0003`, or `confirm/t0003`."""
        return f"{self.confirming}/{name}" if self.confirming else name

    def changes(self, drawn: Mapping[str, object]) -> str:
        """Return the knobs that differ from the baseline."""
        return text.knobs(self.space.changed(drawn))

    def versus_at(self, trial: TrialRecord, index: int, value: float) -> float | None:
        """Compare a value with the baseline's at the same evaluation; None if there is none."""
        base = self.results.baseline_of(trial)
        if base is None or failed(base) or base.status == Status.PRUNED:
            return None
        values = (p.get(self.results.metric) for p in base.points if p["index"] == index)
        return self.results.versus(value, next(values, None))

    def _compared(self, value: float | None) -> str:
        """Return `0.53× baseline` or `+0.012 vs. baseline`; '' if it is unknown."""
        words = text.versus(value, self.results.ratios)
        return f"{words}{'×' if self.results.ratios else ' vs.'} baseline" if words else ""

    def best_words(self) -> str:
        """Return the best trial so far; '' with several seeds, where no single run is the best."""
        best = self.evidence.best if self.space.seeds == 1 else None
        if best is None:
            return ""
        outcome = self.evidence.outcome(best)
        words = [f"best {best.name} {text.number(outcome.value)}", outcome.failure_note]
        return ", ".join(filter(None, words))

    def remaining_words(self) -> str:
        """Return how long the trials that are left take, by the mean of this session's and within
        the limit of the search: `about 4m00s left`; '': unknown, or none are left."""
        ended, left = self.following.ended, self.space.budget.trials - self.following.ended
        if left <= 0 or ended <= self._ended_before:
            return ""
        per_trial_s = (self._last_end - self._begun) / (ended - self._ended_before)
        now, limit_s = time.monotonic(), self.space.budget.total_s or math.inf
        limit_s -= self._spent_before_s + now - self._begun
        rest_s = min(per_trial_s * left - (now - self._last_end), limit_s)
        return f"about {text.seconds(max(0.0, rest_s))} left"
