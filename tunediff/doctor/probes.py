"""What `checks.ask` runs in processes of its own: `python -m tunediff.doctor.probes NAME FILE`."""

from __future__ import annotations

import copy
import http.client
import json
import os
import sys
import time
import urllib.parse
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
"""Within which, relative, a compiled float32 network agrees with itself run eagerly; a tenth of it
absolute."""


def group() -> dict[str, Any]:
    """Average as many gradients over all processes as DDP does at once."""
    with from_environment() as world:
        gradients = torch.full((int(MIB * 2**18),), world.rank + 1.0, device=world.device)
        taken = []
        for _ in range(4):
            world.synchronize()
            begin = time.perf_counter()
            mean = world.mean(gradients.clone())
            world.synchronize()
            taken.append(time.perf_counter() - begin)
        right = not world.any(not bool((mean == (world.size + 1) / 2).all()))
        backend = torch.distributed.get_backend()
        return {"right": right, "backend": backend, "mean_s": min(taken[1:])}


def compiled() -> dict[str, Any]:
    """Run a small network forwards and backwards, compiled and eagerly."""
    device = alone().device
    set_backends(Precision(conv_tf32=False), device.type)  # TF32 is not `CLOSE` to itself
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
    pairs = zip(passes, _passes(plain, x), strict=True)
    right = all(torch.allclose(a, b, rtol=CLOSE, atol=CLOSE / 10) for a, b in pairs)
    return {"right": right, "graphs": graphs, "compile_s": seconds}


def _passes(net: nn.Module, x: Tensor) -> list[Tensor]:
    y = net(x)
    F.mse_loss(y, torch.zeros_like(y)).backward()  # type: ignore[no-untyped-call]
    return [y.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def cluster() -> dict[str, Any]:
    """Start a Ray cluster as a search does, run a task, and ask the dashboard for anything at
    all."""
    import ray

    from tunediff.tuning import experiment, resources

    begin = time.perf_counter()
    with experiment.cluster(None) as context:
        started = time.perf_counter() - begin
        right = ray.get(ray.remote(num_cpus=1)(lambda: 6 * 7).remote(), timeout=60) == 42
        worked = time.perf_counter() - begin
        here, has = resources.local(), ray.cluster_resources()
        right &= [int(has.get("CPU", 0)), int(has.get("GPU", 0))] == [here.cores, here.gpus]
        url = getattr(context, "dashboard_url", None) or ""
        status, message = 0, "" if url else "Ray gives the dashboard no address"
        try:
            netloc = urllib.parse.urlsplit(f"//{url}").netloc or "127.0.0.1:1"
            line = http.client.HTTPConnection(netloc, timeout=10)
            line.request("GET", "/")
            status = line.getresponse().status
        except OSError as error:
            message = message or str(error)
    return {
        "right": right, "start_s": started, "task_s": worked, "url": url, "status": status,
        "message": message,
    }  # fmt: skip


PROBES = {probe.__name__: probe for probe in (group, compiled, cluster)}

if __name__ == "__main__":
    values = PROBES[sys.argv[1]]()
    if os.environ.get("RANK", "0") == "0":
        write_text(Path(sys.argv[2]), json.dumps(values))
