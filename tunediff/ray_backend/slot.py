"""The actor of a slot: a mailbox, and the group of Ray Train workers that it serves.

Starting workers takes longer than a short trial. So a group stays, and its workers train one job
after the other, each in a process of its own; only a job that needs another `WorkerGroupSpec` gets
another group. Trial drivers (Tune) and workers (Train) call the actor, and each may die and be
started again. It imports no torch.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from typing import Any

import ray

from tunediff.ray_backend.cluster import beside, own_cluster
from tunediff.ray_backend.group import run_group
from tunediff.tuning.mailbox import POLL_S, Mailbox
from tunediff.tuning.templates import SharedTemplates
from tunediff.tuning.trial_spec import TrialSpec, WorkerGroupSpec

CALLS_OF_A_RANK = 3
"""Calls of a worker that may wait at once: for its job, and for commands also to its last one."""
OTHER_CALLS = 16
"""Of drivers and of the search."""


class SlotActor(Mailbox):
    """The mailbox of a slot, whose ranks are the workers of a group."""

    def __init__(
        self, name: str, storage: str, here: str, shared: SharedTemplates | None = None
    ) -> None:
        """`storage`: absolute folder of Ray Train's own files; `here`: folder that the workers work
        in; `shared`: templates that they use, where all are on this machine."""
        super().__init__()
        self._name, self._storage, self._here, self._shared = name, storage, here, shared
        self._turn = threading.RLock()  # of what starts or ends a group
        self._group: Any = None  # the task that runs the trainer
        self._spec, self._generation = WorkerGroupSpec(0), ""

    def __repr__(self) -> str:
        job = self.job.name if self.job is not None and self.running else "idle"
        return f"Slot({self._name}, {job})"

    def note(self, line: str) -> None:
        """Log a line. The dashboard's table of tasks shows the caller's name for the call."""
        print(line, file=sys.stderr, flush=True)  # the log that the actor's page opens with

    # ---- for the search
    def warm(self, spec: WorkerGroupSpec, workload: str) -> None:
        """Start a group before there is a job of this workload for it."""
        with self._turn:
            if self._group is None:
                self._start_group(spec, workload)

    def release(self, trial: str, idle_s: float | None) -> None:
        """End what is left of a trial that is over, such as one that was stopped early.

        `idle_s`: seconds without a job after which others may have the devices; None: they stay.
        """
        if self.job is not None and self.job.name == trial:
            self.give_up()
        if idle_s is not None:
            timer = threading.Timer(idle_s, self._end_if_idle, [self.serial, idle_s])
            timer.daemon = True
            timer.start()

    def _end_if_idle(self, serial: str, idle_s: float) -> None:
        with self._turn:
            if self.serial == serial and not self.running and self._group is not None:
                if self.rests:
                    self._end_group()
                else:  # its process has not ended yet
                    self.release("", idle_s)

    # ---- for trial drivers
    def start(self, job: TrialSpec) -> str:
        with self._turn:
            if not self.runs(job) and (self._group is None or self._spec != job.group):
                self._end_group()
                self._start_group(job.group, job.workload)
            return super().start(job)

    def stop_job(self, reason: str) -> None:
        """Kill the job; with the group, if that has not taken it."""
        with self._turn:
            taken = self.taken
            self.stop(reason)
            if not taken:
                self._end_group()

    # ---- for workers
    def take_of(self, generation: str, done: str) -> tuple[str, TrialSpec] | None:
        """Return the next job for a worker of this group."""
        if generation != self._generation:  # it is about to be ended
            time.sleep(POLL_S)
            return None
        return self.take(done)

    # ---- the group
    def _start_group(self, spec: WorkerGroupSpec, workload: str) -> None:
        self._spec, self._generation, self.rests = spec, uuid.uuid4().hex[:8], False
        task = ray.remote(run_group).options(
            num_cpus=0,
            max_retries=0,
            name=f"workers of {self._name}, group {self._generation}",
            label_selector=beside(),
            runtime_env={"env_vars": own_cluster()},
        )
        self._group = task.remote(
            self._name, self._generation, spec, workload, self._storage, self._here, self._shared
        )
        threading.Thread(
            target=self._watch, args=(self._generation, self._group), daemon=True
        ).start()

    def _watch(self, generation: str, group: Any) -> None:
        """Wait until a group has ended, with which its job is lost."""
        reason = "the worker group ended"
        try:
            ray.get(group)
        except Exception as error:  # the trial's driver gets the reason
            reason = reason_of(error)
        with self._turn:
            if generation == self._generation:
                self._group, self._generation = None, ""
                self.stop(reason)

    def _end_group(self) -> None:
        """End the group with its job, and wait until it has ended."""
        group, self._group, self._generation = self._group, None, ""
        self.stop("its workers were ended")
        if group is not None:
            ray.cancel(group, force=True)  # its controller and workers belong to it and end with it
            ray.wait([group], timeout=60)


def reason_of(error: Exception) -> str:
    """Return Ray's message with the class and text of its controller's error."""
    inner = getattr(getattr(error, "cause", error), "controller_failure", None)
    return str(error) if inner is None else f"{error}\n{type(inner).__name__}: {inner}"
