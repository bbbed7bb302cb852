"""What is learned, what is held out, and what cannot be a set for a classifier."""

import dataclasses

import pytest
import torch

from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.data.images import load
from tunediff.data.knobs import Data
from tunediff.workloads.classification import sets
from tunediff.workloads.classification.knobs import check_files, evaluation_protocol

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


def test_the_ruler_says_how_many_images_it_takes(folder):
    config = cfg.baseline("digits_classifier")
    assert evaluation_protocol(config) == "share of 359 held-out images that are classified right"
    assert evaluation_protocol(cfg.override(config, {"evaluation.images": 100})).startswith("share of 100 ")
    assert evaluation_protocol(cfg.baseline("cifar10_classifier")).startswith("share of 10,000 ")
    path = folder("train/red/0.png", "train/green/0.png", "test/red/0.png", "test/red/1.png", "test/green/0.png")
    folders = cfg.override(cfg.baseline("images_classifier"), {"data.path": path})
    assert evaluation_protocol(folders).startswith("share of 3 ")
    elsewhere = cfg.override(folders, {"data.path": "/not/here"})
    assert evaluation_protocol(elsewhere) == "share of held-out images that are classified right"


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
