"""What `ask` runs in processes of its own: `python -m tunediff.doctor.probes NAME FILE`"""

from __future__ import annotations

import copy
import http.client
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunediff.config.systems import Compile, Precision
from tunediff.core.files import write_text
from tunediff.distributed import alone, from_environment
from tunediff.training import compilation
from tunediff.training.precision import set_backends

MIB = 25.0
"""Of gradients that are averaged at once, as `parallel.bucket_mib` has it."""
CLOSE = 1e-3
"""Relative, and a tenth of it absolute: within which a compiled float32 network agrees with itself run eagerly."""


def group() -> dict[str, Any]:
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
        return {"right": right, "backend": torch.distributed.get_backend(), "mean_s": min(taken[1:])}


def compiled() -> dict[str, Any]:
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
        passes = _passes(compiling.apply(net, net, None), x)
        graphs = compiling.facts()["compiled_graphs"]
    seconds = time.perf_counter() - begin
    expected = _passes(plain, x)
    right = all(torch.allclose(a, b, rtol=CLOSE, atol=CLOSE / 10) for a, b in zip(passes, expected, strict=True))
    return {"right": right, "graphs": graphs, "compile_s": seconds}


def _passes(net: nn.Module, x: Tensor) -> list[Tensor]:
    y = net(x)
    F.mse_loss(y, torch.zeros_like(y)).backward()  # type: ignore[no-untyped-call]
    return [y.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def graphs() -> dict[str, Any]:
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
    return {"right": bool((y == 7).all())}


def cluster() -> dict[str, Any]:
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
        message = ""
        try:
            line = http.client.HTTPConnection(urllib.parse.urlsplit(f"//{url}").netloc or "127.0.0.1:1", timeout=10)
            line.request("GET", "/")
            status = line.getresponse().status
        except OSError as error:
            message = str(error)
    result = {"right": right and counts, "start_s": started, "task_s": worked}
    return {**result, "url": url, "status": status, "message": message}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {one.__name__: one for one in (group, compiled, graphs, cluster)}

if __name__ == "__main__":
    values = PROBES[sys.argv[1]]()
    if os.environ.get("RANK", "0") == "0":
        write_text(Path(sys.argv[2]), json.dumps(values))
