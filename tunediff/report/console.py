"""What a search says while it runs: a live table in a terminal, one line per event elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff.analysis import Results, confirmation, curve, disturbed, evaluating, failed, last
from tunediff.analysis.comparison import ITSELF
from tunediff.analysis.evidence import UNTOLD, Evidence
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
"""A column of the live table, and the characters that it is given before others are."""


class Console:
    """One line per event."""

    def __init__(
        self, folder: Path, wanted: SearchSpace, quiet: bool, started: float | None = None,
        told: Mapping[str, Any] | None = None, lines: EventLines | None = None,
    ) -> None:  # fmt: skip
        """`started`: on the monotonic clock, where something went before that the same command did. `told`: what was
        expected, as `plan.values` has it. `lines`: where events are printed, and how."""
        self.folder, self.space, self.quiet, self.told = folder, wanted, quiet, told
        self._lines = lines or EventLines()
        self.begun, self._spent_s = time.monotonic(), sessions.spent_s(folder)
        self._heart = Heartbeat(folder, self.say, self._called)
        self.started = self.begun if started is None else started
        self.confirming = confirmation.folder_within(folder)
        self._following, self._seldom = Following(folder), Throttle()
        self._before, self._first = 0, 0.0
        self._last_end = 0, self.begun
        """Trials that have ended, and when the last of them was seen to."""
        self._read()
        self._before = self._done()
        self._printed: set[tuple[str, int]] = set()

    def _read(self) -> list[TrialRecord]:
        """Take in what is new; the trials that have ended. What follows from all is seldom made of thousands."""
        ended = self._following.read()
        if self._seldom.due(len(self._following.known)):
            with self._seldom.timed():
                self.found = Results(self.folder, self.space, self._following.trials)
                self.known, self._again_s = Evidence(self.found), functools.cache(self._confirming_s)
                if len(self.found.trials) > MANY:  # else when it is asked for
                    self._best()
                    self._left()
        return ended

    def __enter__(self) -> Console:
        if not self.quiet:
            self._heart.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._heart.__exit__()

    def say(self, text: str, event: str = "message", **fields: Any) -> None:
        """Print a line with the seconds since the start, unless quiet; `fields`: what it says, for JSON lines."""
        if not self.quiet:
            self._heart.beat()
            elapsed_s = time.monotonic() - self.started
            try:
                self._print(self._lines.line(text, elapsed_s, self.confirming, event, **fields))
            except OSError:  # the terminal went away; a night of trials must not
                self.quiet = True

    def _print(self, line: str) -> None:
        self._lines.print(line)

    def greet(self, context: Any) -> None:
        """Where to look while it runs."""
        if url := getattr(context, "dashboard_url", None):
            self.say(local_ray.dashboard(url))
        self.say(f"results {self.folder}")
        if not self.found.trials and (warm := warm_start.describe(self.space, local().device)):
            self.say(warm)
        told = plan.start_lines(self.told) if self.told is not None else []
        for line in [*plan.skipped(self.space), *told]:
            self.say(line)
        budget = self.space.budget
        many = text.pluralize(budget.trials, "trial")
        self.say(f"{many} × {text.seconds(budget.per_trial_s)} {budget.clock.what}; starting the workers")

    def listen(self, event: str, name: str, content: Mapping[str, Any]) -> None:
        """Take in what happened to a trial."""
        if self.quiet:
            return
        if event == "start":
            self._first = self._first or time.monotonic()  # the cluster was up by then: no trial pays for it again
        else:
            for one in self._read():
                if one.status == "skipped":  # no event tells of them
                    text = f"{self._called(one.name)} skipped  {one.reason}  {self._changed(one.drawn)}"
                    self.say(text, "end", **self._ended(one))
        self._tell(event, name, self._following.known.get(name), content)

    def _tell(self, event: str, name: str, trial: TrialRecord | None, content: Mapping[str, Any]) -> None:
        if event == "start":
            drawn = {knob: value for knob, value in content.items() if knob in self.space.schema.knobs}
            text = f"{self._called(name)} start  {self._changed(drawn)}"
            self.say(text, "start", trial=self._called(name), changes=self.space.changed(drawn))
        elif trial is None:
            return
        elif event == "point" and (name, content.get("index", 0)) not in self._printed:
            self._printed.add((name, content.get("index", 0)))
            reached = {"seconds": content[trial.along], "value": content.get(self.found.metric)}
            reached |= {"index": content.get("index", 0), "samples_per_s": content["samples_per_s"]}
            text = f"{self._called(name)} {self._point(trial, content)}"
            self.say(text, "point", trial=self._called(name), **reached)
        elif event == "end":
            self.say(f"{self._called(name)} {self._end(trial)}", "end", **self._ended(trial))

    def _ended(self, trial: TrialRecord) -> dict[str, Any]:
        """The fields of the event `end`."""
        value = trial.value(self.found.metric)
        return {
            "trial": self._called(trial.name), "status": trial.status, "reason": trial.reason, "value": value,
            "changes": self.space.changed(trial.drawn),
        }  # fmt: skip

    def _point(self, trial: TrialRecord, point: Mapping[str, Any]) -> str:
        words, metric = [f"{point[trial.along]:6.1f} {self.found.clock.short}"], self.found.metric
        if not self.found.by_rate and metric in point:
            words.append(f"{self.found.label} {text.number(point[metric])}")
            words += self._beside(self._versus(trial, point["index"], point[metric]))
        others = [OTHERS] if point.get("disturbed") is True else []
        return "  ".join([*words, f"{point['samples_per_s']:.0f} {self.found.unit}/s", *others])

    def _end(self, trial: TrialRecord) -> str:
        found, value = self.found, trial.value(self.found.metric)
        words = ["ok"] if trial.status == "ok" else [trial.status or self._unended(trial), trial.remarks]
        if value is not None:
            point = trial.points[-1]
            words += [f"{point[trial.along]:.1f} {found.clock.short}", f"{found.label} {text.number(value)}"]
            words += self._beside(found.versus_baseline(trial))
            words += [f"{point['samples'] / point['train_s']:.0f} {found.unit}/s", self._changed(trial.drawn)]
            words += [trial.remarks]
        words += [OTHERS] if disturbed(trial) else []
        if left := self._left():
            left = f"{self._done()}/{self.space.budget.trials}, {left}"
        return "  ".join(word for word in [*words, self._best(), left] if word)

    def _unended(self, trial: TrialRecord) -> str:
        if (lost := record.was_lost(self.folder / "trials" / trial.name)) is None:
            return "?"
        how = "leaves its node, which is draining," if lost.get("draining") else "has lost its node"
        return f"{how} and will go on from its checkpoint"

    def _versus(self, trial: TrialRecord, index: int, value: float) -> float | None:
        """A value against that of the baseline at the same evaluation."""
        base = self.found.baseline_of(trial)
        base = None if base is not None and (failed(base) or base.status == "pruned") else base
        same = next((point for point in base.points if point["index"] == index), None) if base is not None else None
        of_base = same.get(self.found.metric) if same is not None else None
        return self.found.versus(value, of_base)

    def _beside(self, versus: float | None) -> list[str]:
        """`0.53× baseline`, `+0.012 vs. baseline`."""
        known = beside(versus, self.found.ratios)
        return [f"{known}{'×' if self.found.ratios else ' vs.'} baseline"] if known else []

    def _changed(self, drawn: Mapping[str, object]) -> str:
        return text.knobs(self.space.changed(drawn))

    def _best(self) -> str:
        best = self.known.best if self.space.seeds == 1 else None  # over seeds a single run is no best
        return f"best {best.name} {text.number(best.value(self.found.metric))}" if best is not None else ""

    def _called(self, name: str) -> str:
        """As other commands call it: `t0003` of a search, `confirm/t0003` of its confirming runs."""
        return f"{self.confirming}/{name}" if self.confirming else name

    def _done(self) -> int:
        return self._following.ended

    def _left(self) -> str:
        """How long the rest will take: from what this session has done, before that from what was expected."""
        done, spent = self._done(), time.monotonic() - self.begun
        if done != self._last_end[0]:
            self._last_end = done, time.monotonic()
        if (left := self.space.budget.trials - done) > 0 and done > self._before:
            ended = self._last_end[1]  # the estimate is made when a trial ends, and counts down from there
            each = (ended - (self._first or self.begun)) / (done - self._before)
            rest = max(0.0, each * left - (time.monotonic() - ended))
        elif left > 0 and self.told is not None:
            spends = self.told["seconds"]
            rest = max(0.0, spends["wall_clock"] - spends["confirmation"] - spent)
        elif left > 0 or not self.space.finalists:
            return ""
        else:
            rest = 0.0
        if self.space.budget.total_s is not None:
            rest = min(rest, max(0.0, self.space.budget.total_s - self._spent_s - spent))
        about = "about" if self.started == self.begun else "at most"  # confirming runs end when they are decided
        words = f"{about} {text.seconds(rest)} left" if left > 0 else ""
        then = f"then at most {text.seconds(self._again_s())} of confirming" if self.space.finalists else ""
        if left <= 0 and (why := confirmation.nothing_to_confirm(self.found)):
            then = f"nothing to confirm: {why}"
        return ", ".join(filter(None, [words, then]))

    def _confirming_s(self) -> float:
        """Wall-clock of all confirming runs there may be: from evaluations that were made, else as expected."""
        confirm, trials, expected = self.space.confirm, self.found.trials, self.told or {}
        assert confirm is not None
        judged = [spent for trial in trials if (spent := evaluating.point_s(trial)) is not None]
        cost = evaluating.cost(self.space, None, max(judged, default=expected.get("evaluation_s")))
        last = evaluating.final_s(trials, confirm.final) if confirm.final else 0.0
        last = expected.get("final_evaluation_s_per_confirming_run") if last is None else last
        return dataclasses.replace(cost, confirming_final_s=last).confirming_s

    def _elapsed(self) -> str:
        return text.seconds(time.monotonic() - self.started)


class Table(Console):
    """One table for the whole search, drawn anew where it stands; what must not scroll out of sight is said above."""

    def __init__(
        self, folder: Path, wanted: SearchSpace, quiet: bool = False, started: float | None = None,
        told: Mapping[str, Any] | None = None, lines: EventLines | None = None,
    ) -> None:  # fmt: skip
        from rich.console import Console as Terminal
        from rich.live import Live

        super().__init__(folder, wanted, quiet, started, told, lines)
        self._terminal = Terminal(file=sys.stdout, highlight=False)
        self._slowly = Throttle()
        self._last: RenderableType = ""
        self._live = Live(console=self._terminal, get_renderable=self._shown, refresh_per_second=1)

    def __enter__(self) -> Table:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _print(self, line: str) -> None:
        self._terminal.print(line, markup=False)

    def _tell(self, event: str, name: str, trial: TrialRecord | None, content: Mapping[str, Any]) -> None:
        if event == "end" and trial is not None and (failed(trial) or trial.remarks):
            self.say(f"{self._called(name)} {trial.status}  {trial.remarks}  {self._changed(trial.drawn)}")

    def _shown(self) -> RenderableType:
        if not self._slowly.due(len(self._following.known)):
            return self._last
        try:
            with self._slowly.timed():
                self._last = self._render()
            return self._last
        except Exception as error:  # it is drawn by whatever prints, and at the end of the search: neither may fail
            return f"the table cannot be drawn: {described(error)}"

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table as Grid
        from rich.text import Text

        found = self.found
        ranks = {trial.name: rank for rank, trial in enumerate(found.ranked, 1)}
        running = [trial for trial in found.trials if not trial.finished]
        rest = [trial for trial in found.trials if trial.finished and trial.name not in ranks]
        again = {trial.name: trial for trial in rest if found.repeats(trial) and trial.status == "ok"}
        ranked = [row for one in found.ranked for row in (one, *(again.values() if one is found.baseline else ()))]
        rows = [*running, *ranked, *(trial for trial in reversed(rest) if trial.name not in again)]
        ranks = ranks if self.space.seeds == 1 else {}  # places are those of configurations, not of runs
        known, near = self.known.noise, {trial.name for trial in self.known.near}
        legend = f" · {NEAR} within the noise of the best: {noise_words(known, found.label)}" if known and near else ""
        legend += f" · {DISTURBED} {OTHERS}" if any(map(disturbed, rows)) else ""
        head = Text("\n" + self._headline() + legend, style="bold")
        room = max(3, self._terminal.height - 7 - len(head.wrap(self._terminal, self._terminal.width)[1:]))
        lines = [
            {"rank": f"{NEAR * (one.name in near)}{ranks.get(one.name, '')}"} | self._row(one) for one in rows[:room]
        ]
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
        """The headings of the columns that the terminal has room for, by name; shortens the changes in `lines`."""
        heads = {name: name for name in lines[0]}

        def room() -> int:
            widths = [
                max(len(head), *(len(line[name]) for line in lines)) for name, head in heads.items() if name != CHANGES
            ]
            return self._terminal.width - sum(widths) - 2 * len(heads)

        wanted = min(CHANGES_WIDTH, max(len(line[CHANGES]) for line in lines))
        for name in (
            "MiB",
            f"{self.found.unit}/s",
            self.found.versus_heading,
            "curve",
        ):  # what matters least goes first
            if room() < wanted:
                heads.pop(name, None)
        if room() < wanted:
            name, _, way = self._objective.rpartition(" ")
            heads[self._objective] = f"{short(name, 8)} {way}"
        if (left := room()) < len(CHANGES):
            heads[CHANGES] = "changes"
        for line in lines:
            line[CHANGES] = fitted(line[CHANGES], left)
        return {name: head for name, head in heads.items() if name != CHANGES or left >= len(heads[CHANGES])}

    def _headline(self) -> str:
        """How far the search is, and the best so far."""
        best, base = self.known.best if self.space.seeds == 1 else None, self.found.baseline
        faster = self.known.speedup(best) if best is not None else ITSELF
        search = self.folder.parents[self.confirming.count("/")].name
        name = f"{search}: confirming runs ({self.confirming})" if self.confirming else self.folder.name
        words = [name, f"{self._done()}/{self.space.budget.trials} {'runs' if self.confirming else 'trials'}"]
        words += [self._elapsed(), self._left(), self._best()]
        if isinstance(faster, Estimate):
            least = "at least " if faster.at_least else ""
            words.append(f"{least}{text.number(faster.bound or faster.mean)}× as fast as the baseline")
        elif faster == UNTOLD:
            words.append(UNTOLD)
        elif best is not None and base is not None and base.finished and (none := self.found.no_baseline(best)):
            words.append(f"no speed-up: {none}")
        return " · ".join(filter(None, words))

    def _row(self, trial: TrialRecord) -> dict[str, str]:
        """Cells by heading."""
        found = self.found
        values = [value for _, value in curve(trial, found.metric)]
        versus = self._versus(trial, last(trial, "index"), values[-1]) if values else None
        rate, memory = last(trial, "samples_per_s"), last(trial, "peak_memory_mib")
        status = trial.status or f"{len(trial.points)}/{trial.config.get('evaluation.points', '?')} points"
        rates = {} if found.by_rate else {f"{found.unit}/s": f"{rate:.0f}" if rate is not None else ""}
        return {
            "trial": self._called(trial.name),
            CHANGES: self._changed(trial.drawn),
            "curve": sparkline(values, found.ratios),
            self._objective: text.number(values[-1]) if values else "",
            found.versus_heading: beside(versus, found.ratios),
            **rates,
            "MiB": f"{memory:.0f}" if memory is not None else "",
            "status": status + f" {DISTURBED}" * disturbed(trial),
        }

    @property
    def _objective(self) -> str:
        """The heading of its column."""
        return f"{short(self.found.quantity(self.found.label).label, 26)} {'↓' if self.found.falls else '↑'}"


def _style(trial: TrialRecord, ranks: dict[str, int]) -> str:
    if not trial.finished:
        return "cyan"
    return "bold green" if ranks.get(trial.name) == 1 else ("" if trial.status == "ok" else "dim")


def sparkline(values: list[float], logs: bool) -> str:
    """A curve as one bar per value, from its lowest to its highest, on a logarithmic scale or a plain one: `█▅▃▁`."""
    fit = [value if math.isfinite(value) and (value > 0 or not logs) else None for value in values]
    heights = [math.log(value) if logs and value is not None else value for value in fit]
    known = [height for height in heights if height is not None]
    if not known:
        return ""
    low, spread = min(known), (max(known) - min(known)) or 1.0
    return "".join("?" if one is None else BARS[round((one - low) / spread * (len(BARS) - 1))] for one in heights)
