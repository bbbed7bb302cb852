"""GroupNorm and SiLU as one Triton kernel. What it computes is tested in `interpreted.py`."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tunediff.workloads.diffusion import knobs
from tunediff.workloads.diffusion.unet import NormSiLU

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
TRITON = knobs.Model(8, (1,), 1, (), 0.0, 4, norm="triton")


@needs_triton
def test_the_kernels_compute_what_torch_does():
    """In a process of its own: what a kernel is, Triton decides when it is imported."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).parent / "interpreted.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@needs_triton
def test_one_compilation_serves_every_batch_size():
    from tunediff.workloads.diffusion import norm

    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes)
    x, weight = mode.from_tensor(torch.randn(6, 8, 4, 4)), mode.from_tensor(torch.ones(8), static_shapes=True)
    with mode:
        y, moments = norm.group_norm_silu(x, weight, weight, 4, 1e-6)
    assert (y.shape, moments.shape) == (x.shape, (2, x.shape[0], 4))
    assert sizes.guards == []


FORMATS = {"x": "*bf16", "y": "*bf16", "dx": "*bf16", "dy": "*bf16", "weight": "*fp32", "bias": "*fp32",
           "moments": "*fp32", "parts": "*fp32", "eps": "fp32"}  # fmt: skip


SPLIT = [pytest.param(name, True, marks=pytest.mark.slow) for name in ("_moments", "_forward", "_sums", "_backward")]


@needs_triton
@pytest.mark.parametrize(("name", "split"), [("_forward", False), ("_backward", False), *SPLIT])
def test_the_kernels_compile_for_a_gpu(name, split, tmp_path, monkeypatch):
    """The interpreter takes more than the compiler does. The sizes are those of the full network's first norm."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tunediff.workloads.diffusion import norm

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(norm, name)
    known = {"WIDTH": 4, "GROUPS": 8, "ROWS": 128, "LANES": 32, "SPLIT": split}
    known = {name: value for name, value in known.items() if name in kernel.arg_names}
    kinds = {name: "constexpr" if name in known else FORMATS.get(name, "i32") for name in kernel.arg_names}
    aligned = [name for name, kind in kinds.items() if kind.startswith("*") or name in ("channels", "pixels")]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, kinds, constexprs=known, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": norm.WARPS})
    assert "ld.global.v4" in made.asm["ptx"], "16 bytes at a time"


def test_elsewhere_it_is_torchs(monkeypatch):
    """On a CPU, or without Triton, a network that was trained with the kernel gives what it gave."""
    x, plain = torch.randn(2, 8, 4, 4), NormSiLU(knobs.Model(8, (1,), 1, (), 0.0, 4), 8)
    assert torch.equal(NormSiLU(TRITON, 8)(x), plain(x))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch.equal(NormSiLU(TRITON, 8)(x), plain(x))
