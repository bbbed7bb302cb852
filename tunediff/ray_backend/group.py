"""A group of Ray Train workers: they hold the devices of a slot, and train one job after the other
in processes that are forked from templates. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from tunediff.tuning import mailbox
from tunediff.tuning.backend import Lost
from tunediff.tuning.templates import SharedTemplates, Templates
from tunediff.tuning.trial_spec import WorkerGroupSpec


def run_group(
    slot: str, generation: str, spec: WorkerGroupSpec, workload: str, storage: str, here: str,
    shared: SharedTemplates | None = None,
) -> None:  # fmt: skip
    """Run a group of workers until its slot ends it; `storage`: folder of Ray Train's own files;
    `here`: that the workers work in; `shared`: templates that they use. Raises when a worker fails.
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
        from tunediff.ray_backend.group import serve

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
def serve(
    name: str, generation: str, workload: str, here: str, shared: SharedTemplates | None
) -> None:
    """Run one worker: train the jobs of its slot until it is ended. An exception ends the group.

    `workload`: of the first job; `here`: where to work; `shared`: see `run_group`.
    """
    import ray
    import ray.train

    from tunediff.ray_backend import remains
    from tunediff.ray_backend.client import RaySlot

    if (mark := os.environ.pop(remains.MARK, None)) is not None:
        os.environ[remains.STARTED] = mark
    context = ray.train.get_context()
    with contextlib.suppress(OSError):  # on another node there may be no such folder
        os.chdir(here)
    slot, serial = RaySlot(name), ""
    about = ray.get_runtime_context()
    node = f"{about.gcs_address} {about.get_node_id()} {about.get_job_id()}"
    with Templates(shared=shared or SharedTemplates(node)) as templates:
        if workload:
            templates.prepare(workload)
        while True:
            if (assignment := slot.take_of(generation, serial)) is None:
                continue
            serial, job = assignment
            variables = _variables(context, serial)
            if variables is None:
                slot.post(serial, Lost("the ranks took different jobs"))
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
