"""Optimizers by name, their schedule, and how their step runs."""

import math

import pytest
import torch
from torch import nn

from tests.helpers import assert_equal, digits, ranks, tiny, toy, train, weights
from tests.toy.train import INPUTS, TARGETS, loss_of, network
from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.training import optimizer as adam
from tunediff.training.knobs import Adam, AdamW, Muon, Sgd
from tunediff.training.optimizer import MuonAdamW, groups_of, matrix_count
from tunediff.workloads.diffusion.unet import network as unet

NAMES = ("adamw", "muon", "adam", "sgd")


def learning_rate(progress, batch_size=128, **knobs):
    return adam.learning_rate(AdamW(lr=1e-3, **knobs), batch_size, progress)


def test_learning_rate_follows_the_budget():
    assert learning_rate(0.0, warmup=0.2) == 0.0
    assert learning_rate(0.1, warmup=0.2) == pytest.approx(5e-4)
    assert learning_rate(0.2, warmup=0.2) == learning_rate(1.0, warmup=0.2) == pytest.approx(1e-3)
    assert learning_rate(0.6, warmup=0.2, decay="cosine") == pytest.approx(5e-4)
    assert learning_rate(1.0, warmup=0.2, decay="cosine") == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(0.25, warmup=0.0, decay="linear") == pytest.approx(7.5e-4)
    assert learning_rate(1.0, warmup=1.0) == pytest.approx(1e-3)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 2.0), ("sqrt", math.sqrt(2))])
def test_learning_rate_scales_with_the_batch(scaling, factor):
    assert learning_rate(0.5, 256, lr_scaling=scaling, warmup=0.0) == pytest.approx(1e-3 * factor)
    config = tiny(loader__batch_size=512, optimizer__lr_scaling=scaling, optimizer__lr=1e-3)
    rate = adam.learning_rate(config.knobs.optimizer, config.loader.batch_size, 0.9)
    assert rate == pytest.approx(1e-3 * factor**2)


def test_every_group_gets_the_rate_of_the_moment():
    decayed, undecayed = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
    section = AdamW(lr=1e-3, warmup=0.2, weight_decay=0.1, beta2=0.9)
    optimizer = adam.build(section, 128, decayed, [undecayed])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.9)] * 2
    adam.set_learning_rate(optimizer, section, 128, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-4, 5e-4])
    assert len(adam.build(section, 128, decayed).param_groups) == 1


@pytest.mark.parametrize(
    ("implementation", "foreach", "fused"),
    [("foreach", True, False), ("fused", False, True), ("for_loop", False, False)],
)
def test_implementation(implementation, foreach, fused):
    section = tiny(optimizer__implementation=implementation).knobs.optimizer
    optimizer = adam.build(section, 128, nn.Linear(2, 2))
    assert (optimizer.defaults["foreach"], optimizer.defaults["fused"]) == (foreach, fused)


def fitted(section, steps=60):
    """The losses of a small network, and its weights at the end."""
    torch.manual_seed(0)
    net, found = network(toy(norm=False).knobs), []
    optimizer = adam.build(section, 128, net)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, (INPUTS, TARGETS))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, dict(net.state_dict())


