"""Run trials on this machine without Ray: the parent of their processes is this one."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tunediff.core.template import TemplateError, rank_variables
from tunediff.tuning import mailbox
from tunediff.tuning.at_once import RunDevice
from tunediff.tuning.backend import Backend, Reported
from tunediff.tuning.mailbox import Mailbox
from tunediff.tuning.resources import Pool, ResourcePartition
from tunediff.tuning.templates import Templates, kept
from tunediff.tuning.trial import run_trial_on_slot
from tunediff.tuning.trial_spec import TrialSpec

OUTPUT = "output.txt"
"""File in the folder of a comparison with what its runs print."""
TRIALS = "trials"
"""Purpose of kept templates: measuring before a comparison uses them too."""


class LocalBackend(Backend):
    """What runs on this machine; it has one slot, or one for each of equal devices of
    the machine; a slot trains one job at a time, in a thread for each rank."""

    def __init__(
        self, folder: Path, partition: ResourcePartition, workloads: Sequence[str],
        run_devices: Sequence[RunDevice] = (),
    ) -> None:  # fmt: skip
        """`folder`: for what trials print; `workloads`: whose templates are prepared at once, for
        trials of one rank; `run_devices`: each has a run; none: one run at a time."""
        self.device = "cuda" if partition.gpu else "cpu"
        self.devices = Pool(partition)
        self._slots = [_Slot(folder / OUTPUT, device) for device in run_devices or (None,)]
        for slot in self._slots if workloads and partition.sizes[-1] == 1 else ():
            slot.provide_ranks(1, workloads)

    def run(self, spec: TrialSpec, check: Callable[[], bool] = lambda: False) -> Iterator[Reported]:
        """Run a trial on its slot; see `Backend.run`."""
        yield from run_trial_on_slot(spec, self.slot(spec), check)

    def slot(self, spec: TrialSpec) -> _Slot:
        """Return a trial's slot; all are prepared then: later imports would disturb others."""
        if len(self._slots) == 1:
            return self._slots[0]
        for slot in self._slots:
            slot.wait_until_prepared()
        return self._slots[spec.run_device]

    def close(self) -> None:
        """End all processes."""
        for slot in self._slots:
            slot.close()


class _Slot(Mailbox):
    """A mailbox and the ranks that it serves; a `backend.Slot`."""

    def __init__(self, output: Path, device: RunDevice | None) -> None:
        super().__init__()
        self._output = open(output, "ab")  # noqa: SIM115 – closed with the slot
        self._ranks: list[_Rank] = []
        self._device = device

    def start(self, job: TrialSpec) -> str:
        size = job.group.size // job.group.place.each
        self.provide_ranks(size)
        for rank, variables in zip(self._ranks, rank_variables(size), strict=True):
            rank.variables = variables | (self._device.variables if self._device else {})
        return super().start(job)

    def gone(self, nodes: Sequence[str]) -> list[str]:
        return []

    def provide_ranks(self, size: int, workloads: Sequence[str] = ()) -> None:
        """Let there be as many ranks; new ones prepare the templates of `workloads`."""
        if len(self._ranks) != size:
            self._end_ranks()
            templates, shared = [kept(TRIALS)], uuid.uuid4().hex
            if size > 1:
                templates = [Templates(shared=shared) for _ in range(size)]
            if self._device is not None:
                templates = [Templates()]
            for one in templates:
                one.output = self._output
            self._ranks = [_Rank(self, one, workloads, self._device) for one in templates]

    def wait_until_prepared(self) -> None:
        for rank in self._ranks:
            rank.prepared.wait()

    def close(self) -> None:
        self._end_ranks()
        self._output.close()

    def _end_ranks(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.end()


class _Rank:
    """A thread with the templates of one rank."""

    def __init__(
        self,
        jobs: Mailbox,
        templates: Templates,
        workloads: Sequence[str],
        device: RunDevice | None,
    ) -> None:
        self.variables = dict[str, str]()
        self.prepared = threading.Event()
        self._device = device
        self._templates, self._jobs = templates, jobs
        self._over = False
        threading.Thread(target=self._serve, args=(workloads,), daemon=True, name="rank").start()

    def _serve(self, workloads: Sequence[str]) -> None:
        if self._device is not None:
            self._device.pin()
        try:
            for workload in workloads:
                self._templates.prepare(workload)
            if self._device is not None:
                with contextlib.suppress(TemplateError):  # its trial will say it
                    self._templates.ready(workloads[-1])
        finally:
            self.prepared.set()
        done = ""
        while not self._over:
            if (assignment := self._jobs.take(done)) is not None and not self._over:
                done, job = assignment
                mailbox.train(job, done, self._jobs, self._templates, self.variables)

    def end(self) -> None:
        self._over = True
        self._templates.close()
        self._templates.output = None


@contextlib.contextmanager
def opened(
    folder: Path, partition: ResourcePartition, workloads: Sequence[str],
    run_devices: Sequence[RunDevice] = (),
) -> Iterator[LocalBackend]:  # fmt: skip
    """Yield the backend for runs in `folder` on `run_devices`; prepare `workloads`' templates."""
    backend = LocalBackend(folder, partition, workloads, run_devices)
    try:
        yield backend
    finally:
        backend.close()
