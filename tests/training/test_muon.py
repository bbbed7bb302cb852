"""Muon: its steps against those of others, and which parameters it leaves to AdamW."""

import pytest
import torch
from torch import nn

from tests.helpers import digits
from tunediff.training.optimizer import MuonAdamW, groups_of, matrix_count
from tunediff.workloads.diffusion.unet import network as unet

SHAPES = [(8, 8), (16, 16, 3, 3), (64, 32), (32, 64), (96, 32), (16, 4, 1, 1), (128, 64, 3, 3), (4, 512), (64, 3, 4, 4)]


def stepped(parameters, matrices=1, steps=1, lr=0.1, **options):
    """The parameters after steps with fixed gradients."""
    optimizer = MuonAdamW([{"params": parameters, "matrices": matrices}], lr=lr, weight_decay=0.0, **options)
    torch.manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return parameters


def zeros(shape):
    return nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muon_step_has_the_same_size_whatever_the_shape(shape):
    (weight,) = stepped([zeros(shape)])
    assert weight.detach().square().mean().sqrt().item() == pytest.approx(0.2 * 0.1, rel=0.2)


def test_muon_steps_are_torchs_on_matrices():
    """Torch iterates in bfloat16: eight bits of each entry."""
    torch.manual_seed(0)
    start = torch.randn(24, 60)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = MuonAdamW([{"params": [ours], "matrices": 1}], 0.9, lr=0.02, weight_decay=0.1)
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        ours.grad = torch.randn(24, 60)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.03 * moved


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_muon_steps_are_timms_on_convolutions(memory_format):
    timm = pytest.importorskip("timm.optim.muon")
    torch.manual_seed(0)
    start = torch.randn(16, 8, 3, 3)
    ours = nn.Parameter(start.clone().to(memory_format=memory_format))
    theirs = nn.Parameter(start.clone())
    mine = MuonAdamW([{"params": [ours], "matrices": 1}], 0.95, lr=0.02, weight_decay=0.1)
    other = timm.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, conv_mode="flatten",
                      ns_coefficients="original", adjust_lr_fn="match_rms_adamw")  # fmt: skip
    for _ in range(5):
        gradient = torch.randn(16, 8, 3, 3)
        ours.grad, theirs.grad = gradient.to(memory_format=memory_format), gradient.clone()
        mine.step()
        other.step()
    assert (ours - theirs).norm() < 0.03 * (theirs - start).norm()
    assert ours.is_contiguous(memory_format=memory_format)


def test_muon_splits_a_fused_projection_and_stacks_equal_shapes():
    """One after the other or at once: three matrices of their own each."""
    torch.manual_seed(1)
    fused = stepped([zeros((48, 16)), zeros((48, 16))], matrices=3)
    alone = stepped([zeros((16, 16)) for _ in range(6)])
    torch.testing.assert_close(torch.cat([*fused]), torch.cat([*alone]), rtol=1e-4, atol=1e-6)


def test_muon_leaves_the_rest_to_adamw_step_for_step():
    torch.manual_seed(0)
    start = torch.randn(7)
    ours, theirs, matrix = nn.Parameter(start.clone()), nn.Parameter(start.clone()), zeros((4, 4))
    mine = MuonAdamW([{"params": [matrix], "matrices": 1}, {"params": [ours]}], lr=0.01, weight_decay=0.1, fused=True)
    other = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1, fused=True)
    for _ in range(4):
        ours.grad, matrix.grad = torch.randn(7), torch.randn(4, 4)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
    assert torch.equal(ours, theirs)


def test_muon_makes_no_step_of_infinite_gradients_under_loss_scaling():
    """The fused AdamW takes part in loss scaling by itself, which would leave the matrices without it."""
    matrix, bias = zeros((4, 4)), zeros((4,))
    groups = [{"params": [matrix], "matrices": 1}, {"params": [bias]}]
    optimizer, scaler = MuonAdamW(groups, lr=0.1, fused=True), torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(())).item()
    matrix.grad, bias.grad = torch.full((4, 4), torch.inf), torch.ones(4)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert not matrix.any()
    assert not bias.any()


# ------------------------------------------------------------------------------------------------- what goes to AdamW
def names_by_count(network):
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return {group["matrices"]: {names[id(one)] for one in group["params"]} for group in groups_of(network)}


def test_muon_takes_the_inner_matrices_of_the_unet():
    config = digits(model__multipliers=[1, 2], model__blocks=1)
    found = names_by_count(unet(config.knobs))
    weights = {name for name, one in unet(config.knobs).named_parameters() if one.ndim >= 2}
    fused = {name for name in weights if name.endswith("qkv.weight")}
    assert found[3] == fused != set()
    assert found[1] == weights - fused - {"input.weight", "output.weight"}
    assert {"input.weight", "output.weight", "norm.weight", "input.bias", "time.linear1.bias"} <= found[0]


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("bias", (64,), 0), ("positions", (1, 16, 32), 0), ("depthwise.weight", (32, 1, 3, 3), 0),
        ("narrow.weight", (3, 64), 0), ("long.weight", (4, 516), 0), ("long.weight", (4, 512), 1),
        ("conv.weight", (32, 16, 3, 3), 1), ("attention.qkv.weight", (96, 32), 3), ("in_proj_weight", (96, 32), 3),
        ("expand.weight", (96, 32), 1), ("attention.bias_table", (169, 6), 0), ("attention_biases", (8, 49), 0),
        ("attn.rel_pos_h", (27, 64), 0), ("pos_embed", (49, 64), 0), ("token_embedding", (64, 32), 0),
    ],
)  # fmt: skip
def test_muon_takes_a_parameter_by_its_shape(name, shape, count):
    assert matrix_count(name, torch.empty(shape)) == count
