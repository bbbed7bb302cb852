"""Print the progress of a search: a live table in a terminal, one line per event elsewhere."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff.analysis import Results, confirmation, curve, disturbed, evaluating, failed, last
from tunediff.analysis.comparison import ITSELF
from tunediff.analysis.evidence import NOT_SIGNIFICANT, Evidence
from tunediff.analysis.following import MANY, Following, Throttle
from tunediff.analysis.statistics import Estimate
from tunediff.config.code import described
from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.trial_record import TrialRecord
from tunediff.event_lines import EventLines
from tunediff.report import plan
from tunediff.report.heartbeat import Heartbeat
from tunediff.report.verdicts import DISTURBED, NEAR, OTHERS, noise_words
from tunediff.report.words import beside, fitted, short
from tunediff.search_space import SearchSpace
from tunediff.tuning import local_ray, sessions, warm_start
from tunediff.tuning.resources import local

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = "▁▂▃▄▅▆▇█"
CHANGES, CHANGES_WIDTH = "changes to the baseline", 32
"""Heading of a column of the live table, and the characters reserved for it before other columns get any."""


class Console:
    """Print one line per event."""

    def __init__(
        self, folder: Path, space: SearchSpace, quiet: bool, started: float | None = None,
        planned: Mapping[str, Any] | None = None, lines: EventLines | None = None,
    ) -> None:  # fmt: skip
        """Read the trials that the folder already has.

        started: monotonic time at which the command began, if it did other work first. planned: the plan of the search,
        as `plan.values` returns it; the first estimate of the remaining time. lines: formats and prints events.
        """
        self.folder, self.space, self.quiet, self.planned = folder, space, quiet, planned
        self._lines = lines or EventLines()
        self.begun, self._spent_s = time.monotonic(), sessions.spent_s(folder)
        self._heartbeat = Heartbeat(folder, self.say, self._called)
        self.started = self.begun if started is None else started
        self.confirming = confirmation.folder_within(folder)
        self._following, self._results_throttle = Following(folder), Throttle()
        self._before, self._first = 0, 0.0
        self._last_end = 0, self.begun
        """How many trials have ended, and the monotonic time at which the last end was noticed."""
        self._read()
        self._before = self._done()
        self._printed: set[tuple[str, int]] = set()

    def _read(self) -> list[TrialRecord]:
        """Read new journal lines and return the trials that have ended since.

        The results are rebuilt at most as often as `Throttle` allows, because that is slow for thousands of trials.
        """
        ended = self._following.read()
        if self._results_throttle.due(len(self._following.records)):
            with self._results_throttle.timed():
                self.results = Results(self.folder, self.space, self._following.trials)
                self.evidence, self._again_s = Evidence(self.results), functools.cache(self._confirming_s)
                if len(self.results.trials) > MANY:  # compute these inside the timed block; otherwise on demand
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
            elapsed_s = time.monotonic() - self.started
            try:
                self._print(self._lines.line(text, elapsed_s, self.confirming, event, **fields))
            except OSError:  # the terminal was closed; the search goes on
                self.quiet = True

    def _print(self, line: str) -> None:
        self._lines.print(line)

    def greet(self, context: Any) -> None:
        """Print the dashboard, the folder and the plan before the first trial."""
        if url := getattr(context, "dashboard_url", None):
            self.say(local_ray.dashboard(url))
        self.say(f"results {self.folder}")
        if not self.results.trials and (warm := warm_start.describe(self.space, local().device)):
            self.say(warm)
        plan_lines = plan.start_lines(self.planned) if self.planned is not None else []
        for line in [*plan.skipped(self.space), *plan_lines]:
            self.say(line)
        budget = self.space.budget
        many = text.pluralize(budget.trials, "trial")
        self.say(f"{many} × {text.seconds(budget.per_trial_s)} {budget.clock.what}; starting the workers")

    def listen(self, event: str, name: str, content: Mapping[str, Any]) -> None:
        """Handle an event of a trial: `start`, `point` or `end`."""
        if self.quiet:
            return
        if event == "start":
            self._first = self._first or time.monotonic()  # the cluster is running now: estimates exclude its start-up
        else:
            for trial in self._read():
                if trial.status == "skipped":  # no event announces skipped trials
                    line = f"{self._called(trial.name)} skipped  {trial.reason}  {self._changed(trial.drawn)}"
                    self.say(line, "end", **self._ended(trial))
        self._print_event(event, name, self._following.records.get(name), content)

    def _print_event(self, event: str, name: str, trial: TrialRecord | None, content: Mapping[str, Any]) -> None:
        if event == "start":
            drawn = {knob: value for knob, value in content.items() if knob in self.space.schema.knobs}
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
        words, metric = [f"{point[trial.along]:6.1f} {self.results.clock.short}"], self.results.metric
        if not self.results.by_rate and metric in point:
            words.append(f"{self.results.label} {text.number(point[metric])}")
            words += self._beside(self._versus(trial, point["index"], point[metric]))
        others = [OTHERS] if point.get("disturbed") is True else []
        return "  ".join([*words, f"{point['samples_per_s']:.0f} {self.results.unit}/s", *others])

    def _end(self, trial: TrialRecord) -> str:
        results, value = self.results, trial.value(self.results.metric)
        words = ["ok"] if trial.status == "ok" else [trial.status or self._unended(trial), trial.remarks]
        if value is not None:
            point = trial.points[-1]
            words += [f"{point[trial.along]:.1f} {results.clock.short}", f"{results.label} {text.number(value)}"]
            words += self._beside(results.versus_baseline(trial))
            words += [f"{point['samples'] / point['train_s']:.0f} {results.unit}/s", self._changed(trial.drawn)]
            words += [trial.remarks]
        words += [OTHERS] if disturbed(trial) else []
        if left := self._left():
            left = f"{self._done()}/{self.space.budget.trials}, {left}"
        return "  ".join(word for word in [*words, self._best(), left] if word)

    def _unended(self, trial: TrialRecord) -> str:
        if (lost := record.was_lost(self.folder / "trials" / trial.name)) is None:
            return "?"
        reason = "leaves its node, which is draining," if lost.get("draining") else "has lost its node"
        return f"{reason} and will go on from its checkpoint"

    def _versus(self, trial: TrialRecord, index: int, value: float) -> float | None:
        """Compare a value with the baseline's value at the same evaluation; None if there is none."""
        base = self.results.baseline_of(trial)
        base = None if base is not None and (failed(base) or base.status == "pruned") else base
        same = next((point for point in base.points if point["index"] == index), None) if base is not None else None
        of_base = same.get(self.results.metric) if same is not None else None
        return self.results.versus(value, of_base)

    def _beside(self, versus: float | None) -> list[str]:
        """Return `0.53× baseline` or `+0.012 vs. baseline` as a list; [] if the comparison is not known."""
        ratio_or_difference = beside(versus, self.results.ratios)
        mark = "×" if self.results.ratios else " vs."
        return [f"{ratio_or_difference}{mark} baseline"] if ratio_or_difference else []

    def _changed(self, drawn: Mapping[str, object]) -> str:
        return text.knobs(self.space.changed(drawn))

    def _best(self) -> str:
        best = self.evidence.best if self.space.seeds == 1 else None  # with several seeds no single run is the best
        return f"best {best.name} {text.number(best.value(self.results.metric))}" if best is not None else ""

    def _called(self, name: str) -> str:
        """Return a trial's name as other commands take it: `t0003`, or `confirm/t0003` for a confirming run."""
        return f"{self.confirming}/{name}" if self.confirming else name

    def _done(self) -> int:
        return self._following.ended

    def _left(self) -> str:
        """Return how long the rest takes: from the trials of this session, before the first of them from the plan."""
        # Remember when the count of ended trials last changed.
        done, spent = self._done(), time.monotonic() - self.begun
        if done != self._last_end[0]:
            self._last_end = done, time.monotonic()
        # The search: measured trials first, then the plan, and never beyond the limit of the search.
        if (left := self.space.budget.trials - done) > 0 and done > self._before:
            ended = self._last_end[1]  # the estimate is made when a trial ends, and counts down from there
            per_trial_s = (ended - (self._first or self.begun)) / (done - self._before)
            rest = max(0.0, per_trial_s * left - (time.monotonic() - ended))
        elif left > 0 and self.planned is not None:
            planned_s = self.planned["seconds"]
            rest = max(0.0, planned_s["wall_clock"] - planned_s["confirmation"] - spent)
        elif left > 0 or not self.space.finalists:
            return ""
        else:
            rest = 0.0
        if self.space.budget.total_s is not None:
            rest = min(rest, max(0.0, self.space.budget.total_s - self._spent_s - spent))
        # In words, with the confirming runs that follow.
        about = "about" if self.started == self.begun else "at most"  # confirming runs may end early
        words = f"{about} {text.seconds(rest)} left" if left > 0 else ""
        then = f"then at most {text.seconds(self._again_s())} of confirming" if self.space.finalists else ""
        if left <= 0 and (why := confirmation.nothing_to_confirm(self.results)):
            then = f"nothing to confirm: {why}"
        return ", ".join(filter(None, [words, then]))

    def _confirming_s(self) -> float:
        """Return the wall-clock of all confirming runs: from measured evaluations, else from the plan."""
        trials, planned = self.results.trials, self.planned or {}
        judged = [spent for trial in trials if (spent := evaluating.point_s(trial)) is not None]
        seconds = {
            "evaluation_s": max(judged, default=planned.get("evaluation_s")),
            "confirming_final_s": planned.get("final_evaluation_s_per_confirming_run"),
        }
        return evaluating.Cost.of(self.space, seconds).confirming_s

    def _elapsed(self) -> str:
        return text.seconds(time.monotonic() - self.started)


