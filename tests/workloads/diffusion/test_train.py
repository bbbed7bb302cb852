"""Our diffusion training on the seam: what it learns, whatever the knobs; how it is judged."""

import shutil

import pytest
import torch
from torch import nn

from tests.helpers import (
    CPU,
    Dies,
    KilledError,
    Told,
    assert_equal,
    digits,
    ranks,
    tiny,
    train,
    weights,
)  # fmt: skip
from tunediff import config as cfg
from tunediff.data import images
from tunediff.training.judging import judged
from tunediff.training.observer import Recorder
from tunediff.workloads.diffusion import unet

FEW = 16 * 8


def test_same_seed_same_weights_other_seed_other_weights():
    first, again, other = (weights(train(tiny(seed=seed), samples=FEW)) for seed in (0, 0, 1))
    assert_equal(first, again)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    "knobs",
    [
        {"timesteps__name": "loss_second_moment", "timesteps__history": 1, "process__steps": 5, "evaluation__steps": 5},
        {"model__dropout": 0.3, "loader__accumulation": 2, "precision__amp": "bf16", "loader__resident": True},
        {"timesteps__name": "beta_policy", "timesteps__interval": 3, "timesteps__scan": 7, "model__dropout": 0.2},
        {"timesteps__name": "speed", "timesteps__dual": True, "weighting__name": "uncertainty"},
    ],
    ids=lambda knobs: ", ".join(map(str, knobs.values())),
)
def test_a_killed_training_ends_where_an_uninterrupted_one_does(tmp_path, knobs):
    """Every sampler goes on exactly in `test_timesteps.py`, every other knob in `training/test_resume.py`."""
    config = tiny(**knobs)
    whole = weights(train(config, samples=FEW, folder=tmp_path / "whole"))
    with pytest.raises(KilledError):
        train(config, samples=FEW, folder=tmp_path / "killed", observer=Dies())
    told = Told()
    again = train(config, samples=FEW, folder=tmp_path / "killed", observer=told)
    assert_equal(whole, weights(again))
    assert [point.index for point in told.points] == [1, 2]
    assert told.steps == 4


def test_the_effective_weight_is_recorded(tmp_path):
    config = tiny(timesteps__name="speed", weighting__name="min_snr", process__steps=1000)
    point = train(config, samples=FEW, folder=tmp_path, observer=Recorder(tmp_path)).points[-1]
    weight = torch.tensor(point["effective_weight"])
    assert len(weight) == 20
    assert weight.mean().item() == pytest.approx(1.0, abs=1e-4)
    assert (weight[13] / weight[14]).item() == pytest.approx(5.0, rel=1e-3)  # k = 5 at τ = 0.7
    lines = (tmp_path / "timesteps.csv").read_text().splitlines()
    assert lines[0] == "t,log_snr,probability,weight,effective_weight"
    row = [float(value) for value in lines[1].split(",")]
    assert row[:4] == pytest.approx([0, 9.2102, 0.00131579, 0.0005], rel=1e-3)
    assert len(lines) == 1001
    assert weight[0] < 0.1 * weight[10]  # min-SNR where the noise is low


@pytest.mark.usefixtures("poor_judge")
def test_the_averaged_weights_are_judged_and_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEDIFF_CACHE", str(tmp_path))
    config = tiny(evaluation__images=40, evaluation__validation_images=8, evaluation__points=1)
    told = Told()
    outcome = train(config, samples=16 * 4, observer=told, evaluates=True)
    (point,) = told.points
    assert (point["label"], point["evaluation_images"]) == ("FD (classifier)", 40)
    assert point["validation_split"] == "all"
    assert (told.shown["samples"].shape, told.shown["samples"].dtype) == ((40, 1, 8, 8), torch.uint8)
    assert set(told.shown["timesteps"]) == {"t", "log_snr", "probability", "weight", "effective_weight"}
    facts = {"data": "digits", "samples": 64, "summary": ["data: 64 images at 8×8 (digits)"]}
    assert told.facts == facts | {"digest": images.load(config.data).digest}
    again = judged(config, outcome.weights, CPU)
    assert again["frechet"] == point["frechet"]
    assert again["validation_loss"] == point["validation_loss"]
    assert point.peak_share == pytest.approx(point.samples_per_s * point.flops_per_sample / point.peak_flops_per_s)
    assert 0 < point.peak_share < 1.5


