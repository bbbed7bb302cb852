"""Starting a group of Ray Train workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunediff.tuning.trial_spec import WorkerGroupSpec

if TYPE_CHECKING:
    from tunediff.tuning.worker import Setup


def run_group(slot: str, generation: str, spec: WorkerGroupSpec, storage: str, here: str) -> None:
    """Run a group of workers until its slot lets it go; `storage`: folder of Ray Train's own files;
    `here`: that the workers work in. Raises when a worker fails.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from tunediff.training import memory

    def serve(setup: Setup) -> None:
        # Imported here, in the training's own thread: where an import fails while Ray unpickles the
        # function, Ray keeps the place of the workers for ever. The slot does without torch, which
        # this imports.
        from tunediff.tuning.worker import serve

        serve(setup)

    place = spec.place
    setup: Setup = {"slot": slot, "generation": generation, "threads": place.threads, "here": here}
    on = {"ray.io/node-id": f"in({','.join(place.nodes)})"} if place.nodes else None
    TorchTrainer(
        serve,
        train_loop_config=setup,
        torch_config=TorchConfig(backend="nccl" if place.gpu else "gloo", timeout_s=1800),
        scaling_config=ScalingConfig(
            num_workers=spec.size // place.each,
            use_gpu=place.gpu,
            resources_per_worker=place.resources,
            label_selector=on,
            placement_strategy="PACK" if len(place.nodes) > 1 else "STRICT_PACK",
        ),
        run_config=RunConfig(
            name=f"{slot}-group-{generation}",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=0),  # the trial decides what a failure means
            worker_runtime_env={"env_vars": memory.KEEPING if spec.keep_freed else {}},
        ),
    ).fit()
