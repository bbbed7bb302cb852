"""What `apart.ask` runs in processes of its own: `python -m tunediff.doctor.probes NAME`."""

from __future__ import annotations

import copy
import http.client
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff import machine
from tunediff.config.systems import Compile, Precision
from tunediff.distributed import alone, from_environment
from tunediff.doctor.apart import answer
from tunediff.training import compilation
from tunediff.training.precision import set_backends

MIB = 25.0
"""Of gradients that are averaged at once, as `parallel.bucket_mib` has it."""
CLOSE = 1e-3
"""Relative, and a tenth of it absolute: within which a compiled float32 network agrees with itself run eagerly."""
BUSY: dict[str, dict[str, Any]] = {
    "cuda": {"loader.batch_size": 256, "precision.amp": "bf16"}, "cpu": {"loader.batch_size": 32},
}  # fmt: skip
"""How several ranks are timed: of the same batch, each takes its part."""
WAITS_S = 60.0
"""How long a rank may wait for one that is gone."""


def group() -> None:
    """Every process adds its number to those of all others, and averages as many gradients as DDP does at once."""
    with from_environment() as world:
        first = world.total(world.rank + 1.0)
        gradients = torch.full((int(MIB * 2**18),), world.rank + 1.0, device=world.device)
        taken = []
        for _ in range(4):
            world.synchronize()
            begin = time.perf_counter()
            mean = world.mean(gradients.clone())
            world.synchronize()
            taken.append(time.perf_counter() - begin)
        expected = (world.size + 1) / 2
        right = first == expected * world.size and bool((mean == expected).all())
        right = not world.any(not right)
        if world.main:
            answer(right=right, backend=torch.distributed.get_backend(), mean_s=min(taken[1:]))


def one_rank() -> None:
    """A group of this process alone, and what DDP makes of gradients in it."""
    device, free = alone().device, tempfile.mkdtemp()
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{free}/store", rank=0, world_size=1)
    torch.manual_seed(0)
    net, x = nn.Linear(64, 64).to(device), torch.randn(8, 64, device=device)
    plain = copy.deepcopy(net)
    found, expected = _passes(nn.parallel.DistributedDataParallel(net), x), _passes(plain, x)
    right = all(torch.allclose(a, b, rtol=CLOSE, atol=CLOSE / 10) for a, b in zip(found, expected, strict=True))
    torch.distributed.destroy_process_group()
    shutil.rmtree(free, ignore_errors=True)
    answer(right=right, backend=backend)


def compiled() -> None:
    """Forward and backward pass of a small network, compiled and eagerly."""
    device = alone().device
    set_backends(Precision(conv_tf32=False), device.type)  # TF32 is as far from itself in another kernel as `CLOSE`
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()).to(device)
    plain, x = copy.deepcopy(net), torch.randn(2, 3, 8, 8, device=device)
    options = Compile(mode="default")
    begin = time.perf_counter()
    with compilation.cold_cache(options):
        compiling = compilation.Compilation(options)
        found = _passes(compiling.apply(net, net, None), x)
        graphs = compiling.facts()["compiled_graphs"]
    seconds = time.perf_counter() - begin
    expected = _passes(plain, x)
    right = all(torch.allclose(a, b, rtol=CLOSE, atol=CLOSE / 10) for a, b in zip(found, expected, strict=True))
    answer(right=right, graphs=graphs, compile_s=seconds)


def _passes(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients."""
    y = net(x)
    F.mse_loss(y, torch.zeros_like(y)).backward()  # type: ignore[no-untyped-call]
    return [y.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def graphs() -> None:
    """A CUDA graph, recorded once and replayed on other numbers."""
    x = torch.zeros(1024, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2 + 1
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        y = x * 2 + 1
    x.fill_(3.0)
    recorded.replay()
    torch.cuda.synchronize()
    answer(right=bool((y == 7).all()))


def fp8() -> None:
    """A product of 8-bit floats, whose numbers these can hold exactly."""
    a, one = torch.ones(64, 64, device="cuda"), torch.ones((), device="cuda")
    half = a.to(torch.float8_e4m3fn)
    found = torch._scaled_mm(half, half.t().contiguous().t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    answer(right=bool((found == 64).all()))


def cluster() -> None:
    """A Ray cluster as a search starts it: one task on it, and its dashboard asked for anything at all."""
    import ray

    from tunediff.tuning import experiment, resources

    begin = time.perf_counter()
    with experiment.cluster(None) as context:
        started = time.perf_counter() - begin
        right = ray.get(ray.remote(num_cpus=1)(lambda: 6 * 7).remote(), timeout=60) == 42
        worked = time.perf_counter() - begin
        here, has = resources.local(), ray.cluster_resources()
        counts = [int(has.get("CPU", 0)), int(has.get("GPU", 0))] == [here.cores, here.gpus]
        url, status = getattr(context, "dashboard_url", None) or "", 0
        said = ""
        try:
            line = http.client.HTTPConnection(urllib.parse.urlsplit(f"//{url}").netloc or "127.0.0.1:1", timeout=10)
            line.request("GET", "/")
            status = line.getresponse().status
        except OSError as error:
            said = str(error)
    answer(right=right and counts, start_s=started, task_s=worked, url=url, status=status, said=said)


# ------------------------------------------------------------------------------------------------------- several ranks
def together(strategy: str) -> None:
    """Ten steps of all ranks beside those of a CPU alone, and how fast they train the network of part B."""
    from tunediff import config as cfg
    from tunediff.doctor import fast, trainings

    with from_environment() as world:
        mine = {"parallel.workers": 2 if strategy == "dp" else world.size, "parallel.strategy": strategy}
        ten = trainings.trained(cfg.override(trainings.small(), mine), world)
        reference = trainings.trained(trainings.small(), trainings.CPU)
        torch.set_num_threads(max(1, machine.cores() // world.size))
        kind = world.device.type
        speed = fast.speed(cfg.override(fast.network(kind), BUSY[kind] | mine), world)
        if world.main:
            far, loss = trainings.apart(ten.says, reference.says), abs(ten.loss / reference.loss - 1)
            answer(apart=far, loss_apart=loss, images_per_s=speed["samples_per_s"])


def killed() -> None:
    """Rank 1 of two kills itself after three steps: how long the other waits for it, and what it raises then; nothing
    is said where it still waits after `WAITS_S`."""
    from tunediff.doctor import trainings

    steps: list[float] = []
    torch.set_num_threads(1)  # two for each rank would wait for each other's cores

    def told(said: str) -> None:
        answer(waited_s=time.monotonic() - steps[-1], said=said)
        os._exit(0)  # there is nobody left to say goodbye to

    with from_environment() as world:

        def after_step() -> None:
            steps.append(time.monotonic())
            if len(steps) == 3 and world.main:
                threading.Timer(WAITS_S, told, ("",)).start()
            elif len(steps) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            trainings.short(trainings.small(parallel__workers=2), world, 100_000, after_step=after_step)
        except Exception as error:
            if len(steps) < 3:
                raise
            told(f"{type(error).__name__}: {error}")


PROBES: dict[str, Callable[..., None]] = {
    one.__name__: one for one in (group, one_rank, compiled, graphs, fp8, cluster, together, killed)
}

if __name__ == "__main__":
    PROBES[sys.argv[1]](*sys.argv[2:])