@pytest.mark.parametrize("amp", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
def test_it_learns(amp):
    losses = [point.loss for point in train(tiny(precision__amp=amp, optimizer__lr=3e-3), samples=16 * 50).points]
    assert losses[-1] < losses[0] < 1.5


# ------------------------------------------------------------------------------------------------------------- ranks
SHARED = [
    {"timesteps__name": "stratified", "parallel__static_graph": True, "parallel__bucket_mib": 0.01},
    {"timesteps__name": "beta_policy", "timesteps__interval": 3, "timesteps__scan": 5},
    {
        "timesteps__name": "wiener",
        "weighting__name": "uncertainty",
        "parallel__strategy": "fsdp",
        "memory__checkpoint": 0.5,
    },
    {
        "timesteps__name": "loss_second_moment",
        "timesteps__history": 2,
        "parallel__strategy": "pipeline",
        "parallel__microbatches": 2,
    },
]
SHORT = {"process__steps": 10, "evaluation__steps": 5}


def shared(world, number):
    knobs, told = SHARED[number], Told()
    outcome = train(tiny(**knobs, **SHORT, parallel__workers=2), samples=16 * 12, world=world, observer=told)
    return {"weights": weights(outcome), "told": told.points}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=pytest.mark.nightly if "parallel__strategy" in knobs else [])
        for number, knobs in enumerate(SHARED)
    ],
    ids=lambda number: SHARED[number]["timesteps__name"],
)
def test_two_ranks_learn_what_one_rank_learns(tmp_path, number):
    """Strategies other than DDP take seconds to import; `training/test_ranks.py` has them all."""
    one, both = weights(train(tiny(**SHARED[number], **SHORT), samples=16 * 12)), ranks(shared, tmp_path, number)
    assert [len(rank["told"]) for rank in both] == [2, 0]
    assert_equal(both[0]["weights"], both[1]["weights"])
    assert_equal(one, both[0]["weights"], rtol=1e-3, atol=2e-5)


# ---------------------------------------------------------------------------------------------- knobs that change speed
@pytest.mark.parametrize("levels", [[0, 1], pytest.param([1], marks=pytest.mark.nightly)])
def test_checkpointed_activations_learn_exactly_the_same(levels):
    knobs = {"model__dropout": 0.3}  # the same units are dropped when activations are computed again
    plain = weights(train(tiny(**knobs), samples=FEW))
    assert_equal(plain, weights(train(tiny(**knobs, model__checkpoint_levels=levels), samples=FEW)))


def test_checkpointed_levels_keep_less():
    """Bytes that the backward pass holds on to, beyond parameters and buffers."""

    def kept(levels):
        network = unet.network(tiny(model__checkpoint_levels=levels).knobs).train()
        own = {parameter.data_ptr() for parameter in [*network.parameters(), *network.buffers()]}
        held = {}

        def pack(tensor):
            if tensor.data_ptr() not in own:
                held[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = network(torch.zeros(64, 1, 8, 8), torch.zeros(64, dtype=torch.int64))
            kept_now = sum(held.values())
            output.sum().backward()
        return kept_now

    none, first, second, every = kept([]), kept([0]), kept([1]), kept([0, 1])
    assert every < first < none
    assert every < second < none
    assert first < second  # full resolution holds most


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.nightly  # a minute of the C++ compiler; `test_unet` compiles less, `test_knobs` without it
@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_compiled_training_learns_the_same_and_its_seconds_are_apart(scope):
    plain = train()
    compiled = train(tiny(compile__mode="default", compile__scope=scope))
    assert 1 <= compiled.points[-1]["compiled_graphs"] <= 20
    assert compiled.points[-1]["graph_breaks"] == 0
    assert compiled.points[0]["compiled_graphs"] == compiled.points[-1]["compiled_graphs"]  # none after the warm-up
    assert_equal(weights(plain), weights(compiled), rtol=1e-3, atol=1e-4)
    assert plain.seconds["compile"] == 0.0
    assert compiled.seconds["compile"] > 1.0
    assert compiled.seconds["train"] < compiled.seconds["compile"]


# --------------------------------------------------------------------------------------------------------- arithmetic
def test_flops_are_counted_as_by_hand():
    """One level, one block, no attention: every product and convolution is known."""
    knobs = digits(model__channels=8, model__norm_groups=4, model__multipliers=[1], model__attention=[]).knobs
    network, pixels, by_hand = unet.network(knobs), 8 * 8, 0

    def count(module, inputs, output):
        nonlocal by_hand
        if isinstance(module, nn.Conv2d):
            by_hand += 2 * module.in_channels * module.kernel_size[0] ** 2 * output.numel()
        elif isinstance(module, nn.Linear):
            by_hand += 2 * module.in_features * output.numel()

    hooks = [module.register_forward_hook(count) for module in network.modules()]
    # On a CPU attention's last layer is not called as a layer.
    network.to("meta")(torch.zeros(1, 1, 8, 8, device="meta"), torch.zeros(1, dtype=torch.int64, device="meta"))
    attention = unet.flops_per_sample(knobs.model, knobs.data) / 3 - by_hand  # two products in the block in the middle
    assert hooks
    assert attention == pytest.approx(2 * 2 * pixels * pixels * 8)


def test_checkpointing_and_dropout_change_no_model_flops():
    plain, other = tiny().knobs, tiny(model__checkpoint_levels=[0, 1], model__dropout=0.3).knobs
    assert unet.flops_per_sample(plain.model, plain.data) == unet.flops_per_sample(other.model, other.data)


def test_the_default_model_has_the_published_cost():
    """DDPM's CIFAR-10 U-Net: 6.1 G multiply-adds per image and pass (Fang et al. 2023, arXiv 2305.10924, table 1)."""
    knobs = cfg.baseline("cifar10").knobs
    passes = unet.flops_per_sample(knobs.model, knobs.data) / 3
    assert passes / 2 == pytest.approx(6.1e9, rel=0.02)
