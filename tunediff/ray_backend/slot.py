"""The actor of a slot: a mailbox, and the group of Ray Train workers that it serves.

Starting workers takes longer than a short trial. So a group stays, and its workers train one job
after the other, each in a process of its own; only a job that needs another `WorkerGroupSpec` gets
another group. Trial drivers (Tune) and workers (Train) call the actor, and each may die and be
started again. It imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import ray

from tunediff.core.errors import Failure
from tunediff.ray_backend import cluster
from tunediff.ray_backend.cluster import beside, own_cluster
from tunediff.tuning import mailbox
from tunediff.tuning.backend import Event
from tunediff.tuning.mailbox import POLL_S, Command, Mailbox
from tunediff.tuning.templates import Templates
from tunediff.tuning.trial import OOM
from tunediff.tuning.trial_spec import TrialSpec, WorkerGroupSpec


def run_group(
    slot: str, generation: str, spec: WorkerGroupSpec, workload: str, storage: str, here: str,
    shared: str = "",
) -> None:  # fmt: skip
    """Run a group of workers until its slot ends it; `storage`: folder of Ray Train's own files;
    `here`: that the workers work in; `shared`: name of their templates. Raises when a worker fails.
    """
    # `TorchTrainer` would import torch in each process of the group
    from ray.train import BackendConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class SharedDevices(Backend):  # type: ignore[misc]
        share_cuda_visible_devices = True  # as NCCL needs it to copy from GPU to GPU

    class SharedDevicesConfig(BackendConfig):  # type: ignore[misc]
        @property
        def backend_cls(self) -> type[Backend]:
            return SharedDevices

    def serve_group(settings: dict[str, Any]) -> None:
        # Imported here, in the training's own thread: where an import fails while Ray unpickles the
        # function, Ray keeps the place of the workers for ever.
        from tunediff.ray_backend.slot import serve

        serve(**settings)

    settings: dict[str, Any] = {"name": slot, "generation": generation, "workload": workload}
    settings |= {"here": here, "shared": shared}
    DataParallelTrainer(
        serve_group,
        train_loop_config=settings,
        backend_config=SharedDevicesConfig(),
        scaling_config=ScalingConfig(**_scaling(spec)),
        run_config=RunConfig(
            name=f"{slot}-group-{generation}",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=0),  # the trial decides what a failure means
        ),
    ).fit()


def _scaling(spec: WorkerGroupSpec) -> dict[str, Any]:
    """Return the options of Ray Train's `ScalingConfig`: workers, their resources, their nodes."""
    place = spec.place
    nodes = {"ray.io/node-id": f"in({','.join(place.nodes)})"} if place.nodes else None
    return {
        "num_workers": spec.size // place.each,
        "use_gpu": place.gpu,
        "resources_per_worker": place.resources,
        "label_selector": nodes,
        "placement_strategy": "PACK" if len(place.nodes) > 1 else "STRICT_PACK",
    }


# ---- one worker
def serve(name: str, generation: str, workload: str, here: str, shared: str) -> None:
    """Run one worker: train the jobs of its slot until it is ended. An exception ends the group.

    `workload`: of the first job; `here`: where to work; `shared`: see `run_group`.
    """
    import ray
    import ray.train

    context = ray.train.get_context()
    with contextlib.suppress(OSError):  # on another node there may be no such folder
        os.chdir(here)
    slot, serial = RaySlot(name), ""
    about = ray.get_runtime_context()
    node = f"{about.gcs_address} {about.get_node_id()} {about.get_job_id()}"
    with Templates(shared=shared or node) as templates:
        if workload:
            templates.prepare(workload)
        while True:
            if (assignment := slot.take_of(generation, serial)) is None:
                continue
            serial, job = assignment
            variables = _variables(context, serial)
            if variables is None:
                slot.post(serial, Failure("the ranks took different jobs"))
                continue
            mailbox.train(job, serial, slot, templates, variables)