class Table(Console):
    """Show one live table of the whole search; failures and messages are printed above it."""

    def __init__(
        self, folder: Path, space: SearchSpace, quiet: bool = False, started: float | None = None,
        planned: Mapping[str, Any] | None = None, lines: EventLines | None = None,
    ) -> None:  # fmt: skip
        from rich.console import Console as Terminal
        from rich.live import Live

        super().__init__(folder, space, quiet, started, planned, lines)
        file = sys.stderr if self._lines.on_stderr else sys.stdout
        self._terminal = Terminal(file=file, highlight=False)
        self._draw_throttle = Throttle()
        self._last: RenderableType = ""
        self._live = Live(console=self._terminal, get_renderable=self._shown, refresh_per_second=1)

    def __enter__(self) -> Table:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _print(self, line: str) -> None:
        self._terminal.print(line, markup=False)

    def _print_event(self, event: str, name: str, trial: TrialRecord | None, content: Mapping[str, Any]) -> None:
        if event == "end" and trial is not None and (failed(trial) or trial.remarks):
            self.say(f"{self._called(name)} {trial.status}  {trial.remarks}  {self._changed(trial.drawn)}")

    def _shown(self) -> RenderableType:
        if not self._draw_throttle.due(len(self._following.records)):
            return self._last
        try:
            with self._draw_throttle.timed():
                self._last = self._render()
            return self._last
        except Exception as error:  # drawing must never stop the search
            return f"the table cannot be drawn: {described(error)}"

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table as Grid
        from rich.text import Text

        results = self.results
        # Order of the rows: running trials, results by rank with the baseline's repeats, then the rest, newest first.
        ranks = {trial.name: rank for rank, trial in enumerate(results.ranked, 1)}
        running = [trial for trial in results.trials if not trial.finished]
        rest = [trial for trial in results.trials if trial.finished and trial.name not in ranks]
        again = {trial.name: trial for trial in rest if results.repeats(trial) and trial.status == "ok"}
        base = results.baseline
        ranked = [row for trial in results.ranked for row in (trial, *(again.values() if trial is base else ()))]
        rows = [*running, *ranked, *(trial for trial in reversed(rest) if trial.name not in again)]
        ranks = ranks if self.space.seeds == 1 else {}  # with several seeds ranks belong to configurations
        noise, near = self.evidence.noise, {trial.name for trial in self.evidence.near}
        legend = ""
        if noise and near:
            legend = f" · {NEAR} within the noise of the best: {noise_words(noise, results.label)}"
        legend += f" · {DISTURBED} {OTHERS}" if any(map(disturbed, rows)) else ""
        head = Text("\n" + self._headline() + legend, style="bold")
        # As many rows as the terminal has room for below the wrapped headline.
        room = max(3, self._terminal.height - 7 - len(head.wrap(self._terminal, self._terminal.width)[1:]))
        lines = [
            {"rank": f"{NEAR * (trial.name in near)}{ranks.get(trial.name, '')}"} | self._row(trial)
            for trial in rows[:room]
        ]
        # Columns that fit, then the rows.
        grid = Grid(box=None, padding=(0, 1), header_style="bold")
        heads = self._fit(lines) if lines else {}
        for name, head_ in heads.items():
            right = name not in ("trial", CHANGES, "curve", "status")
            grid.add_column(head_, justify="right" if right else "left", no_wrap=True)
        for trial, line in zip(rows, lines, strict=False):
            grid.add_row(*(line[name] for name in heads), style=_style(trial, ranks))
        left = f"… and {len(rows) - room} more in {self.folder}" if len(rows) > room else ""
        return Group(head, grid, Text(left, style="dim")) if rows else head

    def _fit(self, lines: list[dict[str, str]]) -> dict[str, str]:
        """Return the headings of the columns that fit the terminal, by name, and shorten the changes in `lines`."""
        heads = {name: name for name in lines[0]}

        def room() -> int:
            widths = [
                max(len(head), *(len(line[name]) for line in lines)) for name, head in heads.items() if name != CHANGES
            ]
            return self._terminal.width - sum(widths) - 2 * len(heads)

        needed = min(CHANGES_WIDTH, max(len(line[CHANGES]) for line in lines))
        # Drop columns, the least important first, then shorten the objective's heading, until the changes have room.
        for name in ("MiB", f"{self.results.unit}/s", self.results.versus_heading, "curve"):
            if room() < needed:
                heads.pop(name, None)
        if room() < needed:
            name, _, way = self._objective.rpartition(" ")
            heads[self._objective] = f"{short(name, 8)} {way}"
        if (left := room()) < len(CHANGES):
            heads[CHANGES] = "changes"
        for line in lines:
            line[CHANGES] = fitted(line[CHANGES], left)
        return {name: head for name, head in heads.items() if name != CHANGES or left >= len(heads[CHANGES])}

    def _headline(self) -> str:
        """Return the line above the table: progress, time, and the best trial so far."""
        best, base = self.evidence.best if self.space.seeds == 1 else None, self.results.baseline
        faster = self.evidence.speedup(best) if best is not None else ITSELF
        search = self.folder.parents[self.confirming.count("/")].name
        name = f"{search}: confirming runs ({self.confirming})" if self.confirming else self.folder.name
        words = [name, f"{self._done()}/{self.space.budget.trials} {'runs' if self.confirming else 'trials'}"]
        words += [self._elapsed(), self._left(), self._best()]
        if isinstance(faster, Estimate):
            least = "at least " if faster.at_least else ""
            words.append(f"{least}{text.number(faster.bound or faster.mean)}× as fast as the baseline")
        elif faster == NOT_SIGNIFICANT:
            words.append(NOT_SIGNIFICANT)
        elif best is not None and base is not None and base.finished and (none := self.results.no_baseline(best)):
            words.append(f"no speed-up: {none}")
        return " · ".join(filter(None, words))

    def _row(self, trial: TrialRecord) -> dict[str, str]:
        """Return the cells of a trial's row, by heading."""
        results = self.results
        values = [value for _, value in curve(trial, results.metric)]
        versus = self._versus(trial, last(trial, "index"), values[-1]) if values else None
        rate, memory = last(trial, "samples_per_s"), last(trial, "peak_memory_mib")
        status = trial.status or f"{len(trial.points)}/{trial.config.get('evaluation.points', '?')} points"
        rates = {} if results.by_rate else {f"{results.unit}/s": f"{rate:.0f}" if rate is not None else ""}
        return {
            "trial": self._called(trial.name),
            CHANGES: self._changed(trial.drawn),
            "curve": sparkline(values, results.ratios),
            self._objective: text.number(values[-1]) if values else "",
            results.versus_heading: beside(versus, results.ratios),
            **rates,
            "MiB": f"{memory:.0f}" if memory is not None else "",
            "status": status + f" {DISTURBED}" * disturbed(trial),
        }

    @property
    def _objective(self) -> str:
        """The heading of the objective's column."""
        return f"{short(self.results.quantity(self.results.label).label, 26)} {'↓' if self.results.falls else '↑'}"


def _style(trial: TrialRecord, ranks: dict[str, int]) -> str:
    if not trial.finished:
        return "cyan"
    return "bold green" if ranks.get(trial.name) == 1 else ("" if trial.status == "ok" else "dim")


def sparkline(values: list[float], logs: bool) -> str:
    """Return a curve as one bar per value: `█▅▃▁`.

    The lowest bar is the lowest value. logs: logarithmic scale. A value that cannot be drawn becomes `?`.
    """
    usable = [value if math.isfinite(value) and (value > 0 or not logs) else None for value in values]
    heights = [math.log(value) if logs and value is not None else value for value in usable]
    finite = [height for height in heights if height is not None]
    if not finite:
        return ""
    low, spread = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        "?" if height is None else BARS[round((height - low) / spread * (len(BARS) - 1))] for height in heights
    )
