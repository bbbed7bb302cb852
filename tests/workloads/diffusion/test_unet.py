import copy
import shutil

import pytest
import torch
from torch import Tensor, nn

from tunediff import config as cfg
from tunediff.workloads.diffusion import knobs
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
