"""GroupNorm, SiLU and dropout in one operation: its kernels in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import tiny
from tunediff.workloads.diffusion import unet

fused_norm = pytest.importorskip("tunediff.workloads.diffusion.fused_norm", reason="Triton is not installed")
SHAPES = [("float32", 128, 8, 32), ("bfloat16", 384, 4, 32), ("float16", 512, 4, 32), ("float32", 24, 3, 4)]
"""Number format, channels, side and groups; 24 channels fill no tile, and 9 pixels neither."""
ALL_SHAPES = [
    (name, channels, 8, 32) for name in ("float32", "bfloat16", "float16") for channels in (128, 256, 384, 512)
]
BOUNDS = {"float32": 1e-6, "bfloat16": 0.01, "float16": 1e-3}


def in_torch(x, added, weight, bias, groups):
    return F.silu(F.group_norm(x + added[:, :, None, None], groups, weight, bias, 1e-6))


def inputs(channels, side, dtype=torch.float64):
    x = torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0)) + 0.5
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    wide = torch.promote_types(dtype, torch.float32)
    others = (
        torch.linspace(-1, 1, 2 * channels).view(2, channels),
        torch.linspace(0.5, 2, channels),
        torch.ones(channels),
    )
    return [one.requires_grad_() for one in (x, *(other.to(wide) for other in others))]


def gradients_of_a_network(fused):
    """Return gradients of a U-Net by name, on a CPU as on a GPU in NHWC order where it is `fused`."""
    network = unet.network(tiny(model__dropout=0.0).knobs).to(memory_format=torch.channels_last)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with mock.patch.object(unet, "fused_norm", return_value=fused_norm if fused else None):
        loss = network(x, torch.tensor([3, 40])).square().sum()
    return dict(
        zip(dict(network.named_parameters()), torch.autograd.grad(loss, list(network.parameters())), strict=True)
    )


def interpreted(shapes):
    """Compare the kernels with float64, dropout's mask with its share; runs in a process of Triton's interpreter."""
    for name, channels, side, groups in shapes:
        tensors = inputs(channels, side, getattr(torch, name))
        y = fused_norm.norm_silu(*tensors, groups, 1e-6)
        dy = torch.randn_like(y)
        exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
        expected = in_torch(*exact, groups)
        pairs = zip(
            (y, *torch.autograd.grad(y, tensors, dy)),
            (expected, *torch.autograd.grad(expected, exact, dy.double())),
            strict=True,
        )
        for found, right in pairs:
            assert (found.double() - right).norm() < BOUNDS[name] * right.norm(), (name, channels)
    x, _, weight, bias = inputs(128, 8, torch.float32)
    y = fused_norm.norm_silu(x, None, weight, bias, 32, 1e-6, 0.25)
    kept = (y != 0).double()
    assert abs(float(kept.mean()) - 0.75) < 0.02
    plain = kept / 0.75 * in_torch(x, torch.zeros(2, 128), weight, bias, 32)
    torch.testing.assert_close(y.double(), plain, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(y)
    found, right = torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(plain, x, dy.double())[0]
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    plain, found = gradients_of_a_network(fused=False), gradients_of_a_network(fused=True)
    for name, gradient in plain.items():
        assert (found[name] - gradient).norm() < 1e-4 * gradient.norm(), name
    assert fused_norm.works(torch.device("cpu"), torch.float32)
    assert not fused_norm.works(torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("shapes", ["SHAPES", pytest.param("ALL_SHAPES", marks=pytest.mark.nightly)])
def test_kernels_compute_in_each_number_format_what_float64_does(shapes):
    code = (
        f"from tests.workloads.diffusion.test_fused_norm import interpreted, {shapes} as shapes;"
        " interpreted(shapes); print('compared')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[3],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert "compared" in done.stdout, done.stderr


def test_operation_is_used_only_where_it_runs(caplog):
    nowhere = torch.device("cuda", torch.cuda.device_count())
    assert not fused_norm.works(nowhere, torch.float32)
    assert "torch computes it" in caplog.text
