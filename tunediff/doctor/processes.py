"""Checks of the doctor that may crash or hang: each runs in processes of its own."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from tunediff import config as cfg
from tunediff.config.systems import Compile, Precision
from tunediff.core.clock import Budget
from tunediff.core.template_ask import ask
from tunediff.distributed import alone, from_environment
from tunediff.training import compilation
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.precision import set_backends
from tunediff.training.trial import run


def answer(name: str, ranks: int = 1, *, within_s: float) -> Mapping[str, Any]:
    """Return what one of the functions of `send` returns in processes of its own."""
    with tempfile.TemporaryFile() as output:
        numbers: Mapping[str, Any] = ask(
            f"{__name__}:send", name, ranks=ranks, within_s=within_s, output=output
        )
    return numbers


def send(connection: Connection, name: str) -> None:
    """Send what one of the functions returns; the function of a template's run."""
    measures = {
        "averaged": averaged, "compiled": compiled, "captured": captured, "cluster": cluster,
    }  # fmt: skip
    connection.send(measures[name]())


def averaged() -> dict[str, Any]:
    """Average 25 MiB of gradients over all processes, as DDP does at once by default."""
    with from_environment() as world:
        gradients = torch.full((25 * 2**18,), world.rank + 1.0, device=world.device)
        seconds = []
        for _ in range(4):
            world.synchronize()
            begin = time.perf_counter()
            mean = world.mean(gradients.clone())
            world.synchronize()
            seconds.append(time.perf_counter() - begin)
        right = not world.any(not bool((mean == (world.size + 1) / 2).all()))
        return {"right": right, "mean_s": min(seconds)}


def compiled() -> dict[str, Any]:
    """Run a small network forwards and backwards, compiled and eagerly."""
    device = alone().device
    set_backends(Precision(conv_tf32=False), device.type)  # TF32 alone differs by more
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()).to(device)
    net, options = copy.deepcopy(eager), Compile(mode="default")
    x = torch.randn(2, 3, 8, 8, device=device, requires_grad=True)
    begin, compiling = time.perf_counter(), compilation.Compilation(options)
    with compilation.cold_cache(options):
        model = compiling.apply(net, net, None)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
        graphs = compiling.facts()["compiled_graphs"]
    seconds = time.perf_counter() - begin
    (expected,) = torch.autograd.grad(eager(x).square().sum(), x)
    right = torch.allclose(gradient, expected, rtol=1e-3, atol=1e-4)
    return {"right": right, "graphs": graphs, "compile_s": seconds}


def captured() -> dict[str, Any]:
    """Train a small network for a few steps, captured."""
    outcome: dict[str, Any] = {"capture": "not tried"}

    class CaptureObserver(Observer):
        def about(self, facts: Mapping[str, Any]) -> None:
            outcome.update(facts)

    knobs = {"optimizer.implementation": "fused", "compile.capture": "step"}
    config = cfg.override(cfg.baseline("digits"), knobs)
    run(Engine(config, Budget(steps=6), alone(), CaptureObserver(), evaluates=False))
    return outcome


def cluster() -> dict[str, Any]:
    """Start a Ray cluster as a search does, and run a task."""
    import ray

    from tunediff.ray_backend import connection
    from tunediff.tuning import resources

    begin = time.perf_counter()
    with connection.cluster(None) as context:
        start_s, local = time.perf_counter() - begin, resources.local()
        right = ray.get(ray.remote(num_cpus=1)(lambda: 6 * 7).remote(), timeout=60) == 42
        task_s, counted = time.perf_counter() - begin, ray.cluster_resources()
        right &= [counted.get("CPU", 0), counted.get("GPU", 0)] == [local.cores, local.gpus]
        url = getattr(context, "dashboard_url", None) or ""
    return {"right": right, "start_s": start_s, "task_s": task_s, "url": url}
