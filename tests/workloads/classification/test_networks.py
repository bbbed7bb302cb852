"""Our networks are those of their papers; those of libraries fit the data, or are refused."""

import dataclasses

import pytest
import torch
from torch import nn
from torchvision.models import resnet as theirs

from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.data.images import load
from tunediff.data.knobs import Data
from tunediff.evaluation import networks
from tunediff.workloads.classification import libraries, sets, train
from tunediff.workloads.classification.knobs import SHIPPED, check_files, evaluation_protocol


def knobs(name="digits_classifier", **values):
    return cfg.override(cfg.baseline(name), {key.replace("__", "."): value for key, value in values.items()}).knobs


def parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


def test_as_many_parameters_as_published():
    with torch.device("meta"):
        assert parameters(networks.resnet18(64, 3, 10)) == 11_173_962
        for cardinality, millions in ((8, 34.4), (16, 68.1)):  # Xie et al. 2017, table 7
            found = parameters(networks.resnext29(cardinality, 64, 3, 10)) / 1e6
            assert found == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize(
    ("ours", "block", "layers", "groups"),
    [
        (lambda: networks.resnet18(64, 3, 10), theirs.BasicBlock, [2, 2, 2, 2], 1),
        (lambda: networks.resnext29(8, 4, 3, 10), theirs.Bottleneck, [3, 3, 3, 1], 8),
    ],
    ids=["resnet18", "resnext29"],
)
def test_the_same_function_as_torchvisions_blocks(ours, block, layers, groups):
    """Its networks with another stem; ResNeXt-29 has three stages."""
    width = 4 if groups > 1 else 64
    ours, other = ours(), theirs.ResNet(block, layers, num_classes=10, groups=groups, width_per_group=width)
    other.conv1, other.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    if block is theirs.Bottleneck:
        other.layer4, other.fc = nn.Identity(), nn.Linear(1024, 10)
    other.load_state_dict(dict(zip(other.state_dict(), ours.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(ours(x), other(x))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_weight_learns_and_blocks_are_found(name):
    config = knobs(model__name=name, model__width=8, model__cardinality=2)
    network = train.network(config)
    logits = network(torch.randn(4, 1, 8, 8))
    assert logits.shape == (4, 10)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    blocks = [module for module in network.modules() if isinstance(module, networks.Block)]
    assert len(blocks) == {"resnet18": 8, "resnext29": 9, "convnet": 3}[name]


def test_flops_are_those_of_three_forward_passes():
    products = 9 * 16 * 8**2 + 16 * 9 * 32 * 4**2 + 32 * 9 * 64 * 2**2 + 64 * 10
    assert train.flops_per_sample(knobs(model__width=16)) == 3 * 2 * products


# ----------------------------------------------------------------------------------------------------------- libraries
def test_networks_of_torchvision_fit_the_data():
    for name in ("torchvision/resnet18", "torchvision/vit_b_32", "torchvision/mobilenet_v2"):
        config = knobs("cifar10_classifier", model__name=name)
        with torch.device("meta"):
            libraries.check(config.model.name, config.data, 10)
            assert train.network(config)(torch.empty(2, 3, 32, 32)).shape == (2, 10)


def test_networks_of_timm_fit_the_data():
    pytest.importorskip("timm")
    for name in ("timm/resnet18", "timm/vit_tiny_patch16_224"):
        config = knobs(model__name=name, data__image_size=32)
        check_files(config, evaluates=True)
        assert train.network(config)(torch.zeros(2, 1, 32, 32)).shape == (2, 10)
    with pytest.raises(ConfigError, match="timm has no such network; did you mean resnet18"):
        check_files(knobs(model__name="timm/resnet18x"), evaluates=True)


@pytest.mark.usefixtures("nothing_installed")
def test_without_timm_its_networks_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"model\.name: 'timm/resnet18' .* pip install '.*\[timm\]'"):
        knobs(model__name="timm/resnet18")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("resnet81", "did you mean resnet18"),
        ("keras/vgg", "allowed: resnet18,.*torchvision/NAME"),
        ("torchvision/resnet19", "torchvision has no such network; did you mean resnet18"),
        ("torchvision/alexnet", "it does not take images of 1×8×8"),
    ],
)
def test_networks_that_cannot_be_are_refused(name, why):
    with pytest.raises(ConfigError, match=f"model.name: '{name}' is not allowed: .*{why}"):
        check_files(knobs(model__name=name), evaluates=True)