def test_implementations_agree():
    states = [fitted(AdamW(lr=0.01, implementation=kind))[1] for kind in ("foreach", "fused", "for_loop")]
    assert_equal(states[0], states[1], rtol=1e-3, atol=1e-5)
    assert_equal(states[0], states[2], rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ every optimizer
def of(name, **values):
    return tiny(optimizer__name=name, **{"optimizer__lr": 1e-2 if name == "sgd" else 1e-3} | values)


@pytest.mark.parametrize("section", [AdamW(lr=0.02), Muon(lr=0.02), Adam(lr=0.02), Sgd(lr=0.01)], ids=NAMES)
def test_every_optimizer_learns(section):
    found, _ = fitted(section)
    assert found[-1] < 0.5 * found[0]


SHARED_OUT = [(name, "ddp") for name in NAMES[1:]]
SHARED_OUT += [("muon", "pipeline"), ("sgd", "fsdp")]


def of_all(world):
    """What each optimizer learns, by name and strategy."""
    found = {}
    for name, strategy in SHARED_OUT:
        config = of(name, parallel__workers=2, parallel__strategy=strategy)
        found[name, strategy] = weights(train(config, samples=16 * 4, world=world))
    return found


@pytest.mark.nightly
def test_two_ranks_learn_by_every_optimizer_what_one_learns(tmp_path):
    alone = {name: weights(train(of(name), samples=16 * 4)) for name in NAMES[1:]}
    for found in ranks(of_all, tmp_path):
        for (name, _), learned in found.items():
            assert_equal(learned, alone[name], rtol=1e-3, atol=1e-4)


def test_optimizers_get_their_knobs():
    sgd = adam.build(Sgd(momentum=0.8, nesterov=False, implementation="foreach"), 128, nn.Linear(1, 1)).param_groups[0]
    assert (sgd["lr"], sgd["momentum"], sgd["nesterov"], sgd["foreach"], sgd["fused"]) == (0.1, 0.8, False, True, False)
    adamw = adam.build(AdamW(beta2=0.99, weight_decay=0.05), 128, nn.Linear(1, 1)).param_groups[0]
    assert (adamw["betas"], adamw["weight_decay"], adamw["fused"]) == ((0.9, 0.99), 0.05, True)
    assert type(adam.build(Adam(), 128, nn.Linear(1, 1))) is torch.optim.Adam


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer.name": "muon", "parallel.strategy": "fsdp", "parallel.workers": 2},
         "optimizer.name: 'muon' is not allowed: parallel.strategy = fsdp leaves each process a part of a matrix"),
        ({"optimizer.name": "sgd", "optimizer.momentum": 0.0}, "optimizer.nesterov: True is not allowed"),
        ({"optimizer.momentum": 0.5}, "optimizer.momentum: belongs to optimizer.name = muon"),
        ({"optimizer.name": "muonn"}, "'muonn' is not allowed; allowed: one of adamw, "),
    ],
)  # fmt: skip
def test_refused_optimizers(values, message):
    with pytest.raises(ConfigError) as error:
        cfg.override(cfg.baseline("digits"), values)
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------------- configurations of it


def test_another_optimizer_keeps_what_means_the_same_in_it():
    """AdamW's learning rate carries over to Muon, and not to SGD, whose default is another."""
    config = tiny(optimizer__lr=3e-3, optimizer__warmup=0.1, optimizer__weight_decay=0.01)
    muon, sgd = (cfg.override(config, {"optimizer.name": name}).optimizer for name in ("muon", "sgd"))
    assert (muon.lr, muon.warmup, muon.weight_decay, muon.momentum) == (3e-3, 0.1, 0.01, 0.95)
    assert (sgd.lr, sgd.warmup, sgd.weight_decay) == (0.1, 0.1, 0.01)
    changed = cfg.override(config, {"optimizer.name": "muon"})
    assert cfg.differences(changed, config) == {"optimizer.name": "muon"}
    assert cfg.override(config, cfg.differences(changed, config)) == changed


@pytest.mark.parametrize("implementation", ["for_loop", "foreach", "fused"])
def test_sgd_begins_without_momentum_where_loss_scaling_skips_its_first_step(implementation):
    section = Sgd(lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.0, implementation=implementation)
    module, scaler = nn.Module(), torch.amp.GradScaler("cpu", init_scale=2.0)
    module.weight = nn.Parameter(torch.zeros(8))
    optimizer = adam.build(section, 128, module)
    torch.use_deterministic_algorithms(True)  # memory that nobody has filled is NaN then
    try:
        for factor in (math.inf, 1.0, 1.0):
            scaler.scale((module.weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(module.weight.detach(), torch.full((8,), -0.1 * (1.0 + 1.9)))


# ------------------------------------- muon: its steps against those of others, and which parameters it leaves to AdamW
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
