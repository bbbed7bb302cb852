"""Starting a group of Ray Train workers."""

from __future__ import annotations

from tunediff.tuning.messages import Kind
from tunediff.tuning.resources import Share


def run_group(slot: str, generation: str, kind: Kind, storage: str, share: Share) -> None:
    """Run a group of workers until its slot lets it go; `storage`: folder of Ray Train's own files.

    Raises when a worker fails.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from tunediff.training import memory
    from tunediff.tuning.worker import Setup, serve  # imports torch, which the slot does without

    setup: Setup = {"slot": slot, "generation": generation, "threads": share.threads[kind.size], "here": share.here}
    TorchTrainer(
        serve,
        train_loop_config=setup,
        torch_config=TorchConfig(backend="nccl" if share.gpu else "gloo", timeout_s=1800),
        scaling_config=ScalingConfig(
            num_workers=kind.size, use_gpu=share.gpu, resources_per_worker=share.per_worker[kind.size]
        ),
        run_config=RunConfig(
            name=f"{slot}-group-{generation}",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=0),  # the trial decides what a failure means
            worker_runtime_env={"env_vars": memory.KEEPING if kind.keep_freed and not share.gpu else {}},
        ),
    ).fit()