def test_knobs_without_effect_are_named():
    config = cfg.override(cfg.baseline("digits_classifier"), {"model.cardinality": 4})
    assert cfg.not_effective(config, "cuda")["model.cardinality"] == "only resnext29 has groups"


# ----------------------------------------- what is learned, what is held out, and what cannot be a set for a classifier
DIGITS = cfg.baseline("digits_classifier").data


def images(path, **values):
    return Data(name="images", path=path, image_size=8, **values)


def test_a_fifth_of_the_digits_is_never_learned():
    whole, learned, held = load(DIGITS), sets.learned(DIGITS), sets.held_out(DIGITS, None)
    assert (len(learned), len(held)) == (1438, 359)
    together = torch.cat([learned.pixels, held.pixels]).flatten(1)
    assert torch.equal(together.sum(0), whole.pixels.flatten(1).sum(0))
    known = {row.numpy().tobytes() for row in learned.pixels}
    assert not any(row.numpy().tobytes() in known for row in held.pixels)
    assert torch.bincount(held.labels).min() > 20, "shuffled: every class is there"
    assert torch.equal(sets.held_out(DIGITS, 50).pixels, held.pixels[:50])
    flipped = dataclasses.replace(DIGITS, horizontal_flip=True)
    assert sets.learned(flipped).pixels is learned.pixels, "divided once, and shared with loader processes once"


def test_the_test_split_is_held_out_where_there_is_one(folder):
    path = folder("train/red/0.png", "train/green/0.png", "train/blue/0.png", "test/red/0.png", "test/blue/0.png")
    data = images(path)
    learned, held = sets.learned(data), sets.held_out(data, None)
    assert (len(learned), len(held)) == (3, 2)
    assert learned.class_names == held.class_names == ("blue", "green", "red")
    assert held.labels.tolist() == [0, 2], "numbered as in train/, also where test/ lacks a class"
    assert held.pixels[0, 2].min() == 255


def test_a_folder_without_test_gives_a_fifth(folder):
    path = folder(*(f"{colour}/{i}.png" for colour in ("red", "green") for i in range(5)))
    for data in (images(path, split="all"), images(path)):
        assert (len(sets.learned(data)), len(sets.held_out(data, None))) == (8, 2)


def test_the_objective_says_what_it_is():
    config = cfg.baseline("digits_classifier")
    assert evaluation_protocol(config) == "share of all held-out images that are classified right"
    assert "at most 100 held-out" in evaluation_protocol(cfg.override(config, {"evaluation.images": 100}))


@pytest.mark.parametrize(
    ("names", "split", "why"),
    [
        (["0.png", "1.png"], "all", "a classifier needs labels; allowed: two class folders or more"),
        (["red/0.png", "1.png"], "all", "a classifier needs labels"),
        (
            ["train/red/0.png", "train/blue/0.png", "test/0.png", "test/1.png"],
            "train",
            "test/ has not two class folders",
        ),
        (
            ["train/red/0.png", "train/blue/0.png", "test/red/0.png", "test/cyan/1.png"],
            "train",
            "that train/ has not: cyan",
        ),
    ],
)
def test_sets_without_classes_are_refused_before_anything_starts(folder, names, split, why):
    config = cfg.override(cfg.baseline("images_classifier"), {"data.path": folder(*names), "data.split": split})
    with pytest.raises(ConfigError, match=rf"data\.path: '.*' is not allowed: .*{why}"):
        check_files(config.knobs, evaluates=True)
