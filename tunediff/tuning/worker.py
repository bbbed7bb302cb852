"""What runs in the worker processes: a group of Ray Train workers that take one job after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from tunediff import config as cfg
from tunediff import record
from tunediff.clock import Budget, Clock
from tunediff.config import Config
from tunediff.tuning.slot import Kind, get


class SlotLostError(RuntimeError):
    """The slot does not know the job any more; its driver will hand it in again."""


def run_group(slot: str, generation: str, kind: Kind, storage: str, resources: dict[str, Any]) -> None:
    """Run a group of workers until its slot lets it go. Raises when a worker fails."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from tunediff.training import memory

    TorchTrainer(
        serve,
        train_loop_config={"slot": slot, "generation": generation, "threads": resources["threads"][str(kind.size)]},
        torch_config=TorchConfig(backend="nccl" if resources["gpu"] else "gloo", timeout_s=1800),
        scaling_config=ScalingConfig(
            num_workers=kind.size,
            use_gpu=resources["gpu"],
            resources_per_worker=resources["per_worker"][str(kind.size)],
        ),
        run_config=RunConfig(
            name=f"{slot}-group-{generation}",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=0),  # the trial decides what a failure means
            worker_runtime_env={"env_vars": memory.KEEPING if kind.keep_freed and not resources["gpu"] else {}},
        ),
    ).fit()


def serve(setup: dict[str, Any]) -> None:
    """One worker: take jobs from the slot until told to leave. An exception ends the group."""
    import ray.train
    import ray.train.torch
    import torch

    from tunediff.distributed import World

    context = ray.train.get_context()
    device = ray.train.torch.get_device()
    world = World(context.get_world_rank(), context.get_world_size(), device)
    torch.set_num_threads(setup["threads"])  # Ray allows one thread unless told otherwise
    _import_what_trials_need(device)
    slot, done = get(setup["slot"]), ""
    while True:
        order = ray.get(slot.take.remote(setup["generation"], done))
        if order is None:
            continue
        if order.get("leave"):
            return
        done = order["serial"]
        work(order["job"], done, slot, world)


def _import_what_trials_need(device: Any) -> None:
    """Import what torch imports on first use: the first trial, the baseline, must not pay for it."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1, device=device))
    torch.optim.AdamW([parameter], lr=0.0)  # takes seconds the first time: it imports torch._dynamo
    import torchvision  # noqa: F401


def work(job: dict[str, Any], serial: str, slot: Any, world: Any) -> None:
    """Train one job. Ends in an `end` event; a fault that may have harmed the process is raised after it."""
    import torch

    from tunediff.evaluation.distance import NonFiniteError
    from tunediff.training import memory
    from tunediff.training.precision import NotFiniteError

    folder = Path(job["folder"])
    print(f"{job['name']}: {folder}", file=sys.stderr, flush=True)  # Ray's page of this process
    known = record.read_trial(folder)
    if world.agree([float(known is not None and known.finished)])[0]:
        # Workers whose slot was killed live on for seconds, and may end a trial that was handed out again meanwhile.
        if world.main and known is not None:
            ray.get(slot.post.remote(serial, {"kind": "end", "status": known.status}))
        return
    try:
        outcome = _train(job, serial, slot, world, folder)
        if world.main:
            end = {"status": "ok" if outcome.finished else "pruned", "reason": "", "peak": outcome.peak}
            _end(folder, slot, serial, end | {"seconds": outcome.seconds, "steps": outcome.steps})
    except (NotFiniteError, NonFiniteError) as error:  # raised on all ranks alike: the group is as good as before
        if world.main:
            _end(folder, slot, serial, {"status": "nan", "reason": str(error), "peak": memory.peak_mib(world.device)})
        return
    except (SlotLostError, ray.exceptions.RayError):
        raise  # the cluster goes down or the slot is gone: that says nothing about this trial
    except Exception as error:
        if _lost_a_process(error, world.size):
            raise  # a rank or a loader process was killed: the group died, and the driver decides what that means
        if isinstance(error, OSError) and error.errno in record.DISK_FAULTS:
            raise  # the disk's fault: the trial is neither good nor bad, and no end could be written
        if (why := record.unwritable(folder)) is not None:  # not all that writes says so by its error
            raise OSError(why) from error
        status = "oom" if memory.is_oom(error) else "error"
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # a full disk may be what went wrong
            (folder / f"traceback-rank{world.rank}.txt").write_text(traceback.format_exc())
        _end(folder, slot, serial, {"status": status, "reason": reason, "peak": memory.peak_mib(world.device)})
        raise
    finally:
        _reset()
        torch.compiler.reset()
        memory.reset(world.device)


def _end(folder: Path, slot: Any, serial: str, end: dict[str, Any]) -> None:
    """Write the end of the trial to its journal, then tell its driver."""
    from tunediff.training import checkpoint

    with contextlib.suppress(OSError):  # the driver still hears of it
        record.Journal(folder).write("end", **end)
        if end["status"] == "ok":  # weights stay, optimizer state does not; until here a restart needs it
            (folder / checkpoint.NAME).unlink(missing_ok=True)
    ray.get(slot.post.remote(serial, {"kind": "end", **end}))


def _lost_a_process(error: Exception, ranks: int) -> bool:
    """Whether a collective failed because another rank is gone, or loading because its process was killed."""
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return "killed by signal" in str(error) or "exited unexpectedly" in str(error)  # whoever notices first says it
    signs = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe")
    return ranks > 1 and isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


def _reset() -> None:
    """Undo what a trial may have set for the whole process."""
    import numpy
    import torch

    torch.set_float32_matmul_precision("highest")
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _train(job: dict[str, Any], serial: str, slot: Any, world: Any, folder: Path) -> Any:
    import torch

    from tunediff.data import images as data
    from tunediff.training import checkpoint, memory
    from tunediff.training.loop import train

    config = cfg.from_dict(job["config"], where=job["name"])
    budget = Budget(**job["budget"])
    clock = Clock(budget, world.synchronize)
    with clock.part("setup"):
        images = data.load(config.data)
        evaluate = evaluator(config, world) if job["evaluate"] else None
    journal = record.Journal(folder) if world.main else None
    if journal is not None:
        journal.write(
            "worker", pid=os.getpid(), threads=torch.get_num_threads(), device=_device_name(world.device),
            images=len(images), skipped_files=len(images.skipped), skipped=images.skipped[:10],
            not_effective=cfg.not_effective(config, world.device.type),
        )  # fmt: skip

    def report(point: dict[str, Any]) -> bool:
        assert journal is not None
        if not record.is_recorded(folder, point):
            journal.write("point", **point)  # on disk before anybody hears of it
        if evaluate is not None and evaluate.last_images is not None:
            from tunediff.workloads.diffusion.evaluator import image_grid

            image_grid(evaluate.last_images, folder / "samples.png")
        ray.get(slot.post.remote(serial, {"kind": "point", **point}))
        if point["index"] == config.evaluation.points:
            return False  # the curve is complete; nobody needs to be asked
        while (answer := ray.get(slot.decision.remote(serial, point["index"]))) is None:
            pass
        if answer == "unknown":
            raise SlotLostError(f"the slot was restarted and knows nothing of {job['name']}")
        return bool(answer == "go")

    with cold_compile_cache(config):
        # A probe of the speed is measured again rather than continued, and its weights are worth nothing.
        kept = folder if job.get("keep", True) else None
        outcome = train(config, budget, images, evaluate, world, kept, report, clock=clock)
    if world.main and outcome.finished and kept is not None:
        checkpoint.save_weights(
            outcome.ema.state_dict(), folder / checkpoint.WEIGHTS, {"fingerprint": cfg.fingerprint(config)}
        )
    if outcome.finished and job.get("final"):
        with clock.part("evaluation"):
            evaluate_finally(config, job["final"], outcome, world, folder)
        outcome = dataclasses.replace(outcome, seconds=dict(clock.seconds))
    if outcome.finished and job.get("profile_steps"):
        memory.reset(world.device)
        write_operations(config, images, world, folder, job["profile_steps"])
    return outcome


def evaluate_finally(config: Config, protocol: dict[str, Any], outcome: Any, world: Any, folder: Path) -> None:
    """Judge the finished model once more with other `evaluation.` knobs; writes the journal's `final` event."""
    from tunediff.workloads.diffusion.process import Diffusion

    train_s = outcome.points[-1]["train_s"]
    if any(event["event"] == "final" and event["train_s"] == train_s for event in record.events(folder)):
        return  # an attempt that was killed had come this far
    evaluate = evaluator(cfg.override(config, protocol), world)
    found = evaluate(outcome.ema.model, Diffusion(config.process, world.device))
    if world.main:
        record.Journal(folder).write("final", train_s=train_s, **found)


