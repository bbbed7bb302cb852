import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import tiny
from tunediff import config as cfg
from tunediff.workloads.diffusion import knobs, unet
from tunediff.workloads.diffusion.unet import Attention, Downsample, ResidualBlock, TimeEmbedding, UNet

DIGITS = cfg.baseline("digits").model


def disturbed(model: knobs.Model, channels: int = 1, size: int = 8) -> UNet:
    """A network without zeros, so that every part of it matters."""
    net = UNet(model, channels, size)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net.eval()


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def test_parameters_shapes_and_types() -> None:
    assert count(UNet(knobs.Model(), 3, 32)) == 35_746_307, "the DDPM network"
    net = disturbed(DIGITS)
    assert count(net) == 176_849
    x = torch.randn(5, 1, 8, 8)
    output = net(x, torch.tensor([0, 1, 10, 500, 999]))
    assert output.shape == x.shape
    assert output.dtype == torch.float32


@pytest.mark.parametrize(
    ("model", "channels", "size"),
    [
        (knobs.Model(8, (1, 2, 2), 2, (8, 4), 0.1, 4), 3, 16),
        (knobs.Model(9, (1,), 1, (), 0.0, 3), 1, 5),
        (knobs.Model(8, (2, 1, 3), 1, (16,), 0.0, 8), 3, 16),
    ],
)
def test_shapes_of_other_networks(model: knobs.Model, channels: int, size: int) -> None:
    x = torch.randn(2, channels, size, size)
    assert disturbed(model, channels, size)(x, torch.tensor([3, 7])).shape == x.shape


def test_attention_is_where_it_was_asked_for() -> None:
    def attentions(model: knobs.Model, size: int) -> int:
        return sum(isinstance(module, Attention) for module in UNet(model, 3, size).modules())

    assert attentions(knobs.Model(8, (1, 2, 2, 2), 2, (16,), 0.0, 8), 32) == 2 + 1 + 3  # down, middle, up
    assert attentions(knobs.Model(8, (1, 2, 2, 2), 2, (8, 4), 0.0, 8), 32) == 4 + 1 + 6
    assert attentions(knobs.Model(8, (1, 2, 2, 2), 2, (), 0.0, 8), 32) == 1


def test_a_new_network_returns_zero_and_its_residual_branches_are_silent() -> None:
    net = UNet(DIGITS, 1, 8).eval()
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3, 900])
    assert net(x, t).count_nonzero() == 0
    nn.init.normal_(net.output.weight)
    assert net(x, t).count_nonzero() > 0
    # The time enters only through the residual branches, whose last convolutions are zero.
    assert torch.equal(net(x, t), net(x, t + 50))
    h = torch.randn(2, 32, 4, 4)
    for block in (module for module in net.modules() if isinstance(module, ResidualBlock)):
        if isinstance(block.attention, Attention):
            assert torch.equal(block.attention(h), h)


def test_sinusoids_are_those_of_ddpm() -> None:
    embedding = TimeEmbedding(8, 8)
    torch.testing.assert_close(embedding.frequencies, torch.tensor([1.0, 10 ** (-4 / 3), 10 ** (-8 / 3), 1e-4]))
    for layer in (embedding.linear1, embedding.linear2):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    angles = 300 * embedding.frequencies
    silu = nn.functional.silu
    expected = silu(silu(torch.cat((angles.sin(), angles.cos()))))
    torch.testing.assert_close(embedding(torch.tensor([300]))[0], expected)


def test_downsampling_pads_right_and_below() -> None:
    layer = Downsample(1)
    for corner in (0, 2):  # the first and the last weight of the kernel alone
        nn.init.zeros_(layer.conv.weight)
        nn.init.zeros_(layer.conv.bias)
        with torch.no_grad():
            layer.conv.weight[0, 0, corner, corner] = 1
        x = torch.randn(1, 1, 6, 6)
        expected = nn.functional.pad(x, (0, 2, 0, 2))[..., corner : corner + 6 : 2, corner : corner + 6 : 2]
        assert torch.equal(layer(x, torch.zeros(1, 1)), expected)


