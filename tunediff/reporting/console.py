"""What a search says while it runs: a live table in a terminal, one line per event elsewhere."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tunediff import cli, record
from tunediff import config as cfg
from tunediff.record import TrialRecord
from tunediff.reporting import results
from tunediff.space import SearchSpace

BARS = "▁▂▃▄▅▆▇█"
SHOWN = ("oom", "nan", "timeout", "error")
"""Ends whose reason is told in full."""


def skipped(wanted: SearchSpace) -> list[str]:
    """Which combinations of a grid are not run, and why."""
    return [f"skipped a combination that contradicts itself: {why}" for why in wanted.skipped]


def versus(wanted: SearchSpace, drawn: dict[str, Any]) -> dict[str, Any]:
    """The knobs of a point that differ from the baseline."""
    changed = cfg.differences(wanted.config(drawn), wanted.baseline)
    return {name: value for name, value in changed.items() if name in drawn}


class Console:
    """One line per event."""

    def __init__(self, folder: Path, wanted: SearchSpace, quiet: bool) -> None:
        self.folder, self.space, self.quiet = folder, wanted, quiet
        self.started = time.monotonic()
        self._before = len([t for t in record.read_trials(folder) if t.finished])
        self._printed: set[tuple[str, int]] = set()
        self._told_skipped = False

    def __enter__(self) -> Console:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        return None

    def say(self, text: str) -> None:
        """A line with the seconds since the start, unless quiet."""
        if not self.quiet:
            try:
                print(f"[{cli.seconds(time.monotonic() - self.started):>6}] {text}", flush=True)
            except OSError:  # the terminal went away; a night of trials must not
                self.quiet = True

    def greet(self, context: Any) -> None:
        """Where to look while it runs."""
        url = getattr(context, "dashboard_url", None)
        if url:
            self.say(f"dashboard http://{url} (loopback only; token: `ray get-auth-token`)")
        self.say(f"results {self.folder}")
        budget = self.space.budget
        for line in skipped(self.space):
            self.say(line)
        self.say(f"{budget.trials} trials × {cli.seconds(budget.per_trial_s)} training; starting the workers")

    def listen(self, event: str, name: str, content: dict[str, Any]) -> None:
        """Print what happened to a trial."""
        if self.quiet:
            return
        if event == "start":
            drawn = {knob: value for knob, value in content.items() if knob in cfg.knobs()}
            self.say(f"{name} start  {cli.knobs(versus(self.space, drawn))}")
            return
        found = results.Results(self.folder, self.space, record.read_trials(self.folder))
        trial = next((t for t in found.trials if t.name == name), None)
        if trial is None:
            return
        if event == "point":
            self._tell_skipped(name)
        if event == "point" and (name, content.get("index", 0)) not in self._printed:
            self._printed.add((name, content.get("index", 0)))
            self.say(f"{name} {self._point(found, trial, content)}")
        elif event == "end":
            self.say(f"{name} {self._end(found, trial)}")

    def _tell_skipped(self, name: str) -> None:
        """Name the files that are no images, once."""
        if self._told_skipped:
            return
        self._told_skipped = True
        for event in record.events(self.folder / "trials" / name):
            if event.get("skipped_files"):
                named = "; ".join(f"{file}: {reason}" for file, reason in event["skipped"])
                self.say(f"{event['images']:,} images; skipped {event['skipped_files']} files: {named}")
                return

    def _point(self, found: results.Results, trial: TrialRecord, point: dict[str, Any]) -> str:
        words = [f"{point['train_s']:6.1f} s"]
        if "frechet" in point:
            words.append(f"{found.label} {cli.number(point['frechet'])}")
            baseline = found.baseline_of(trial)
            base = baseline.points if baseline is not None else []
            same = next((p for p in base if p["index"] == point["index"]), None)
            if same is not None and same["frechet"]:
                words.append(f"{point['frechet'] / same['frechet']:.2f}× baseline")
        words.append(f"{point['images_per_s']:.0f} images/s")
        return "  ".join(words)

    def _end(self, found: results.Results, trial: TrialRecord) -> str:
        value = trial.value(found.metric)
        words = [trial.status or "?", trial.reason] if trial.status != "ok" else ["ok"]
        if value is not None:
            last = trial.points[-1]
            words += [f"{last['train_s']:.1f} s", f"{found.label} {cli.number(value)}"]
            if (ratio := found.versus_baseline(trial)) is not None:
                words.append(f"{ratio:.2f}× baseline")
            words.append(f"{last['images'] / last['train_s']:.0f} images/s")
            words.append(cli.knobs(versus(self.space, trial.drawn)))
        if found.best is not None:
            words.append(f"best {found.best.name} {cli.number(found.best.value(found.metric))}")
        done = len([t for t in found.trials if t.finished])
        if (left := self.space.budget.trials - done) > 0 and done > self._before:
            eta = (time.monotonic() - self.started) / (done - self._before) * left
            words.append(f"{done}/{self.space.budget.trials}, about {cli.seconds(eta)} left")
        return "  ".join(word for word in words if word)


class Table(Console):
    """One table for the whole search, drawn anew where it stands; what must not scroll out of sight is said above."""

    def __init__(self, folder: Path, wanted: SearchSpace) -> None:
        from rich.console import Console as Terminal
        from rich.live import Live

        super().__init__(folder, wanted, quiet=False)
        self._found = results.Results(folder, wanted, record.read_trials(folder))
        self._terminal = Terminal(file=sys.stdout, highlight=False)
        self._live = Live(console=self._terminal, get_renderable=self._render, refresh_per_second=1)

    def __enter__(self) -> Table:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """A line above the table, with the seconds since the start."""
        try:
            self._terminal.print(f"[{cli.seconds(time.monotonic() - self.started):>6}] {text}", markup=False)
        except OSError:
            self.quiet = True

    def listen(self, event: str, name: str, content: dict[str, Any]) -> None:
        """Take in what happened to a trial."""
        self._found = results.Results(self.folder, self.space, record.read_trials(self.folder))
        trial = next((t for t in self._found.trials if t.name == name), None)
        if event == "point":
            self._tell_skipped(name)
        if event == "end" and trial is not None and trial.status in SHOWN:
            self.say(f"{name} {trial.status}  {trial.reason}  {cli.knobs(versus(self.space, trial.drawn))}")

    def _render(self) -> Any:
        from rich.console import Group
        from rich.table import Table as Grid
        from rich.text import Text

        found, lower = self._found, self.space.mode == "min"
        ranks = {trial.name: rank for rank, trial in enumerate(found.ranked, 1)}
        running = [trial for trial in found.trials if not trial.finished]
        rest = [trial for trial in found.trials if trial.finished and trial.name not in ranks]
        rows = [*running, *found.ranked, *reversed(rest)]
        room = max(3, self._terminal.height - 8)

        grid = Grid(box=None, padding=(0, 1), header_style="bold")
        grid.add_column("rank", justify="right")
        grid.add_column("trial")
        grid.add_column("changes to the baseline", overflow="ellipsis", no_wrap=True, ratio=1)
        grid.add_column("curve", no_wrap=True)
        grid.add_column(found.label + (" ↓" if lower else " ↑"), justify="right", no_wrap=True)
        for column in ("× baseline", "images/s", "MiB"):
            grid.add_column(column, justify="right", no_wrap=True)
        grid.add_column("status", no_wrap=True)
        for trial in rows[:room]:
            grid.add_row(*self._row(trial, ranks), style=_style(trial, ranks))
        left = f"… and {len(rows) - room} more in {self.folder}" if len(rows) > room else ""
        head = Text("\n" + self._headline(), style="bold")
        return Group(head, grid, Text(left, style="dim")) if rows else head

    def _headline(self) -> str:
        """How far the search is, and the best so far."""
        found = self._found
        done = len([t for t in found.trials if t.finished])
        words = [found.folder.name, f"{done}/{self.space.budget.trials} trials", self._elapsed()]
        if (left := self.space.budget.trials - done) > 0 and done > self._before:
            words.append(f"about {cli.seconds((time.monotonic() - self.started) / (done - self._before) * left)} left")
        if (best := found.best) is not None:
            words.append(f"best {best.name} {cli.number(best.value(found.metric))}")
            if (faster := found.speedup(best)) is not None:
                words.append(f"{cli.number(faster)}× as fast as the baseline")
        return " · ".join(words)

    def _elapsed(self) -> str:
        return cli.seconds(time.monotonic() - self.started)

    def _row(self, trial: TrialRecord, ranks: dict[str, int]) -> list[str]:
        found, last = self._found, trial.points[-1] if trial.points else {}
        values = [point[found.metric] for point in trial.points if found.metric in point]
        base = found.baseline_of(trial)
        same = [p for p in base.points if p["index"] == last.get("index")] if base is not None else []
        ratio = values[-1] / same[0][found.metric] if values and same and same[0].get(found.metric) else None
        status = trial.status or f"{len(trial.points)}/{trial.config.get('evaluation.points', '?')} points"
        return [
            str(ranks.get(trial.name, "")),
            trial.name,
            cli.knobs(versus(self.space, trial.drawn)),
            sparkline(values),
            cli.number(values[-1]) if values else "",
            f"{ratio:.2f}" if ratio is not None else "",
            f"{last['images_per_s']:.0f}" if "images_per_s" in last else "",
            f"{last['peak_memory_mib']:.0f}" if "peak_memory_mib" in last else "",
            status,
        ]


def _style(trial: TrialRecord, ranks: dict[str, int]) -> str:
    if not trial.finished:
        return "cyan"
    return "bold green" if ranks.get(trial.name) == 1 else ("" if trial.status == "ok" else "dim")


def sparkline(values: list[float]) -> str:
    """A curve as one bar per value, on a logarithmic scale from its lowest to its highest: `█▅▃▁`."""
    finite = [math.log(value) for value in values if value > 0 and math.isfinite(value)]
    if not finite:
        return ""
    low, spread = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        BARS[round((math.log(value) - low) / spread * (len(BARS) - 1))] if value > 0 and math.isfinite(value) else "?"
        for value in values
    )