def write_operations(config: Config, images: Any, world: Any, folder: Path, steps: int) -> None:
    """`operations.csv`: what takes longest in `steps` further steps, after three that are not looked at.

    Columns: operation, calls, self_s (on the device, over all these steps), total_s, share; the longest first.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    from tunediff.profiling import trace
    from tunediff.training.loop import train

    cuda, rows = world.device.type == "cuda", list[trace.Row]()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    plan = schedule(wait=2, warmup=1, active=steps, repeat=1)
    short = cfg.override(config, {"evaluation.points": 1})
    budget = Budget(images=(3 + steps) * config.loader.batch_size)
    with profile(
        activities=activities, schedule=plan,
        on_trace_ready=lambda profiler: rows.extend(trace.table_rows(profiler.key_averages(), cuda)),
    ) as profiler:  # fmt: skip
        train(short, budget, images, None, world, None, lambda point: True, after_step=profiler.step)
    torch.compiler.reset()
    if world.main:
        found = trace.operations(rows, steps, most=len(rows))["longest"]
        lines = ["operation,calls,self_s,total_s,share"]
        for row in found:
            calls, own, total = (
                each * steps for each in (row["calls_per_step"], row["self_s_per_step"], row["total_s_per_step"])
            )
            name = '"' + row["operation"].replace('"', "'") + '"'
            lines.append(f"{name},{calls:.0f},{own:.6g},{total:.6g},{row['share']:.6g}")
        (folder / "operations.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextlib.contextmanager
def cold_compile_cache(config: Config) -> Iterator[None]:
    """torch.compile finds nothing on disk that an earlier trial left there: its seconds are those of a first time."""
    if config.compile.mode == "none":
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="tunediff-compile-") as folder,
        _environment(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=os.path.join(folder, "triton")),
    ):
        yield


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@functools.lru_cache(maxsize=3)
def _evaluator(data: Any, evaluation: Any, process_steps: int, rank: int, size: int, device: str) -> Any:
    import torch

    from tunediff.data import images
    from tunediff.workloads.diffusion.evaluator import Evaluator

    config = dataclasses.replace(Config(), data=data, evaluation=evaluation)
    return Evaluator(config, images.load(data), torch.device(device), rank, size)


def evaluator(config: Config, world: Any) -> Any:
    """The evaluator of this data and protocol, built once per process: the ruler is the same for every trial."""
    return _evaluator(config.data, config.evaluation, config.process.steps, world.rank, world.size, str(world.device))
