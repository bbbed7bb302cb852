"""The Triton kernels against torch, on a CPU: run by `test_norm.py` with TRITON_INTERPRET=1, before triton is imported."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tunediff.workloads.diffusion import knobs, norm
from tunediff.workloads.diffusion.unet import NormSiLU, UNet

LAST = torch.channels_last
SMALL = knobs.Model(8, (1, 2), 1, (4,), 0.0, 4)
EPS = 1e-6


def drawn(shape, dtype, mean=0.0):
    torch.manual_seed(0)
    x = (mean + 2 * torch.randn(shape)).to(dtype).contiguous(memory_format=LAST).requires_grad_()
    weight, bias = torch.randn(2, shape[1]).unbind()
    return x, weight.requires_grad_(), bias.requires_grad_(), torch.randn(shape).to(dtype)


def with_gradients(function, x, weight, bias, dy):
    y = function(x, weight, bias)
    return y, *torch.autograd.grad(y, (x, weight, bias), dy)


def reference(groups, *given):
    """In float64, of the same rounded numbers."""
    given = [one.detach().double().requires_grad_() for one in given]
    return with_gradients(lambda x, weight, bias: F.silu(F.group_norm(x, groups, weight, bias, EPS)), *given)


@pytest.mark.parametrize(
    ("shape", "groups", "pixels", "dtype"),
    [
        ((2, 8, 4, 4), 4, 1024, torch.float32),
        ((2, 8, 4, 4), 4, 1024, torch.float16),
        ((1, 36, 5, 3), 3, 1024, torch.float32),  # 12 channels a group, no power of two: two groups a program, then one
        ((1, 36, 5, 3), 3, 1024, torch.bfloat16),
        ((1, 40, 3, 3), 1, 1024, torch.float32),
        ((2, 8, 1, 1), 2, 1024, torch.float32),
        ((1, 24, 5, 4), 2, 8, torch.float32),  # an image's pixels among 3 programs, of which the last has fewer
        ((1, 24, 5, 4), 2, 8, torch.bfloat16),
    ],
)
def test_values_and_gradients_are_those_of_torch(shape, groups, pixels, dtype, monkeypatch):
    monkeypatch.setattr(norm, "PIXELS", pixels)
    given = drawn(shape, dtype)
    found = with_gradients(lambda *own: norm.group_norm_silu(*own, groups, EPS)[0], *given)
    assert [one.dtype for one in found] == [dtype, dtype, torch.float32, torch.float32]
    assert all(one.is_contiguous(memory_format=LAST) for one in found[:2])
    for ours, theirs in zip(found, reference(groups, *given), strict=True):
        # What float32 arithmetic leaves, and a result's own format, to which the interpreter cuts where a GPU rounds.
        close = {"atol": 1e-6 * float(theirs.detach().abs().max()), "rtol": max(1e-5, torch.finfo(ours.dtype).eps)}
        torch.testing.assert_close(ours.double(), theirs, **close)


@pytest.mark.parametrize("pixels", [1024, 16])
def test_a_mean_far_from_zero_costs_no_digits_but_those_of_the_input(pixels, monkeypatch):
    """E[x²] − E[x]² in float32 would have none left."""
    monkeypatch.setattr(norm, "PIXELS", pixels)
    given = drawn((1, 8, 8, 8), torch.float32, mean=3000.0)
    found, expected = norm.group_norm_silu(*given[:3], 2, EPS)[0], reference(2, *given)[0]
    torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=0.0)


def test_other_memory_formats_are_taken_and_turned():
    x, weight, bias, dy = drawn((2, 8, 4, 4), torch.float32)
    same = with_gradients(lambda *own: norm.group_norm_silu(*own, 4, EPS)[0], x, weight, bias, dy)
    plain = x.detach().contiguous().requires_grad_()
    found = with_gradients(lambda *own: norm.group_norm_silu(*own, 4, EPS)[0], plain, weight, bias, dy)
    torch.testing.assert_close(found, same, atol=0.0, rtol=0.0)


def test_it_is_registered_as_torch_asks():
    """What it returns is new, has gradients, and the shapes and strides that are foretold."""
    x, weight, bias, _ = drawn((2, 8, 2, 2), torch.bfloat16)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.tunediff.group_norm_silu.default, (x, weight, bias, 4, EPS), test_utils=tests)


def test_it_stays_one_graph_under_torch_compile():
    layer = NormSiLU(dataclasses.replace(SMALL, norm="triton"), 8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, _, _, dy = drawn((2, 8, 4, 4), torch.float32)
    found = [torch.autograd.grad(one(x), (x, *layer.parameters()), dy) for one in (layer, compiled)]
    torch.testing.assert_close(*found, atol=0.0, rtol=0.0)


def networks():
    """The same network with torch's norm and ours, without the zeros of a new one."""
    found = []
    for kind in ("torch", "triton"):
        torch.manual_seed(0)
        found.append(UNet(dataclasses.replace(SMALL, norm=kind), 1, 8).to(memory_format=LAST))
    before = [net.state_dict() for net in found]
    assert before[0].keys() == before[1].keys()
    assert all(torch.equal(one, before[1][name]) for name, one in before[0].items()), "initial values"
    for parameter in found[0].parameters():
        nn.init.normal_(parameter, std=0.2)
    found[1].load_state_dict(found[0].state_dict())
    return found


def test_a_network_learns_the_same_with_it():
    results = []
    x, t = torch.randn(1, 1, 8, 8), torch.tensor([700])
    for net in networks():
        y = net(x, t)
        y.square().mean().backward()
        results.append([y.detach(), *(one.grad for one in net.parameters())])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_under_autocast_activations_keep_the_half_format():
    theirs, ours = networks()
    x, t, seen = torch.randn(1, 1, 8, 8), torch.tensor([700]), []
    ours.get_submodule("middle.0.norm1").register_forward_hook(
        lambda module, inputs, output: seen.extend((inputs[0].dtype, output.dtype))
    )
    exact = theirs(x, t)
    with torch.autocast("cpu", torch.bfloat16):
        errors = [float((net(x, t) - exact).square().mean().sqrt()) for net in (theirs, ours)]
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert 0 < errors[1] < 2 * errors[0], "rounded where the input was, no further from the truth"
