"""Split a set into learned and held-out images: its test split, or a fixed fifth.

Classes are counted without decoding an image.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from tunediff.config import ConfigError
from tunediff.data import sources
from tunediff.data.images import Images, load
from tunediff.data.knobs import Data


def classes(data: Data) -> int:
    """Return the number of classes. Raises `ConfigError` for none, or a different test split."""
    listing, test = sources.find(data), _test_split(data)
    if not isinstance(listing, sources.Listing):
        return 10  # digits and CIFAR-10
    if listing.labels is None:
        why = (
            "a classifier needs labels; allowed: two class folders or more, with every image in one"
            " of them"
        )
        sources.refuse("path", data.path, why)
    if test is not None and isinstance(tested := sources.find(test), sources.Listing):
        if tested.labels is None:
            why = "test/ has not two class folders or more, with every image in one"
            sources.refuse("path", data.path, why)
        if unknown := sorted(set(tested.class_names) - set(listing.class_names)):
            why = f"test/ has classes that train/ has not: {', '.join(unknown)}"
            sources.refuse("path", data.path, why)
    return len(listing.class_names)


def learned(data: Data) -> Images:
    """Return the learned images, with labels. Raises `ConfigError` as `load`, or for none."""
    classes(data)
    return load(data) if _test_split(data) is not None else _fifth_and_rest(load(data))[1]


def held_out(data: Data, count: int | None) -> Images:
    """Return images that are never learned; of a test split `count`, fixed shuffle.

    Raises `ConfigError` as `learned` does.
    """
    classes(data)
    test = _test_split(data)
    if test is None:
        images = _fifth_and_rest(load(data))[0]
        assert images.labels is not None
        pixels, labels = images.pixels[:count], images.labels[:count]
        return dataclasses.replace(images, pixels=pixels, labels=labels)
    images = load(dataclasses.replace(test, max_images=count))
    if not isinstance(listing := sources.find(data), sources.Listing):
        return images
    # The test split may lack classes: its class numbers become those of the learned split.
    numbers = torch.tensor([listing.class_names.index(name) for name in images.class_names])
    assert images.labels is not None
    labels, names = numbers[images.labels], listing.class_names
    return dataclasses.replace(images, labels=labels, class_names=names)


def _test_split(data: Data) -> Data | None:
    if data.split != "train":
        return None
    test = dataclasses.replace(data, split="test", max_images=None)
    try:
        sources.find(test)
    except ConfigError:  # a folder with train/ only
        return None
    return test


@functools.lru_cache(maxsize=2)
def _fifth_and_rest(images: Images) -> tuple[Images, Images]:
    """Split off a fifth, the same for all trainings, shuffled since files are sorted by class.

    Cached, as `load` is, so that loader processes of all trainings share one copy.
    """
    assert images.labels is not None
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = order.tensor_split([max(1, len(images) // 5)])
    fifth, rest = (
        dataclasses.replace(
            images,
            pixels=images.pixels[rows],
            labels=images.labels[rows],
            digest=f"{images.digest} {name}",
        )
        for rows, name in zip(parts, ("a fifth", "without a fifth"), strict=True)
    )
    return fifth, rest