def _variables(context: Any, serial: str) -> dict[str, str] | None:
    """Return the environment of this worker's rank as torchrun describes it; {} of one that trains
    alone; None if rank 0 trains another job than `serial`, which was stopped meanwhile."""
    import ray
    from ray.train.collective import broadcast_from_rank_zero

    ranks = context.get_world_size()
    if ranks == 1:
        return {}
    with socket.socket() as free:
        free.bind(("", 0))
        address, port, of_rank_zero = broadcast_from_rank_zero(
            (ray.util.get_node_ip_address(), free.getsockname()[1], serial)
        )
    if of_rank_zero != serial:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    indices = [visible.index(str(gpu)) for gpu in ray.get_gpu_ids()]
    return {
        "RANK": str(context.get_world_rank()), "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(indices[0] if indices else context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": address, "MASTER_PORT": str(port),
    }  # fmt: skip


NAMESPACE = "tunediff"


class RaySlot:
    """The actor of a slot as drivers (a `backend.Slot`) and ranks (a `RankMailbox`) call it."""

    def __init__(self, name: str) -> None:
        self._actor = ray.get_actor(name, namespace=NAMESPACE)

    # ---- for drivers
    def start(self, job: TrialSpec) -> str:
        return str(ray.get(self._actor.start.remote(job)))

    def event(self, serial: str, cursor: int) -> Event | None:
        event: Event | None = ray.get(self._actor.event.remote(serial, cursor))
        return event

    def go_on(self, serial: str, index: int) -> None:
        ray.get(self._actor.go_on.remote(serial, index))

    def stop(self, reason: str) -> None:
        ray.get(self._actor.stop_job.remote(reason))

    def missing_s(self) -> float:
        return float(ray.get(self._actor.missing_s.remote()))

    def gone(self, nodes: Sequence[str]) -> list[str]:
        return cluster.gone(nodes)

    # ---- for ranks
    def take_of(self, generation: str, done: str) -> tuple[str, TrialSpec] | None:
        job: tuple[str, TrialSpec] | None = ray.get(self._actor.take_of.remote(generation, done))
        return job

    def post(self, serial: str, event: Event) -> None:
        ray.get(self._actor.post.remote(serial, event))

    def command(self, serial: str, seen: int) -> Command | None:
        command: Command | None = ray.get(self._actor.command.remote(serial, seen))
        return command


CALLS_OF_A_RANK = 3
"""Calls of a worker that may wait at once: for its job, and for commands also to its last one."""
OTHER_CALLS = 16
"""Of drivers and of the search."""


class SlotActor(Mailbox):
    """The mailbox of a slot, whose ranks are the workers of a group."""

    def __init__(self, name: str, storage: str, here: str, shared: str = "") -> None:
        """`storage`: absolute folder of Ray Train's own files; `here`: folder that the workers work
        in; `shared`: name of templates that they use, where all are on this machine."""
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
                if self.has_idle_rank:
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
        self._spec, self._generation, self.has_idle_rank = spec, uuid.uuid4().hex[:8], False
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
        failure = Failure("the worker group ended")
        try:
            ray.get(group)
        except Exception as error:  # the trial's driver gets the reason
            failure = failure_of(error)
        with self._turn:
            if generation == self._generation:
                self._group, self._generation = None, ""
                self.stop(failure)

    def _end_group(self) -> None:
        """End the group with its job, and wait until it has ended."""
        group, self._group, self._generation = self._group, None, ""
        self.stop("its workers were ended")
        if group is not None:
            ray.cancel(group, force=True)  # its controller and workers belong to it and end with it
            ray.wait([group], timeout=60)


_INSIDE = ("cause", "controller_failure", "health_check_failure", "_base_exc")
"""Attributes of Ray's errors that hold the error which they report."""


def failure_of(error: Exception) -> Failure:
    """Return the innermost error inside of Ray's; of several workers', too little memory first."""
    of_workers = getattr(error, "worker_failures", {}).values()
    inside = [*of_workers, *(getattr(error, name, None) for name in _INSIDE)]
    found = [failure_of(one) for one in inside if isinstance(one, Exception)]
    return next(
        (one for one in found if one.error == OOM), found[0] if found else Failure.of(error)
    )
