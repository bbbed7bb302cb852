"""Show a search on Ray's dashboard.

Its open version has pages for jobs, tasks, actors and logs, none for Tune or Train. So an event of
a trial becomes a task of the slot's actor, whose name describes it, and a line of that actor's log;
numbers also become gauges, for users of Prometheus and Grafana.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.files import plain
from tunediff.core.listeners import Listener
from tunediff.search_space import SearchSpace


class RayDashboardReporter(Listener):
    """Show the events of trials on Ray's dashboard."""

    def __init__(self, folder: Path, space: SearchSpace, show: Callable[[int, str], None]) -> None:
        """`show`: see `RayBackend.show`."""
        from ray.util.metrics import Gauge

        self._folder, self._space, self._show_line = folder, space, show
        keys = ("search", "trial")
        self._gauges = {
            "objective": Gauge(
                "tunediff_objective", "objective at the last evaluation of a trial", keys
            ),
            "samples_per_s": Gauge(
                "tunediff_samples_per_s", "samples trained per second by a trial", keys
            ),
            "train_s": Gauge("tunediff_train_s", "training seconds of a trial", keys),
        }

    def start(self, trial: str, content: Mapping[str, Any]) -> None:
        self._show("start", trial, content)

    def point(self, trial: str, content: Mapping[str, Any]) -> None:
        self._show("point", trial, content)

    def end(self, trial: str, content: Mapping[str, Any]) -> None:
        self._show("end", trial, content)

    def _show(self, event: str, name: str, content: Mapping[str, Any]) -> None:
        trial, schema = record.read_trial(self._folder / "trials" / name), self._space.schema
        drawn = (
            trial.drawn
            if trial is not None
            else {k: v for k, v in content.items() if k in schema.knobs}
        )
        knobs = text.knobs(self._space.changed(drawn))
        words = [name, event if event == "start" else ""]
        if trial is not None and event != "start" and trial.points:
            last = trial.points[-1]
            if self._space.evaluates and self._space.metric in last:
                words.append(
                    f"{last.get('label', self._space.label)}"
                    f" {text.number(last[self._space.metric])}"
                )
            words.append(
                f"at {last['train_s']:.1f} s, {last['samples_per_s']:,.0f}"
                f" {self._space.workload.unit}/s"
            )
        if trial is not None and event == "end":
            words.insert(1, trial.status or "ended")
            words.append(trial.remarks)
        line = "  ".join(word for word in [*words, knobs] if word)
        self._show_line(int(content.get("slot", 0)), line)
        if event == "point":
            for key, gauge in self._gauges.items():
                if key in content:
                    gauge.set(
                        float(content[key]), {"search": plain(self._folder.name), "trial": name}
                    )
