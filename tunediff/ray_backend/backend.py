"""Run trials in a Ray cluster: the slots of a session, one actor each."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from tunediff.core import text
from tunediff.core import trial_record as record
from tunediff.core.files import plain
from tunediff.core.listeners import Listener
from tunediff.ray_backend import cluster
from tunediff.ray_backend.cluster import beside
from tunediff.ray_backend.slot import CALLS_OF_A_RANK, NAMESPACE, OTHER_CALLS, RaySlot, SlotActor
from tunediff.search_space import SearchSpace
from tunediff.tuning.backend import Backend, Reported
from tunediff.tuning.resources import Machine, Pool, ResourcePartition
from tunediff.tuning.trial import run_trial_on_slot
from tunediff.tuning.trial_spec import TrialSpec


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
        trial = record.read_begun(self._folder / "trials" / name)
        knobs = text.knobs(self._space.changed(trial.drawn))
        words = [name, event if event == "start" else ""]
        if event != "start" and trial.points:
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
        if event == "end":
            words.insert(1, trial.status or "ended")
            words.append(trial.reason)
        line = "  ".join(word for word in [*words, knobs] if word)
        self._show_line(int(content.get("slot", 0)), line)
        if event == "point":
            for key, gauge in self._gauges.items():
                if key in content:
                    gauge.set(
                        float(content[key]), {"search": plain(self._folder.name), "trial": name}
                    )


IDLE_S = 5.0
"""Seconds for which workers without a job keep their devices where other slots may need them."""
WIDTH = 200
"""Characters of a task's name on the dashboard."""


class RayBackend(Backend):
    """The slots of a session, as many actors as trials have run at once."""

    def __init__(
        self, folder: Path, share: ResourcePartition, of_cluster: bool = False,
        templates: str = "",
    ) -> None:  # fmt: skip
        """`folder`: of the search, for Ray Train's own files; `of_cluster`: whether Ray was
        there before; `templates`: name of those of this machine, where all workers are here."""
        # Several searches may share a cluster, where a name must be its own.
        prefix = f"{plain(folder.name)}-{uuid.uuid4().hex[:6]}-slot-"
        self.device = "cuda" if share.gpu else "cpu"
        self._storage, self._share = str(folder / "train"), share
        self._actors, self._templates = list[Any](), templates
        known = {machine.id for machine in share.machines}

        def left() -> list[Machine]:  # later ones have not been checked
            return [machine for machine in cluster.nodes() if machine.id in known]

        look = left if of_cluster else None
        self.devices = Pool(share, look, self._provide_actor, prefix)
        # slots or nodes that may need the devices of an idle slot
        self._others = share.slots > 1 or of_cluster

    def run(self, spec: TrialSpec, check: Callable[[], bool]) -> Iterator[Reported]:
        """Run a trial on its slot; see `Backend.run`."""
        yield from run_trial_on_slot(spec, RaySlot(spec.actor), check)

    def release(self, spec: TrialSpec) -> None:
        """End what is left of a trial that is over, and later give its devices to other slots."""
        idle_s = IDLE_S if self._others else None
        self._actors[spec.slot].release.remote(spec.name, idle_s)

    def say_through(self, say: Callable[[str], None]) -> None:
        """Call `say` with what changes on the machines."""
        self.devices.say = say

    def show(self, slot: int, line: str) -> None:
        """Show a line on the dashboard: in its table of tasks, and in the log of the actor."""
        if slot < len(self._actors):  # there is one as soon as a trial has its devices
            self._actors[slot].note.options(name=line[:WIDTH]).remote(line)

    def listeners(self, folder: Path, space: SearchSpace) -> Sequence[Listener]:
        """Return what shows the trials of a search on the dashboard."""
        return (RayDashboardReporter(folder, space, self.show),)

    def _provide_actor(self, slot: int, name: str) -> None:
        calls = CALLS_OF_A_RANK * self._share.sizes[-1] + OTHER_CALLS
        if slot == len(self._actors):  # numbers are given in order
            actor = ray.remote(SlotActor).options(
                name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=calls, max_restarts=-1,
                max_task_retries=-1, label_selector=beside(),
            )  # fmt: skip
            arguments = (name, self._storage, self._share.working_folder, self._templates)
            self._actors.append(actor.remote(*arguments))