def test_attention_mixes_all_pixels_by_softmax_of_scaled_products() -> None:
    layer = Attention(8, 4)
    x = torch.randn(2, 8, 3, 4)
    pixels = layer.norm(x).permute(0, 2, 3, 1).reshape(2, 12, 8)
    q, k, v = (pixels @ w.T + b for w, b in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True))
    mixed = layer.out((q @ k.mT / 8**0.5).softmax(-1) @ v).reshape(2, 3, 4, 8).permute(0, 3, 1, 2)
    torch.testing.assert_close(layer(x), x + mixed)


def test_every_weight_is_used() -> None:
    net = disturbed(DIGITS)
    net(torch.randn(4, 1, 8, 8), torch.tensor([1, 200, 500, 900])).square().mean().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_images_of_a_batch_do_not_see_each_other_and_time_matters() -> None:
    net = disturbed(DIGITS)
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3, 900])
    both = net(x, t)
    torch.testing.assert_close(net(x[1:], t[1:]), both[1:], atol=1e-4, rtol=1e-4)
    assert (net(x, t.flip(0)) - both).abs().max() > 0.1


def test_channels_last_computes_the_same() -> None:
    plain = disturbed(DIGITS)
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    assert copy.deepcopy(last).get_parameter("middle.0.conv1.weight").is_contiguous(memory_format=torch.channels_last)
    seen: list[torch.Tensor] = []
    last.get_submodule("middle.0").register_forward_hook(lambda module, inputs, output: seen.append(output))
    x, t = torch.randn(3, 1, 8, 8), torch.tensor([0, 40, 900])
    torch.testing.assert_close(last(x, t), plain(x, t), atol=1e-4, rtol=1e-4)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_autocast(kind: torch.dtype, tolerance: float) -> None:
    net = disturbed(DIGITS)
    x, t = torch.randn(3, 1, 8, 8), torch.tensor([0, 40, 900])
    exact = net(x, t)
    with torch.autocast("cpu", kind):
        rough = net(x, t)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).norm() / exact.norm() < tolerance


@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, pytest.param(torch.channels_last, marks=pytest.mark.nightly)]
)
def test_one_graph_without_breaks(memory_format: torch.memory_format) -> None:
    net = disturbed(knobs.Model(8, (1, 2), 1, (4,), 0.0, 4)).to(memory_format=memory_format)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3, 900])
    torch.testing.assert_close(compiled(x, t), net(x, t))


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_bfloat16_has_the_gradients_of_eager():
    """A GroupNorm after attention: with the linear layer's own product torch 2.15 gives NaN here."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(64, 64, 3, padding=1), Attention(64, 8), nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 1)]
    eager = nn.Sequential(*layers)
    network, x = copy.deepcopy(eager), torch.randn(64, 64, 8, 8)
    for model in (eager, torch.compile(network)):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        output.float().square().mean().backward()
    for (name, mine), theirs in zip(network.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() < 0.03 * theirs.grad.norm(), name


def test_its_links_compute_what_it_computes_wherever_they_are_cut() -> None:
    net = disturbed(knobs.Model(channels=8, norm_groups=4, multipliers=(1, 2), attention=(4,), blocks=2, dropout=0.0))
    x, t = torch.randn(3, 1, 8, 8), torch.tensor([0, 7, 999])
    links = net.chain()
    inside = {id(parameter) for link in links for parameter in link.parameters()}
    assert inside == {id(parameter) for parameter in net.parameters()}, "each is learned in one of them"
    carried: tuple[Tensor, ...] = (x, t)
    for link in links:
        found = link(*carried)
        carried = found if isinstance(found, tuple) else (found,)
    torch.testing.assert_close(carried[0], net(x, t))
    assert len(carried) == 1, "no skip is left over"


# ------------------------------------ groupNorm, SiLU and dropout in one operation: its kernels in Triton's interpreter
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
        f"from tests.workloads.diffusion.test_unet import interpreted, {shapes} as shapes;"
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
